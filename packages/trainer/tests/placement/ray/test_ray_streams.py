"""The connections over which an elastic run brings whole tensors, with peers that misbehave."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from waiting import DEADLINE_S, NEVER_S

from engine_api.errors import PeerError, RolloutError

pytest.importorskip("ray", reason="the extra ray")

from engine_trainer.placement.ray import streams
from engine_trainer.placement.ray.streams import HELLO, StreamWire

TENSORS = {"a": torch.randn(3, 5), "b": torch.arange(6)}


def endless() -> Iterator[tuple[str, torch.Tensor]]:
    return (("a", torch.ones(1 << 16)) for _ in itertools.count())


@pytest.fixture
def sender():
    one = StreamWire("cpu", NEVER_S).serve("127.0.0.1", 1)
    yield one
    one.close()


@contextlib.contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def dial(sender: StreamWire) -> socket.socket:
    host, port, _, _ = sender.address.split(":")
    return socket.create_connection((host, int(port)))


def hello(sender: StreamWire, rank: int) -> bytes:
    _, count, key = sender.address.rsplit(":", 2)
    return HELLO.pack(bytes.fromhex(key), rank, int(count))


def read(sender: StreamWire, found: list[str]) -> None:
    # A sync that ends with an error is the sender's matter here.
    with (
        contextlib.suppress(RolloutError),
        StreamWire("cpu", NEVER_S).receive(sender.address, 0) as received,
    ):
        found += [name for name, _ in received]


def test_a_hello_that_comes_in_two_parts_is_read_whole(sender):
    with dial(sender) as connection:
        message = hello(sender, 0)
        connection.sendall(message[:20])
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        late = threading.Timer(0.3, connection.sendall, [message[20:]])
        late.start()
        assert sender.send(iter(TENSORS.items())) > 0
        late.join()


def test_silent_peers_delay_no_receiver(sender, monkeypatch):
    monkeypatch.setattr(streams, "HELLO_S", NEVER_S)
    found: list[str] = []
    with contextlib.ExitStack() as held:
        for _ in range(3):
            held.enter_context(dial(sender))
        with meanwhile(lambda: read(sender, found)):
            sender.send(iter(TENSORS.items()))
    assert found == list(TENSORS)


def test_a_caller_may_end_the_sync_while_a_peer_is_silent(sender, monkeypatch):
    monkeypatch.setattr(streams, "HELLO_S", NEVER_S)

    def ended() -> None:
        raise PeerError("its process has ended")

    with dial(sender), pytest.raises(PeerError, match="its process has ended"):
        sender.send_watched(iter(TENSORS.items()), ended)


def test_a_caller_may_end_the_sync_while_all_receivers_read(sender):
    begun = threading.Event()

    def ended() -> None:
        if begun.is_set():
            raise PeerError("its process has ended")

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in endless():
            begun.set()
            yield pair

    with (
        meanwhile(lambda: read(sender, [])),
        pytest.raises(PeerError, match="its process has ended"),
    ):
        sender.send_watched(export(), ended)


def test_a_receiver_that_fails_before_it_reads_is_noticed(sender):
    with (
        pytest.raises(ValueError, match="its own"),
        StreamWire("cpu", NEVER_S).receive(sender.address, 0),
    ):
        raise ValueError("its own")
    with pytest.raises(PeerError, match="receiver 0 closed the connection"):
        sender.send(endless())


def test_more_descriptors_than_select_takes_do_no_harm():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"this process may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    try:
        one = StreamWire("cpu", NEVER_S).serve("127.0.0.1", 1)
        found: list[str] = []
        with meanwhile(lambda: read(one, found)):
            one.send(iter(TENSORS.items()))
        one.close()
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == list(TENSORS)

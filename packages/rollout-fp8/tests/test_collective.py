"""The store at which sender and receivers of a broadcast meet: what is said where it is not reached."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from test_plan import rows, source
from waiting import NEVER_S

from rollout_fp8.plan import make_plan
from rollout_fp8.transports import collective
from rollout_fp8.transports.channel import PeerError
from rollout_fp8.transports.collective import CollectiveIncoming, CollectiveOutgoing, Group, _store

CPU = torch.device("cpu")


class Told:
    """A channel at whose other end a sender says where to join."""

    def __init__(self, port: int) -> None:
        self.port = port

    def receive(self, tag: str) -> tuple[Any, ...]:
        assert tag == "join"
        return "127.0.0.1", self.port, 1, 2


def test_a_store_that_a_receiver_does_not_reach_is_named_with_what_to_look_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # nobody listens there any more
    plan = make_plan([source("w", rows((128, 128), 1))], dtype=torch.bfloat16, bucket_bytes=1 << 20).wire
    channel: Any = Told(port)
    with pytest.raises(PeerError, match=rf"cannot join .*127\.0\.0\.1:{port}[^$]*to do: .*reach"):
        CollectiveIncoming(plan, CPU, timeout_s=1.0).open(channel)


def test_a_store_that_cannot_be_opened_is_named_with_what_to_look_at() -> None:
    with pytest.raises(PeerError, match=r"cannot open .*no-such-host\.invalid[^$]*to do: .*address of this host"):
        CollectiveOutgoing(CPU, "no-such-host.invalid", timeout_s=1.0).open([])


def make_groups(monkeypatch, size: int) -> list[Group]:
    """Return the sender and its receivers, in one process, with a timeout that no test outlasts."""
    monkeypatch.setattr(collective, "_without_watchdog", nullcontext)  # the environment is not for threads to change
    store = _store("127.0.0.1", 0, size, NEVER_S)
    stores = [store, *(_store("127.0.0.1", store.port, size, NEVER_S) for _ in range(size - 1))]
    with ThreadPoolExecutor(size) as threads:
        made = [threads.submit(Group, stores[rank], rank, size, CPU, NEVER_S) for rank in range(size)]
        return [future.result() for future in made]


def test_a_receiver_leaves_without_waiting_for_the_broadcasts_that_it_expects(monkeypatch) -> None:
    """A receiver that fails tells its sender after it has left: the sender must not wait for the group's timeout."""
    sender, leaves = make_groups(monkeypatch, 2)
    buffer = torch.zeros(1 << 20, dtype=torch.uint8)
    coming = [leaves.broadcast(buffer) for _ in range(2)]
    leaves.abort()
    coming.clear()
    # Only now does the first of them come, so that the group itself ends, too.
    sender.broadcast(buffer.clone())
    sender.abort()


def test_one_that_failed_and_keeps_its_error_holds_no_other(monkeypatch) -> None:
    """Over gloo: connections live as long as any broadcast over them, wherever that is referred to."""
    sender, waits, leaves = make_groups(monkeypatch, 3)
    buffer = torch.zeros(1 << 20, dtype=torch.uint8)
    coming = [waits.broadcast(buffer) for _ in range(2)]
    leaves.abort()

    def send_three() -> None:
        for _ in range(3):
            sender.wait(sender.broadcast(buffer.clone()))

    with pytest.raises(PeerError, match="a broadcast failed") as kept:
        send_three()
    sender.abort()
    waits.abort()
    coming.clear()  # waits for the two broadcasts: they end because the sender has left, not because its error is let go
    assert kept.value

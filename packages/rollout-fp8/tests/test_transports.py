"""Weights that arrive in another process: every byte, and errors in time on both sides."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
import torch
from served_model import ServedModel
from torch.multiprocessing import reductions
from transport_peers import CPU, Spoilt, send, stream_of
from transport_processes import SPAWN, Receivers, check_bytes, folder, started
from waiting import DEADLINE_S, NEVER_S

from engine_api.errors import RolloutError
from rollout_fp8.transports import channel, handshake, ipc
from rollout_fp8.transports.channel import Channel, PeerError
from rollout_fp8.transports.listener import MAX_UNPROVEN, Listener, connect
from rollout_fp8.transports.remote import receive_weights
from rollout_fp8.transports.sender import Sender
from rollout_fp8.transports.workers import SentWorkers
from rollout_fp8.wire.audit import Audit
from rollout_fp8.wire.format import WirePlan

pytestmark = pytest.mark.distributed
KINDS = ["shm", "collective"]
__all__ = ["folder", "started"]  # fixtures


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tp", "fp8"), [(1, False), (1, True), (2, False)], ids=["bf16", "fp8", "two receivers"]
)
def test_every_byte_arrives_sync_after_sync_over_the_same_plan_and_buffers(
    started, kind, tp, fp8
) -> None:
    receivers = started(Receivers(tp, fp8=fp8, defects=("late",) * tp))
    sender = started(Sender(kind=kind, receivers=tp, timeout_s=NEVER_S))
    plans, buffers = set(), []
    kept: Any = None
    for seed in range(3):
        stream = kept = stream_of(seed, fp8=fp8, kept=kept)
        receivers.tell(sender.address)
        delivery = sender.send_weights(stream)
        rows = receivers.rows()
        for row in rows:
            check_bytes(row, seed, tp, fp8)
            assert row[5].keys() == {"gather", "quantize", "transfer"} - (
                {"gather"} - delivery.seconds.keys()
            )
            assert row[6] == delivery.checksums
        plans.add(tuple(row[3] for row in rows))
        buffers.append([row[4] for row in rows])
        audit = Audit(stream.plan, [boxes for boxes, _ in delivery.answers])
        audit.check(delivery.checksums, [sums for _, sums in delivery.answers])
    assert len(plans) == 1
    assert buffers[0] == buffers[2]
    assert all(len(seen) == 2 for seen in buffers[2])


@pytest.mark.parametrize("kind", KINDS)
def test_another_plan_is_told_anew(started, kind) -> None:
    receivers = started(Receivers())
    sender = started(Sender(kind=kind, timeout_s=NEVER_S))
    for seed, size in enumerate([300_000, 500_000]):
        receivers.tell(sender.address)
        sender.send_weights(stream_of(seed, fp8=False, bucket_bytes=size))
        check_bytes(receivers.rows()[0], seed, 1, False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_corrupted_bucket_is_found_by_the_audit(started, kind) -> None:
    def flip(bucket: Any, buffer: torch.Tensor) -> None:
        buffer[bucket.slices[0].start + 5] ^= 4
        flipped.append(bucket.slices[0].tensor.name)

    flipped: list[str] = []
    receivers = started(Receivers(fp8=True))
    sender = started(Sender(kind=kind, timeout_s=NEVER_S))
    receivers.tell(sender.address)
    stream = stream_of(0, fp8=True)
    delivery = sender.send_weights(Spoilt(stream, flip))
    ((boxes, sums),) = delivery.answers
    with pytest.raises(RolloutError, match=f"1 of .* tensors differ: {flipped[0]}"):
        Audit(stream.plan, [boxes]).check(delivery.checksums, [sums])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_that_dies_or_raises_fails_the_sync_for_all_and_the_next_one_is_good(
    started, kind
) -> None:
    for defect, said in [
        ("kill", "receiver 1(: it)? closed the channel"),
        ("raise", "ValueError: no room for bucket 2"),
    ]:
        receivers = started(Receivers(2, defects=(None, defect)))
        sender = started(Sender(kind=kind, receivers=2, timeout_s=NEVER_S))
        receivers.tell(sender.address)
        with pytest.raises(RolloutError, match=said):
            sender.send_weights(stream_of(0, fp8=False))
        other = receivers.results.get(timeout=DEADLINE_S)
        assert other[0] == "error"
        again = started(Receivers(2))
        again.tell(sender.address)
        sender.send_weights(stream_of(1, fp8=False))
        for row in again.rows():
            check_bytes(row, 1, 2, False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_that_stalls_is_an_error_in_time(started, kind) -> None:
    receivers = started(Receivers(defects=("stop",)))
    sender = started(Sender(kind=kind, timeout_s=3))
    receivers.tell(sender.address)
    with pytest.raises(RolloutError, match=r"silent|[Tt]imed out"):
        sender.send_weights(stream_of(0, fp8=False))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("defect", "said"),
    [
        ("kill", "closed the channel|broadcast failed"),
        ("stop", r"silent|[Tt]imed out"),
        ("raise", "the engine broke"),
    ],
)
def test_a_sender_that_dies_stalls_or_raises_is_an_error_at_the_receiver(
    kind, defect, said
) -> None:
    addresses, results = SPAWN.Queue(), SPAWN.Queue()
    process = SPAWN.Process(target=send, args=(addresses, results, kind, defect, NEVER_S))
    process.start()
    try:
        address = addresses.get(timeout=DEADLINE_S)
        # Only a sender that says nothing more is to be given up by the clock.
        limit = 4 if defect == "stop" else NEVER_S
        with (
            pytest.raises(RolloutError, match=said),
            receive_weights(address, device=CPU, timeout_s=limit) as stream,
        ):
            ServedModel(dtype=torch.bfloat16).load_weights(iter(stream))
    finally:
        process.kill()
        process.join()


def in_thread(sender: Sender, stream: Any) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(sender.send_weights(stream))
        except RolloutError as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, found


def test_workers_that_are_reached_by_a_blocking_call(started) -> None:
    receivers = started(Receivers(2))
    sender = started(Sender(kind="shm", receivers=2, timeout_s=NEVER_S))

    def call(name: str, args: tuple[str]) -> Any:
        assert name == "rollout_fp8_pull"
        receivers.tell(args[0])
        rows.extend(receivers.rows())

    for seed in range(2):
        rows: list[Any] = []
        stream = stream_of(seed, fp8=False)
        answers = SentWorkers(call, sender).sync(stream)
        for row in rows:
            check_bytes(row, seed, 2, False)
        Audit(stream.plan, [boxes for boxes, _ in answers]).check(
            stream.checksums(), [sums for _, sums in answers]
        )


def test_a_call_that_fails_or_hangs_ends_the_sync(started) -> None:
    def fails(name: str, args: tuple[str]) -> Any:
        raise RuntimeError("no such method")

    over = threading.Event()
    with pytest.raises(RuntimeError, match="no such method"):
        SentWorkers(fails, started(Sender(kind="shm", timeout_s=NEVER_S))).sync(
            stream_of(0, fp8=False)
        )
    with pytest.raises(PeerError, match="did not connect"):
        SentWorkers(lambda *_, **__: over.wait(), started(Sender(kind="shm", timeout_s=0.5))).sync(
            stream_of(0, fp8=False)
        )
    over.set()


@pytest.mark.slow
def test_workers_that_return_early_or_never_are_an_error(started) -> None:
    with pytest.raises(PeerError, match="returned without the weights"):
        SentWorkers(lambda *_, **__: None, started(Sender(kind="shm", timeout_s=NEVER_S))).sync(
            stream_of(0, fp8=False)
        )
    receivers, over = started(Receivers()), threading.Event()

    def call(name: str, args: tuple[str]) -> Any:
        receivers.tell(args[0])
        over.wait()

    with pytest.raises(PeerError, match="do not return"):
        SentWorkers(call, started(Sender(kind="shm", timeout_s=5))).sync(stream_of(0, fp8=False))
    over.set()


def test_weights_that_are_left_untaken_fail_on_both_sides(started) -> None:
    sender = started(Sender(kind="shm", timeout_s=5))
    address = sender.address
    thread, found = in_thread(sender, stream_of(0, fp8=False))
    with (
        pytest.raises(RolloutError, match="not read to its end"),
        receive_weights(address, device=CPU) as stream,
    ):
        next(stream.buckets())
    thread.join()
    assert "not read to its end" in str(found[0])


def test_weights_that_are_not_finite_fail_at_the_receiver_too(started) -> None:
    def poison(*_: Any) -> None:
        raise RolloutError("not finite: model.norm.weight", where="weight sync")

    sender = started(Sender(kind="shm", timeout_s=5))
    stream, address = stream_of(0, fp8=False), sender.address
    stream.checksums = poison
    thread, found = in_thread(sender, stream)
    with (
        pytest.raises(PeerError, match=r"not finite: model.norm.weight"),
        receive_weights(address, device=CPU) as taken,
    ):
        for _ in taken:
            pass
    thread.join()
    assert found[0].what == "not finite: model.norm.weight"


def test_nobody_who_does_not_come_is_waited_for_longer_than_the_timeout_or_the_watch_allows(
    started,
) -> None:
    sender = started(Sender(kind="shm", timeout_s=0.5))
    with pytest.raises(PeerError, match="receiver 0 did not connect"):
        sender.send_weights(stream_of(0, fp8=False))
    sender = started(Sender(kind="shm", timeout_s=NEVER_S))

    def gone() -> None:
        raise RolloutError("the server has ended")

    with pytest.raises(RolloutError, match="the server has ended"):
        sender.send_weights(stream_of(0, fp8=False), gone)


@pytest.mark.slow
def test_a_receiver_of_an_earlier_sync_is_sent_away(started) -> None:
    sender = started(Sender(kind="shm", timeout_s=0.3))
    late = sender.address
    with pytest.raises(PeerError, match="did not connect"):
        sender.send_weights(stream_of(0, fp8=False))
    sender.timeout_s = 10.0
    thread, found = in_thread(sender, stream_of(1, fp8=False))
    with (
        pytest.raises(PeerError, match="a missing receiver of sync 1, got receiver 0 of sync 0"),
        receive_weights(late, device=CPU),
    ):
        pass
    thread.join()
    assert "did not connect" in str(found[0])


def test_one_of_an_earlier_sync_that_comes_again_and_again_does_not_hold_the_sender(
    started,
) -> None:
    """Check that all receivers have one deadline, whatever the number of refused peers."""
    sender = started(Sender(kind="shm", timeout_s=1.0))
    place, over = sender.address.partition("#")[0], threading.Event()

    def nag() -> None:
        while not over.is_set():
            with suppress(PeerError):
                channel = connect(place, DEADLINE_S)
                with closing(channel):
                    channel.send("hello", 0, 99)
                    channel.receive("plan")

    thread = threading.Thread(target=nag)
    thread.start()
    try:
        with pytest.raises(PeerError, match="receiver 0 did not connect"):
            sender.send_weights(stream_of(0, fp8=False))
    finally:
        over.set()
        sender.close()
        thread.join()


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_a_stranger_is_not_taken_in_and_keeps_nobody_out(started, host, monkeypatch) -> None:
    listener = started(Listener(host))
    accepted: list[Any] = []
    thread = threading.Thread(
        target=lambda: accepted.append(listener.accept("a friend", DEADLINE_S))
    )
    thread.start()
    with dial(listener) as guesses:
        message, _ = handshake.respond_to_challenge(b"guessed", guesses.recv(handshake.NONCE))
        guesses.sendall(message)
        assert guesses.recv(1) == b""
    friend = started(connect(listener.address, DEADLINE_S))
    thread.join()
    accepted[0].send("hello", 1)
    assert friend.receive("hello") == (1,)
    started(accepted[0])


def dial(listener: Listener) -> socket.socket:
    kind, _, place = listener.address.partition(":")
    if kind == "tcp":
        return socket.create_connection(("127.0.0.1", int(place.rpartition(":")[2])))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(place)
    return connection


# A process that knows no secret: many connections that say nothing, and one that sends a byte now
# and then.
ATTACK = """
import socket, sys, time
def dial():
    if sys.argv[1] == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(sys.argv[2])
        return connection
    host, _, port = sys.argv[2].rpartition(":")
    return socket.create_connection((host, int(port)))
LENGTH = bytes([0, 0, 0, 255])  # of a message, to one that reads its length first
dripping = dial()
dripping.send(LENGTH)
silent = [dial() for _ in range(40)]
print("connected", flush=True)
while True:
    time.sleep(0.05)
    try:
        dripping.send(b"x")
    except OSError:  # it was sent away: once more
        dripping = dial()
        dripping.send(LENGTH)
"""


@pytest.fixture
def attacked(started) -> Iterator[Callable[[Listener], None]]:
    made: list[subprocess.Popen[str]] = []

    def attack(listener: Listener) -> None:
        kind, _, place = listener.address.partition(":")
        made.append(
            subprocess.Popen(
                [sys.executable, "-c", ATTACK, kind, place], stdout=subprocess.PIPE, text=True
            )
        )
        assert made[-1].stdout is not None
        assert made[-1].stdout.readline() == "connected\n"

    yield attack
    for process in made:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_unproven_that_send_nothing_or_one_byte_at_a_time_hold_nobody(
    started, attacked, host
) -> None:
    listener = started(Listener(host))
    attacked(listener)
    looks: list[float] = []
    with pytest.raises(PeerError, match="did not connect"):
        listener.accept("a friend", 2.0, lambda: looks.append(time.monotonic()))
    assert looks, "whoever watches is asked meanwhile"
    accepted: list[Channel] = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept("a friend", 60)))
    thread.start()
    friend = started(connect(listener.address, 60))
    thread.join()
    started(accepted[0]).send("hello", 1)
    assert friend.receive("hello") == (1,)


def test_unproven_are_forgotten_when_their_time_is_up_and_never_many(started, monkeypatch) -> None:
    listener = started(Listener("127.0.0.1"))
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(dial(listener))
            with pytest.raises(PeerError):
                listener.accept("a friend", 0.0)
        assert len(listener._unproven) == MAX_UNPROVEN
        monkeypatch.setattr("rollout_fp8.transports.listener.HANDSHAKE_S", 0.0)
        last = stack.enter_context(dial(listener))
        with pytest.raises(PeerError):
            listener.accept("a friend", 1.0)
        last.settimeout(30)
        assert len(last.recv(handshake.NONCE)) == handshake.NONCE
        assert last.recv(1) == b""


def test_friends_that_come_together_are_all_taken_in(started) -> None:
    listener = started(Listener("127.0.0.1"))
    found: list[Channel] = []
    threads = [
        threading.Thread(target=lambda: found.append(connect(listener.address, 60)))
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    accepted = [started(listener.accept("a friend", 60)) for _ in range(5)]
    for thread in threads:
        thread.join()
    for friend in found:
        started(friend).send("hello", 1)
    assert [one.receive("hello") for one in accepted] == [(1,)] * 5


def test_a_listener_that_drips_does_not_hold_who_connects(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                while True:
                    connection.send(b"x")
                    time.sleep(0.2)

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        with pytest.raises(PeerError, match="does not accept this process"):
            connect(f"tcp:127.0.0.1:{server.getsockname()[1]}", 1.0)
        thread.join(600)
        assert not thread.is_alive()


def test_a_listeners_own_words_prove_nothing() -> None:
    """Check that a peer that echoes the listener does not know the key."""
    key, theirs = b"key", handshake.nonce()
    message, expected = handshake.respond_to_challenge(key, theirs)
    assert handshake.reply(key, theirs, message) == expected
    assert handshake.reply(key, theirs, message[: handshake.NONCE] + expected) is None
    assert handshake.reply(b"other", theirs, message) is None
    assert handshake.reply(key, handshake.nonce(), message) is None


def test_a_sender_that_is_not_there_or_knows_another_secret(started, monkeypatch) -> None:
    with pytest.raises(PeerError, match="cannot reach"):
        connect("unix:/nowhere/weights", 1)
    listener = started(Listener())
    # Each end gets another secret.
    monkeypatch.setattr(channel, "secret", lambda purpose: os.urandom(32))
    thread = threading.Thread(target=_take_nobody, args=(listener,))
    thread.start()
    with pytest.raises(PeerError, match="does not accept this process") as caught:
        connect(listener.address, DEADLINE_S)
    assert "ROLLOUT_FP8_KEY" in caught.value.remedy
    thread.join()


def _take_nobody(listener: Listener) -> None:
    with pytest.raises(PeerError, match="did not connect"):
        listener.accept("a friend", 1)


def test_secrets_are_made_once_and_differ_by_purpose(monkeypatch) -> None:
    monkeypatch.delenv(channel.KEY, raising=False)
    first = channel.secret("channel")
    assert channel.secret("channel") == first != channel.secret("http")
    assert len(os.environ[channel.KEY]) == 64
    monkeypatch.delenv(channel.KEY)
    assert channel.secret("channel") != first


def test_cuda_memory_is_opened_on_the_senders_gpu_as_it_is_counted_here(monkeypatch) -> None:
    """Check it for any wrapper of torch's function: SGLang's takes ``*args``.

    Classes are the receiver's; none travels.
    """
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    own = {
        "storage_device": 5,
        "tensor_cls": torch.Tensor,
        "storage_cls": torch.storage.TypedStorage,
    }
    places = {
        "storage_device": ipc.STORAGE_DEVICE,
        "tensor_cls": ipc.TENSOR_CLASS,
        "storage_cls": ipc.STORAGE_CLASS,
    }
    assert {name: names.index(name) for name in own} == places
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *args: args)
    incoming = ipc.IpcIncoming(
        WirePlan(tensors={}, buckets=(), slots=(), notes={}), torch.device("cuda", 0)
    )
    incoming._source = torch.device("cuda", 5)
    assert incoming._opened(tuple(names)) == tuple(own.get(name, name) for name in names)


@pytest.mark.parametrize(("kind", "device"), [("ipc", "cpu"), ("shm", "cuda")])
def test_a_kind_that_does_not_fit_the_device_is_refused(kind, device) -> None:
    from rollout_fp8.transports.kinds import outgoing

    plan = stream_of(0, fp8=False).plan
    with pytest.raises(RolloutError, match=f"'{kind}' cannot carry weights on {device}"):
        outgoing(kind, plan, torch.device(device), None, 1.0)

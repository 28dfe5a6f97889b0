"""Weights that arrive in another process: every byte, and an error in time on both sides when anything breaks."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import tempfile
import threading
import time
from multiprocessing.connection import Client
from typing import Any

import pytest
import torch
from served_model import ServedModel, checkpoint
from torch.multiprocessing import reductions
from transport_peers import CPU, Spoilt, send, serve, stream_of

from engine_api.errors import RolloutError
from rollout_fp8.audit import Audit
from rollout_fp8.quantize import quantize
from rollout_fp8.transports import channel, ipc
from rollout_fp8.transports.channel import PeerError
from rollout_fp8.transports.listener import Listener, connect
from rollout_fp8.transports.remote import receive_weights
from rollout_fp8.transports.sender import Sender
from rollout_fp8.transports.workers import SentWorkers
from rollout_fp8.wire import WirePlan

pytestmark = pytest.mark.distributed
KINDS = ["shm", "collective"]
SPAWN = multiprocessing.get_context("forkserver")  # new processes, that need not import torch once more
SPAWN.set_forkserver_preload(
    ["torch._dynamo", "rollout_fp8.receiver", "rollout_fp8.transports.remote"]
)  # a trace needs the first
channel.secret("channel")  # before the first of them, that they inherit it


class Receivers:
    """Processes that serve, one a rank."""

    def __init__(self, tp: int = 1, *, fp8: bool = False, defects: tuple[str | None, ...] = (), timeout_s: float = 30.0,
                 device: str = "cpu") -> None:  # fmt: skip
        self.results: Any = SPAWN.Queue()
        self.addresses = [SPAWN.Queue() for _ in range(tp)]
        defects = defects or (None,) * tp
        self.processes = [
            SPAWN.Process(
                target=serve, args=(self.addresses[r], self.results, r, tp, fp8, device, defects[r], timeout_s)
            )
            for r in range(tp)
        ]
        for process in self.processes:
            process.start()
        for _ in self.processes:
            assert self.results.get(timeout=120) == "up"

    def tell(self, address: str) -> None:
        for queue in self.addresses:
            queue.put(address)

    def rows(self) -> list[Any]:
        return sorted((self.results.get(timeout=60) for _ in self.processes), key=lambda row: row[1])

    def close(self) -> None:
        for queue, process in zip(self.addresses, self.processes, strict=True):
            queue.put(None)
            process.join(2)
            process.kill()
            process.join()


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Processes that are killed leave a folder behind; all of them inherit this place for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("sockets")))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture
def started():
    """Closes what a test has started."""
    things: list[Any] = []

    def add(thing):
        things.append(thing)
        return thing

    yield add
    for thing in things:
        thing.close()


def expected(seed: int, tp: int, rank: int, fp8: bool) -> dict[str, Any]:
    """What the server's own loader makes of the checkpoint."""
    model = ServedModel(tp=tp, rank=rank, fp8=fp8, dtype=torch.bfloat16)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in checkpoint(seed).items():
        if fp8 and "_proj" in name:
            tensors[name], tensors[name + "_scale_inv"] = quantize(tensor, scales="fp32")
        else:
            tensors[name] = tensor.to(torch.bfloat16)
    model.load_weights(tensors.items())
    return {name: p.detach().contiguous().view(torch.uint8).numpy() for name, p in model.named_parameters()}


def check_bytes(row: Any, seed: int, tp: int, fp8: bool) -> None:
    assert row[0] == "ok", row
    want = expected(seed, tp, row[1], fp8)
    assert row[2].keys() == want.keys()
    for name, raw in row[2].items():
        assert (raw == want[name]).all(), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tp", "fp8"), [(1, False), (1, True), (2, False)], ids=["bf16", "fp8", "two receivers"])
def test_every_byte_arrives_sync_after_sync_over_the_same_plan_and_buffers(started, kind, tp, fp8) -> None:
    receivers = started(Receivers(tp, fp8=fp8, defects=("late",) * tp))
    sender = started(Sender(kind=kind, receivers=tp, timeout_s=30))
    plans, buffers = set(), []
    kept: Any = None
    for seed in range(3):
        stream = kept = stream_of(seed, fp8=fp8, kept=kept)
        receivers.tell(sender.address)
        delivery = sender.send_weights(stream)
        rows = receivers.rows()
        for row in rows:
            check_bytes(row, seed, tp, fp8)
            assert row[5].keys() == {"gather", "quantize", "transfer"} - ({"gather"} - delivery.seconds.keys())
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
    sender = started(Sender(kind=kind, timeout_s=30))
    for seed, size in enumerate([300_000, 500_000]):
        receivers.tell(sender.address)
        sender.send_weights(stream_of(seed, fp8=False, bucket_bytes=size))
        check_bytes(receivers.rows()[0], seed, 1, False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_corrupted_bucket_is_found_by_the_audit(started, kind) -> None:
    def flip(bucket: Any, buffer: torch.Tensor) -> None:
        buffer[bucket.pieces[0].start + 5] ^= 4
        flipped.append(bucket.pieces[0].tensor.name)

    flipped: list[str] = []
    receivers = started(Receivers(fp8=True))
    sender = started(Sender(kind=kind, timeout_s=30))
    receivers.tell(sender.address)
    stream = stream_of(0, fp8=True)
    delivery = sender.send_weights(Spoilt(stream, flip))
    ((boxes, sums),) = delivery.answers
    with pytest.raises(RolloutError, match=f"1 of .* tensors differ: {flipped[0]}"):
        Audit(stream.plan, [boxes]).check(delivery.checksums, [sums])


@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_that_dies_or_raises_fails_the_sync_for_all_and_the_next_one_is_good(started, kind) -> None:
    for defect, said in [
        ("kill", "receiver 1(: it)? closed the channel"),
        ("raise", "ValueError: no room for bucket 2"),
    ]:
        receivers = started(Receivers(2, defects=(None, defect)))
        sender = started(Sender(kind=kind, receivers=2, timeout_s=20))
        receivers.tell(sender.address)
        begin = time.monotonic()
        with pytest.raises(RolloutError, match=said):
            sender.send_weights(stream_of(0, fp8=False))
        assert time.monotonic() - begin < 15
        other = receivers.results.get(timeout=10)
        assert other[0] == "error"
        again = started(Receivers(2))
        again.tell(sender.address)
        sender.send_weights(stream_of(1, fp8=False))
        for row in again.rows():
            check_bytes(row, 1, 2, False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_that_stalls_is_an_error_in_time(started, kind) -> None:
    receivers = started(Receivers(defects=("stop",), timeout_s=30))
    sender = started(Sender(kind=kind, timeout_s=3))
    receivers.tell(sender.address)
    begin = time.monotonic()
    with pytest.raises(RolloutError, match=r"silent|[Tt]imed out"):
        sender.send_weights(stream_of(0, fp8=False))
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("defect", "said"), [
    ("kill", "closed the channel|broadcast failed"), ("stop", r"silent|[Tt]imed out"), ("raise", "the engine broke"),
])  # fmt: skip
def test_a_sender_that_dies_stalls_or_raises_is_an_error_at_the_receiver(kind, defect, said) -> None:
    addresses, results = SPAWN.Queue(), SPAWN.Queue()
    process = SPAWN.Process(target=send, args=(addresses, results, kind, defect, 30))
    process.start()
    try:
        address = addresses.get(timeout=60)
        begin = time.monotonic()
        with pytest.raises(RolloutError, match=said), receive_weights(address, device=CPU, timeout_s=4) as stream:
            ServedModel(dtype=torch.bfloat16).load_weights(iter(stream))
        assert time.monotonic() - begin < 10
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
    sender = started(Sender(kind="shm", receivers=2, timeout_s=30))

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
        Audit(stream.plan, [boxes for boxes, _ in answers]).check(stream.checksums(), [sums for _, sums in answers])


def test_a_call_that_fails_or_hangs_ends_the_sync(started) -> None:
    def fails(name: str, args: tuple[str]) -> Any:
        raise RuntimeError("no such method")

    over = threading.Event()
    with pytest.raises(RuntimeError, match="no such method"):
        SentWorkers(fails, started(Sender(kind="shm", timeout_s=60))).sync(stream_of(0, fp8=False))
    with pytest.raises(PeerError, match="did not connect"):
        SentWorkers(lambda *_, **__: over.wait(), started(Sender(kind="shm", timeout_s=0.5))).sync(
            stream_of(0, fp8=False)
        )
    over.set()


def test_workers_that_return_early_or_never_are_an_error(started) -> None:
    begin = time.monotonic()
    with pytest.raises(PeerError, match="returned without the weights"):
        SentWorkers(lambda *_, **__: None, started(Sender(kind="shm", timeout_s=60))).sync(stream_of(0, fp8=False))
    assert time.monotonic() - begin < 10
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
    with pytest.raises(RolloutError, match="not taken to their end"), receive_weights(address, device=CPU) as stream:
        next(stream.buckets())
    thread.join()
    assert "not taken to their end" in str(found[0])


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


def test_nobody_who_does_not_come_is_waited_for_longer_than_the_timeout_or_the_watch_allows(started) -> None:
    sender = started(Sender(kind="shm", timeout_s=0.5))
    with pytest.raises(PeerError, match="receiver 0 did not connect"):
        sender.send_weights(stream_of(0, fp8=False))
    sender = started(Sender(kind="shm", timeout_s=60))

    def gone() -> None:
        raise RolloutError("the server has ended")

    with pytest.raises(RolloutError, match="the server has ended"):
        sender.send_weights(stream_of(0, fp8=False), gone)


def test_a_receiver_of_an_earlier_sync_is_sent_away(started) -> None:
    sender = started(Sender(kind="shm", timeout_s=0.3))
    late = sender.address
    with pytest.raises(PeerError, match="did not connect"):
        sender.send_weights(stream_of(0, fp8=False))
    sender.timeout_s = 2.0
    thread, found = in_thread(sender, stream_of(1, fp8=False))
    with (
        pytest.raises(PeerError, match="it came for sync 0 as receiver 0; this is sync 1"),
        receive_weights(late, device=CPU),
    ):
        pass
    thread.join()
    assert "did not connect" in str(found[0])


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_a_stranger_is_not_taken_in_and_keeps_nobody_out(started, host, monkeypatch) -> None:
    listener = started(Listener(host))
    accepted: list[Any] = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept("a friend", 20)))
    thread.start()
    place = listener.address.removeprefix("unix:")
    address = place if host is None else (host, int(place.rpartition(":")[2]))
    with pytest.raises((multiprocessing.AuthenticationError, EOFError, OSError)):
        Client(address, authkey=b"guessed")
    friend = started(connect(listener.address, 5))
    thread.join()
    accepted[0].send("hello", 1)
    assert friend.receive("hello") == (1,)
    started(accepted[0])


def test_a_sender_that_is_not_there_or_knows_another_secret(started, monkeypatch) -> None:
    with pytest.raises(PeerError, match="cannot reach"):
        connect("unix:/nowhere/weights", 1)
    listener = started(Listener())
    monkeypatch.setattr(channel, "secret", lambda purpose: os.urandom(32))  # another one at each end
    thread = threading.Thread(target=_take_nobody, args=(listener,))
    thread.start()
    with pytest.raises(PeerError, match="does not take this process in") as caught:
        connect(listener.address, 5)
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


def test_cuda_memory_is_opened_on_the_senders_gpu_as_it_is_counted_here() -> None:
    """Whatever stands around torch's function: SGLang's own takes ``*args``."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names[ipc.STORAGE_DEVICE] == "storage_device"
    incoming = ipc.IpcIncoming(WirePlan(tensors={}, buckets=(), slots=(), notes={}), torch.device("cuda", 0))
    incoming._source = torch.device("cuda", 5)
    assert incoming._opened(lambda *args: args, tuple(names)) == tuple(5 if n == "storage_device" else n for n in names)


@pytest.mark.parametrize(("kind", "device"), [("ipc", "cpu"), ("shm", "cuda")])
def test_a_kind_that_does_not_fit_the_device_is_refused(kind, device) -> None:
    from rollout_fp8.transports.kinds import outgoing

    plan = stream_of(0, fp8=False).plan
    with pytest.raises(RolloutError, match=f"'{kind}' cannot carry weights on {device}"):
        outgoing(kind, plan, torch.device(device), None, 1.0)

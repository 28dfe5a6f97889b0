"""Wire of the contract: both ends, in processes that the caller has started, and failures."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from exporter_ranks import RESOLUTION, Lora, Shards, exporter
from local_model import CONFIG, PROMPTS, SAMPLING, weights
from served_model import ServedModel, checkpoint
from waiting import DEADLINE_S, NEVER_S

from engine_api.config import LoraConfig, ModelSource
from engine_api.discovery import import_target
from engine_api.errors import RolloutError
from engine_api.registry import RolloutRegistry
from engine_api.rollout import SyncResult, WatchedSender, WeightSender, WeightWire
from rollout_fp8.export.exporter import Exporter
from rollout_fp8.install.receiver import Receiver
from rollout_fp8.install.session import SyncSession
from rollout_fp8.phases import Phases
from rollout_fp8.plugin import SGLANG, VLLM
from rollout_fp8.remote.client import RemoteRollout
from rollout_fp8.transports import channel, collective, remote
from rollout_fp8.transports.channel import PeerError
from rollout_fp8.transports.listener import Listener, connect
from rollout_fp8.transports.sender import _end_of
from rollout_fp8.transports.weight_wire import Wire

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")


class Worker:
    """One worker of a server, in this process."""

    def __init__(self, **arguments: Any) -> None:
        self.model = ServedModel(fp8=True, dtype=torch.bfloat16, **arguments)

    def learn(self, plan):
        self.receiver = Receiver(self.model, plan, self.model.load_weights)
        return [self.receiver.boxes]

    def sync(self, stream):
        self.receiver.sync(stream, Phases(CPU))
        return [(self.receiver.served().tolist(), {})]


class Flipped:
    """Worker whose copy of a weight is damaged after it was installed."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.learn = worker.learn

    def sync(self, stream):
        self._worker.receiver.sync(stream, Phases(CPU))
        self._worker.model.get_parameter("model.norm.weight").data[3] += 1
        return [(self._worker.receiver.served().tolist(), {})]


@pytest.fixture
def ends(monkeypatch):
    """Return an engine's end for two replicas and their ends, in threads.

    The settings that NCCL gets through the environment are not for threads.
    """
    monkeypatch.setattr(collective, "_without_watchdog", nullcontext)
    yield from _wires(NEVER_S)


@pytest.fixture
def impatient_ends(monkeypatch):
    """Return ``ends`` that soon give up on a peer that does not come."""
    monkeypatch.setattr(collective, "_without_watchdog", nullcontext)
    yield from _wires(3.0)


def _wires(timeout_s: float):
    made = [Wire(resolution=RESOLUTION, timeout_s=timeout_s) for _ in range(3)]
    yield made
    for wire in made:
        wire.close()


def together(*works: Any) -> list[Any]:
    """Run functions at the same time, and return the result or error of each."""
    found: list[Any] = [None] * len(works)

    def run(place: int, work: Any) -> None:
        try:
            found[place] = work()
        except RolloutError as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    return found


def receiving(
    wire: WeightWire, address: str, rank: int, session: SyncSession, version: int = 0
) -> Any:
    def work():
        with wire.receive(address, rank) as export:
            return session.run(export, version)

    return work


@pytest.mark.parametrize("plugin", [VLLM, SGLANG], ids=lambda plugin: plugin.name)
def test_both_servers_descriptors_name_it(plugin) -> None:
    assert import_target(plugin.wire, plugin.name) is Wire


def test_two_replicas_serve_what_the_exporter_makes_sync_after_sync(
    ends, tmp_path, monkeypatch
) -> None:
    wire, *others = ends
    assert isinstance(wire, WeightWire)
    export, workers = exporter(tmp_path, "fp8", bucket_bytes=300_000), [Worker(), Worker()]
    sessions = [SyncSession(worker) for worker in workers]
    sender: WeightSender = wire.serve("127.0.0.1", 2)
    for version in range(2):
        stream = export.export(Shards(checkpoint(version), 0, 1))
        # Processes that inherit nothing from each other have other secrets.
        monkeypatch.setattr(
            channel, "secret", lambda purpose: pytest.fail("the key comes with the address")
        )
        address = sender.address
        sent, *results = together(
            lambda stream=stream: sender.send(stream),
            *(
                receiving(other, address, rank, sessions[rank], version)
                for rank, other in enumerate(others)
            ),
        )
        want = ServedModel(fp8=True, dtype=torch.bfloat16)
        want.load_weights(exporter(tmp_path, "fp8").export(Shards(checkpoint(version), 0, 1)))
        for worker, result in zip(workers, results, strict=True):
            assert (result.version, result.audited, result.num_quantized) == (version, True, 14)
            assert result.num_bytes <= sent < 1.1 * result.num_bytes
            for name, parameter in want.named_parameters():
                got = worker.model.get_parameter(name)
                assert torch.equal(got.view(torch.uint8), parameter.view(torch.uint8)), name
    for other in others:
        other.close()
    assert not remote._SESSIONS


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Flipped(Worker()), "tensors differ: model.norm.weight"),
        (lambda: Worker(layers=1), "the server cannot load the trained model"),
    ],
    ids=["damaged", "another model"],
)
def test_a_replica_that_serves_something_else_fails_the_sync_for_all(
    ends, tmp_path, make, said
) -> None:
    wire, good, bad = ends
    export, sender = exporter(tmp_path, "fp8"), wire.serve("127.0.0.1", 2)
    stream, address, sessions = (
        export.export(Shards(checkpoint(0), 0, 1)),
        sender.address,
        [Worker(), make()],
    )
    sent, first, second = together(
        lambda: sender.send(stream),
        receiving(good, address, 0, SyncSession(sessions[0])),
        receiving(bad, address, 1, SyncSession(sessions[1])),
    )
    assert said in str(second)
    assert isinstance(sent, PeerError)
    assert said in str(sent)
    assert isinstance(first, PeerError | SyncResult)  # it may have been through


def test_the_caller_ends_a_sync_whose_receiver_is_gone_before_it_connects(ends, tmp_path) -> None:
    """Nothing but the caller knows it; the deadline is far away."""
    wire, other, _ = ends
    sender = wire.serve("127.0.0.1", 2)
    assert isinstance(sender, WatchedSender)
    stream = exporter(tmp_path, "fp8").export(Shards(checkpoint(0), 0, 1))
    address = sender.address
    asked: list[None] = []

    def watch() -> None:
        asked.append(None)
        if len(asked) > 3:
            raise RolloutError("its process has ended", where="here")

    sent, received = together(
        lambda: sender.send_watched(stream, watch),
        receiving(other, address, 0, SyncSession(Worker())),
    )
    assert "its process has ended" in str(sent)
    assert isinstance(received, PeerError)


def test_weights_that_are_not_finite_are_served_by_nobody(ends, tmp_path) -> None:
    wire, *others = ends
    broken = checkpoint(0)
    broken["model.norm.weight"][5] = float("nan")
    export, sender = exporter(tmp_path, "fp8"), wire.serve("127.0.0.1", 2)
    stream, address = export.export(Shards(broken, 0, 1)), sender.address
    failed = together(
        lambda: sender.send(stream),
        *(
            receiving(other, address, rank, SyncSession(Worker()))
            for rank, other in enumerate(others)
        ),
    )
    assert all(
        isinstance(error, RolloutError) and "not finite: model.norm.weight" in str(error)
        for error in failed
    )


@pytest.mark.slow
def test_a_replica_that_does_not_come_or_comes_with_the_address_of_an_earlier_sync(
    impatient_ends, tmp_path
) -> None:
    wire, first, second = impatient_ends
    export, sender = exporter(tmp_path, "fp8"), wire.serve("127.0.0.1", 2)
    stale = sender.address
    failed = together(
        lambda: sender.send(export.export(Shards(checkpoint(0), 0, 1))),
        receiving(first, stale, 0, SyncSession(Worker())),
    )
    assert "receiver 1 did not connect" in str(failed[0])
    assert isinstance(failed[1], PeerError)
    assert sender.address != stale
    address = sender.address
    sent, late, _ = together(
        lambda: sender.send(export.export(Shards(checkpoint(1), 0, 1))),
        receiving(first, stale, 0, SyncSession(Worker())),
        receiving(second, address, 1, SyncSession(Worker())),
    )
    assert "a missing receiver of sync 1, got receiver 0 of sync 0" in str(late)
    assert "receiver 0 did not connect" in str(sent)


def test_a_stranger_without_the_key_is_not_taken_in(impatient_ends, tmp_path) -> None:
    wire, stranger, _ = impatient_ends
    sender, stream = (
        wire.serve("127.0.0.1", 1),
        exporter(tmp_path, "none").export(Shards(checkpoint(0), 0, 1)),
    )
    guessed = sender.address.rpartition("#")[0] + "#" + "00" * 32
    sent, refused = together(
        lambda: sender.send(stream), receiving(stranger, guessed, 0, SyncSession(Worker()))
    )
    assert "does not accept this process" in str(refused)
    assert "receiver 0 did not connect" in str(sent)


def test_what_no_exporter_of_merged_weights_has_made_is_refused(ends, tmp_path) -> None:
    sender = ends[0].serve("127.0.0.1", 1)
    with pytest.raises(
        RolloutError, match=r"(?s)cannot carry a dict_itemiterator.*rollout.lora: merged"
    ):
        sender.send(iter({"a": torch.ones(2)}.items()))
    adapters = exporter(tmp_path, "none", lora=LoraConfig(rank=1))
    with pytest.raises(RolloutError, match="cannot carry a AdapterStream"):
        sender.send(adapters.export(Lora({}, {})))


@pytest.mark.slow
def test_a_server_behind_the_wire_serves_what_came_over_it(ends, tmp_path) -> None:
    wire, other, _ = ends
    CONFIG.save_pretrained(tmp_path)
    model = ModelSource(path=str(tmp_path))
    arguments = {
        "model": model,
        "pad_token_id": 0,
        "eos_token_ids": (1,),
        "batch_size": 4,
        "dtype": "float32",
    }
    here = RolloutRegistry.create(name="local", device="cpu", **arguments)
    export = Exporter(resolution=RESOLUTION, model=model, dtype="float32")
    sender = wire.serve("127.0.0.1", 1)
    there = RemoteRollout(
        name="local",
        device="cpu",
        arguments=arguments,
        timeout_s=NEVER_S,
        start_timeout_s=DEADLINE_S,
    )
    try:
        for version in (4, 5):
            here.update_weights(iter(weights(version).items()), version)
            stream, address = export.export(Shards(weights(version), 0, 1)), sender.address

            def receive(address: str = address, version: int = version) -> Any:
                with other.receive(address, 0) as received:
                    return there.update_weights(received, version)

            sent, result = together(lambda stream=stream: sender.send(stream), receive)
            assert sent >= result.num_bytes
            assert there.generate(PROMPTS, SAMPLING) == here.generate(PROMPTS, SAMPLING)
    finally:
        there.close()


def test_who_is_gone_is_named_where_only_a_broadcast_fails() -> None:
    listener, ends = Listener(), []
    for _ in range(3):
        thread = threading.Thread(
            target=lambda: ends.append(listener.accept("a receiver", DEADLINE_S))
        )
        thread.start()
        ends.append(connect(listener.address, DEADLINE_S))
        thread.join()
    pairs = [sorted(ends[i : i + 2], key=lambda end: end.peer != "a receiver") for i in (0, 2, 4)]
    pairs[0][1].close()
    pairs[1][1].fail("no room")
    assert [_end_of(mine) for mine, _ in pairs] == ["it closed the channel", "no room", ""]
    for end in (*ends, listener):
        end.close()

"""The parts of the Ray launcher that need no cluster: the channel for weights, the memory estimate, the clocks, the lock."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from engine_api.errors import ConfigError, RankFailure, RolloutError
from engine_trainer.lock import FolderLock
from engine_trainer.sections import RunSection

pytest.importorskip("ray", reason="the extra ray")

from engine_trainer.ray import channel, memory
from engine_trainer.ray.calls import WorkerFailed, WorkerLost, _telling
from engine_trainer.ray.meter import Meter

TENSORS = {
    "a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.randn(2, 2).to(torch.float8_e4m3fn),
    "d": torch.tensor(4.0), "e": torch.arange(6).view(2, 3),
}  # fmt: skip


def carried(export, receivers: int = 2) -> tuple[list[object], list[list[tuple[str, torch.Tensor]]]]:
    """What the sender raised (or None) and each receiver, and what each of them got."""
    store = channel.serve("127.0.0.1", receivers + 1, 20.0)
    outcomes: list[object] = [None] * (receivers + 1)
    got: list[list[tuple[str, torch.Tensor]]] = [[] for _ in range(receivers)]

    def run(rank: int) -> None:
        own = store if rank == 0 else channel.reach("127.0.0.1", store.port, receivers + 1, 20.0)
        one = channel.Channel(own, rank, receivers + 1, "cpu", 20.0)
        try:
            if rank == 0:
                one.send(export)
            else:
                got[rank - 1] = [(name, t.clone()) for name, t in one.receive()]
        except (OSError, RolloutError) as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(receivers + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes, got


@pytest.mark.parametrize("bucket", [1, 50, 1 << 20])
def test_weights_arrive_bit_for_bit_in_order_whatever_the_buckets(monkeypatch, bucket):
    monkeypatch.setattr(channel, "BUCKET_BYTES", bucket)
    outcomes, got = carried(iter(TENSORS.items()))
    assert outcomes == [None] * 3
    for received in got:
        assert [name for name, _ in received] == list(TENSORS)
        for name, tensor in received:
            assert (tensor.dtype, tensor.shape) == (TENSORS[name].dtype, TENSORS[name].shape)
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), TENSORS[name].reshape(-1).view(torch.uint8))


def test_an_export_that_lends_its_tensors_is_copied_in_time():
    def lending():
        buffer = torch.empty(4)
        for i in range(3):
            yield f"t{i}", buffer.fill_(float(i))

    _, got = carried(lending(), receivers=1)
    assert [t.tolist() for _, t in got[0]] == [[float(i)] * 4 for i in range(3)]


def test_an_export_that_fails_is_told_to_the_receivers():
    def failing():
        yield "a", torch.ones(2)
        raise OSError("lost")

    outcomes, _ = carried(failing())
    assert isinstance(outcomes[0], OSError)
    assert all(isinstance(o, RolloutError) for o in outcomes[1:])


def settings(master="float32", compute="bfloat16", **rollout):
    engine = SimpleNamespace(
        model=SimpleNamespace(path="m", revision=None, trust_remote_code=False, config_overrides={}), lora=None,
        precision=SimpleNamespace(master=master, compute=compute), parallelism=SimpleNamespace(dp_replicate=1),
        memory=SimpleNamespace(offload_params=False, offload_optimizer=False),
    )  # fmt: skip
    section = {"quantization": "none", "options": {}, "sleep": True, "offload_engine": False, **rollout}
    config = SimpleNamespace(
        rollout=SimpleNamespace(**section), algorithm=SimpleNamespace(kl=SimpleNamespace(coefficient=0.0))
    )
    return config, engine


def test_the_memory_estimate_by_hand(monkeypatch):
    """8e9 parameters: master 4, bf16 2, gradient 4, moments 8 = 18 bytes over 4 ranks; 2 for the replica."""
    monkeypatch.setattr(memory, "_parameters", lambda *_: 8_000_000_000)
    engine, rollout = 36e9, 16e9

    def check(free, **rollout_settings):
        rooms = [memory.Room(device=f"gpu{i}", free=int(free)) for i in range(4)]
        memory.check(rooms, rooms, *settings(**rollout_settings), "cuda")

    check(engine + rollout)
    with pytest.raises(
        ConfigError, match=r"(?s)gpu0 needs 48.4 GiB.*1 engine rank.s. of 33.5 GiB and 1 replica.s. of 14.9 GiB"
    ):
        check(engine + rollout - 1e6)
    check(engine, offload_engine=True)
    with pytest.raises(ConfigError, match="by turns"):
        check(engine - 1e6, offload_engine=True)
    check(engine + rollout / 2, quantization="fp8")
    host = memory.Room(device="host", free=int(4 * engine + 4 * rollout - 1e6))
    with pytest.raises(ConfigError, match="4 engine rank"):
        memory.check([host] * 4, [host] * 4, *settings(), "cpu")


def test_the_parameters_are_counted_without_memory(sums_model):
    from safetensors.torch import load_file

    expected = sum(t.numel() for t in load_file(sums_model / "model.safetensors").values())
    assert memory._parameters(str(sums_model), None, False, ()) == expected


def test_a_workers_time_and_idle_share(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("engine_trainer.ray.meter.time.monotonic", lambda: now[0])
    meter = Meter()
    meter.add("engine-0")
    meter.add("rollout-0")
    meter.note("engine-0", "train", 1.0)
    meter.note("engine-0", "train", 1.0)
    meter.note("rollout-0", "answer", 8.0)
    now[0] = 110.0
    figures = meter.take()
    assert figures["worker/engine-0/train_s"] == 2.0
    assert figures["worker/engine-0/idle"] == pytest.approx(0.8)
    assert figures["worker/rollout-0/idle"] == pytest.approx(0.2)
    assert figures["worker/idle"] == pytest.approx(0.5)
    now[0] = 111.0
    assert meter.take()["worker/engine-0/idle"] == 1.0


def test_of_several_failures_the_one_that_explains_the_others_is_raised(monkeypatch):
    monkeypatch.setattr("engine_trainer.ray.calls._translate", lambda _, error: error)
    neighbour, own = RankFailure({0: "x"}), ConfigError("a", "wrong")
    broken, lost = WorkerFailed("connection closed"), WorkerLost("died")
    assert _telling([(None, e) for e in (neighbour, broken, own)]) is own
    assert _telling([(None, e) for e in (neighbour, broken)]) is broken
    assert _telling([(None, e) for e in (broken, own, lost)]) is lost


def test_two_runs_in_one_folder(tmp_path):
    one, two = FolderLock(tmp_path), FolderLock(tmp_path)
    one.acquire()
    with pytest.raises(ConfigError, match=r"(?s)another run writes to.*process \d+ on"):
        two.acquire()
    one.release()
    two.acquire()
    two.release()


def test_a_killed_process_holds_no_lock(tmp_path):
    code = (f"import os, signal\nfrom pathlib import Path\nfrom engine_trainer.lock import FolderLock\n"
            f"FolderLock(Path({str(tmp_path)!r})).acquire()\nos.kill(os.getpid(), signal.SIGKILL)")  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    again = FolderLock(tmp_path)
    again.acquire()
    again.release()


def test_fewer_rows_than_a_batch_are_refused(tmp_path):
    section = RunSection(output_dir=str(tmp_path), epochs=2.0)
    assert section.total_steps(8, 8) == 2
    with pytest.raises(ConfigError, match=r"7 rows, but a step takes 8"):
        section.total_steps(7, 8)

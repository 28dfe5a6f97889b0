"""The parts of the Ray launcher that need no cluster.

They are the channel for weights, the memory estimate, the clocks and the lock.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ray_runs import configure, on_ray
from waiting import DEADLINE_S, NEVER_S

from engine_api.capabilities import Capability
from engine_api.comm import SingleComm
from engine_api.errors import ConfigError, RankFailure, RolloutError
from engine_api.plugin import ProbeResult
from engine_api.registry import RolloutRegistry
from engine_trainer.config.sections import DataSection, RaySection, RunSection
from engine_trainer.placement.replica import RolloutSpec
from engine_trainer.run.lock import FolderLock
from engine_trainer.run.run import Run

pytest.importorskip("ray", reason="the extra ray")

from ray.exceptions import ActorDiedError, RayTaskError

from engine_trainer.placement.ray import buckets, calls, channel, cluster
from engine_trainer.placement.ray.calls import Call, WorkerFailed, WorkerLost, _telling, _translate
from engine_trainer.placement.ray.meter import Meter
from engine_trainer.placement.ray.streams import StreamWire
from engine_trainer.placement.ray.workers import EngineWorker
from engine_trainer.rl import on_ray as controller

TENSORS = {
    "a": torch.randn(3, 5),
    "b": torch.randn(7).bfloat16(),
    "c": torch.randn(2, 2).to(torch.float8_e4m3fn),
    "d": torch.tensor(4.0),
    "e": torch.arange(6).view(2, 3),
}


def carried(
    export, receivers: int = 2, wire=channel.WholeWire
) -> tuple[list[object], list[list[tuple[str, torch.Tensor]]]]:
    """Return the sender's error (or None), and each receiver's error and tensors."""
    sender = wire("cpu", 20.0).serve("127.0.0.1", receivers)
    outcomes: list[object] = [None] * (receivers + 1)
    got: list[list[tuple[str, torch.Tensor]]] = [[] for _ in range(receivers)]

    def run(rank: int) -> None:
        try:
            if rank == 0:
                sender.send(export)
                return
            with wire("cpu", 20.0).receive(sender.address, rank - 1) as received:
                got[rank - 1] = [(name, t.clone()) for name, t in received]
        except (OSError, RolloutError) as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(receivers + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    sender.close()
    return outcomes, got


WIRES = pytest.mark.parametrize("wire", [channel.WholeWire, StreamWire])


@WIRES
@pytest.mark.parametrize("bucket", [1, 50, 1 << 20])
def test_weights_arrive_bit_for_bit_in_order_whatever_the_buckets(monkeypatch, bucket, wire):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", bucket)
    outcomes, got = carried(iter(TENSORS.items()), wire=wire)
    assert outcomes == [None] * 3
    for received in got:
        assert [name for name, _ in received] == list(TENSORS)
        for name, tensor in received:
            assert (tensor.dtype, tensor.shape) == (TENSORS[name].dtype, TENSORS[name].shape)
            assert torch.equal(
                tensor.reshape(-1).view(torch.uint8), TENSORS[name].reshape(-1).view(torch.uint8)
            )


@WIRES
def test_an_export_that_lends_its_tensors_is_copied_in_time(wire):
    def lending():
        buffer = torch.empty(4)
        for i in range(3):
            yield f"t{i}", buffer.fill_(float(i))

    _, got = carried(lending(), receivers=1, wire=wire)
    assert [t.tolist() for _, t in got[0]] == [[float(i)] * 4 for i in range(3)]


@WIRES
def test_an_export_that_fails_is_told_to_the_receivers(wire):
    def failing():
        yield "a", torch.ones(2)
        raise OSError("lost")

    outcomes, _ = carried(failing(), wire=wire)
    assert isinstance(outcomes[0], OSError)
    assert all(isinstance(o, RolloutError) for o in outcomes[1:])


@pytest.mark.parametrize("comes", [False, True])
def test_a_receiver_that_has_ended_ends_the_sync_at_once(monkeypatch, comes):
    """It has never connected, or it connected and reads no more. The other one hears of it."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1 << 20)
    sender = StreamWire("cpu", NEVER_S).serve("127.0.0.1", 2)
    outcomes: list[object] = []

    def receive() -> None:
        try:
            with StreamWire("cpu", NEVER_S).receive(sender.address, 0) as received:
                outcomes.append(list(received))
        except RolloutError as error:
            outcomes.append(error)

    def ended() -> None:
        raise RolloutError("its process has ended", where="weight sync")

    thread = threading.Thread(target=receive)
    thread.start()
    if comes:
        with StreamWire("cpu", NEVER_S).receive(sender.address, 1) as received:
            iter(received)
            next_tensor = threading.Thread(target=lambda: next(received))
            next_tensor.start()
            with pytest.raises(RolloutError, match="its process has ended"):
                sender.send_watched(((str(i), torch.ones(1 << 18)) for i in range(99)), ended)
            next_tensor.join(DEADLINE_S)
    else:
        with pytest.raises(RolloutError, match="its process has ended"):
            sender.send_watched(iter(TENSORS.items()), ended)
    thread.join(DEADLINE_S)
    sender.close()
    (outcome,) = outcomes
    assert isinstance(outcome, RolloutError)


def test_a_stranger_and_a_receiver_of_another_sync_take_no_part():
    sender = StreamWire("cpu", NEVER_S).serve("127.0.0.1", 1)
    place, count, key = sender.address.rsplit(":", 2)
    refused = [f"{place}:{count}:{'00' * 32}", f"{place}:{int(count) + 1}:{key}"]

    def others() -> None:
        for address in refused:
            with (
                pytest.raises(RolloutError, match="ended the sync"),
                StreamWire("cpu", NEVER_S).receive(address, 0) as received,
            ):
                list(received)
        with StreamWire("cpu", NEVER_S).receive(sender.address, 0) as received:
            done.append([name for name, _ in received])

    done: list[list[str]] = []
    thread = threading.Thread(target=others)
    thread.start()
    sender.send(iter(TENSORS.items()))
    thread.join(DEADLINE_S)
    sender.close()
    assert done == [list(TENSORS)]


def test_a_start_has_the_longer_of_two_deadlines(monkeypatch):
    asked = []
    monkeypatch.setattr(
        calls, "finish", lambda _, timeout_s, **named: asked.append((timeout_s, named)) or []
    )
    pool = calls.Pool("engine", [], 30.0, Meter())
    pool.finish([])
    pool.finish([], start_timeout_s=20.0)
    pool.finish([], start_timeout_s=120.0)
    assert asked == [(30.0, {}), (30.0, {}), (120.0, {"setting": "ray.start_timeout_s"})]


@pytest.fixture
def apart(tmp_path):
    """Build the spec of the rollout ``wired`` for an engine.

    Only its wire is made here.
    """

    def spec(name="wired", device="cpu"):
        config = on_ray(tmp_path, tmp_path, rollout={"name": name, "quantization": "fp8"})
        return RolloutSpec(
            section=config.rollout,
            reward=config.reward,
            tokenizer=None,
            engine=config.engine,
            engine_config=config.engine.build(seed=0, total_steps=1),
            engine_device=device,
        )

    RolloutRegistry.register(backend="wired", device="cpu", wire=f"{__name__}:Wired")(Wired)
    yield spec
    RolloutRegistry.unregister("wired")


class Wired:
    def __init__(self, *, resolution, timeout_s):
        self.made = resolution.device, timeout_s


def test_a_rollouts_own_wire_is_taken_where_both_sides_can_use_it(apart):
    shards = frozenset({Capability.EXPORT_SHARDS})
    assert channel.why_whole(apart(), shards) == ""
    assert channel.make_wire(apart(), 3.0, whole=False).made == ("cpu", 3.0)
    assert channel.why_whole(apart(), frozenset()) == "engine 'fsdp2' exports no shards"
    assert channel.why_whole(apart("local"), shards) == "rollout 'local' has no wire of its own"
    other = replace(apart(), engine_device="cuda", section=replace(apart().section, device="cpu"))
    assert channel.why_whole(other, shards) == "the rollout is on cpu, the engine on cuda"
    assert isinstance(channel.make_wire(other, 3.0, whole=True), channel.WholeWire)


def test_an_engines_process_without_the_rollouts_package_sends_whole_tensors(apart):
    absent = ProbeResult(ok=False, reason="vllm is not installed")
    RolloutRegistry.register(
        backend="wired", device="cpu", wire="nowhere:Wire", probe=lambda _: absent
    )(Wired)
    said = channel.why_whole(apart(), frozenset({Capability.EXPORT_SHARDS}))
    assert "cannot create the exporter" in said
    assert "vllm is not installed" in said


@pytest.mark.parametrize(("quantization", "dtype"), [("none", torch.bfloat16), ("fp8", None)])
def test_whole_tensors_come_in_the_rollouts_dtype_unless_it_quantizes(apart, quantization, dtype):
    section = replace(apart().section, quantization=quantization, options={"dtype": "bfloat16"})
    asked = []
    engine = SimpleNamespace(get_per_tensor_param=lambda **arguments: asked.append(arguments))
    channel.exporter_for(replace(apart("local"), section=section), whole=True).export(engine)
    assert asked == [{"dtype": dtype}]


def test_weights_of_another_version_than_the_controllers_are_not_sent():
    worker = EngineWorker("engine-0")
    worker._engines = [SimpleNamespace(engine=SimpleNamespace(weight_version=3))]
    worker._sender = SimpleNamespace(address="a")
    assert worker.wire_address(3) == "a"
    with pytest.raises(RolloutError, match="the engine has weights of version 3, not 4"):
        worker.wire_address(4)


def test_elastic_replicas_are_replicas_of_their_own(tmp_path):
    for section in ({"elastic": True}, {"elastic": True, "rollouts": None}):
        with pytest.raises(ConfigError, match=r"(?s)ray.elastic.*replicas of their own"):
            on_ray(tmp_path, tmp_path, ray=section)
    with pytest.raises(ConfigError, match=r"(?s)ray.elastic.*replicas of their own"):
        configure(tmp_path, tmp_path, ray={"elastic": True, "rollouts": 2})


def test_a_workers_time_and_idle_share(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("engine_trainer.placement.ray.meter.time.monotonic", lambda: now[0])
    meter = Meter()
    meter.add("engine-0")
    meter.add("rollout-0")
    meter.note("engine-0", "train", 1.0)
    meter.note("engine-0", "train", 1.0)
    meter.note("rollout-0", "generate_and_score", 8.0)
    now[0] = 110.0
    figures = meter.take()
    assert figures["worker/engine-0/train_s"] == 2.0
    assert figures["worker/engine-0/idle"] == pytest.approx(0.8)
    assert figures["worker/rollout-0/idle"] == pytest.approx(0.2)
    assert figures["worker/idle"] == pytest.approx(0.5)
    now[0] = 111.0
    assert meter.take()["worker/engine-0/idle"] == 1.0


def test_of_several_failures_the_one_that_explains_the_others_is_raised(monkeypatch):
    monkeypatch.setattr("engine_trainer.placement.ray.calls._translate", lambda _, error: error)
    neighbour = RankFailure({0: "x"})
    own = ConfigError("a", "wrong")
    broken = WorkerFailed("connection closed")
    lost = WorkerLost("died")
    assert _telling([(None, e) for e in (neighbour, broken, own)]) is own
    assert _telling([(None, e) for e in (neighbour, broken)]) is broken
    assert _telling([(None, e) for e in (broken, own, lost)]) is lost
    stopped = [Call(ref=None, worker="engine-1", method="train")]
    assert _telling([(None, own)], stopped) is own
    given_up = _telling([(None, neighbour)], stopped)
    assert isinstance(given_up, WorkerLost), "a run that could go on from its checkpoint would end"
    assert given_up.where == "engine-1 (train)"
    assert given_up.why == str(neighbour)


def test_a_worker_that_cannot_be_made_is_no_lost_one():
    call = Call(ref=None, worker="engine-1", method="setup")
    import_failed = RayTaskError(
        "__init__", "a traceback that says: no module named torch", ImportError("torch")
    )
    assert isinstance(_translate(call, ActorDiedError(import_failed)), WorkerFailed)
    assert "no module named torch" in str(_translate(call, ActorDiedError(import_failed)))
    assert isinstance(_translate(call, ActorDiedError()), WorkerLost)


def test_a_cluster_that_cannot_start_here_is_said(monkeypatch):
    tries = []

    def failing(**_):
        tries.append(None)
        raise Exception("The current node timed out during startup.\nSee the logs")  # noqa: TRY002 - what Ray raises

    closed = []
    monkeypatch.setattr("ray.init", failing)
    monkeypatch.setattr("ray.shutdown", lambda: closed.append(True))
    here = r"(?s)no cluster could be started here.*timed out during startup"
    with pytest.raises(ConfigError, match=here) as caught, cluster.connected(RaySection()):
        pytest.fail("there is none")
    assert "RAY_TMPDIR" in caught.value.remedy
    assert closed == [True]  # what has started of it
    assert tries == [None] * cluster.STARTS
    elsewhere = RaySection(address="10.0.0.1:6379")
    with (
        pytest.raises(ConfigError, match=r"no cluster at 10\.0\.0\.1:6379") as caught,
        cluster.connected(elsewhere),
    ):
        pytest.fail("there is none")
    assert "ray start --head" in caught.value.remedy
    assert len(tries) == cluster.STARTS + 1, "a cluster of others is asked once"


def test_a_cluster_that_starts_too_slowly_is_started_again(monkeypatch, caplog):
    tries = []

    def slow_once(**_):
        tries.append(None)
        if len(tries) == 1:
            raise Exception("The current node timed out during startup.")  # noqa: TRY002 - what Ray raises

    monkeypatch.setattr("ray.init", slow_once)
    monkeypatch.setattr(cluster, "_require_loopback", lambda: None)
    with cluster.connected(RaySection()):
        assert len(tries) == 2
    assert "it is tried again" in caplog.text


@pytest.mark.parametrize("said", ["Not a directory", "outside the virtual environment"])
def test_a_folder_that_ray_cannot_use_is_said(tmp_path, said):
    """Run in a process of its own, because Ray keeps the folder.

    In a folder below the virtual environment ``ray.init`` waited for ever for workers that ended.
    """
    (tmp_path / "file").write_text("")
    variables = {
        "Not a directory": {"RAY_TMPDIR": str(tmp_path / "file" / "below")},
        "outside the virtual environment": {
            "RAY_TMPDIR": str(tmp_path / "below"),
            "VIRTUAL_ENV": str(tmp_path),
        },
    }
    code = (
        "from engine_trainer.placement.ray.cluster import connected\n"
        "from engine_trainer.config.sections import RaySection\n"
        "from engine_api.errors import ConfigError\n"
        "try:\n    with connected(RaySection()): pass\n"
        "except ConfigError as error:\n    print('SAID', error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables[said]},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert "SAID" in done.stdout, done.stderr
    assert said in done.stdout


@pytest.mark.slow
def test_an_interrupt_while_a_cluster_starts_leaves_none():
    code = """
import ray
from waiting import children, until
from engine_trainer.placement.ray.cluster import connected
from engine_trainer.config.sections import RaySection
start = ray.init

def interrupted(*args, **kwargs):
    start(*args, num_cpus=1, **kwargs)
    assert children()
    raise KeyboardInterrupt

ray.init = interrupted
try:
    with connected(RaySection()):
        pass
except KeyboardInterrupt:
    assert not ray.is_initialized()
    until(lambda: not children())
    print("nothing is left")
"""
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.stdout.splitlines()[-1:] == ["nothing is left"], done.stderr


def test_a_launcher_that_cannot_close_leaves_no_lock(tmp_path):
    config = on_ray(tmp_path, tmp_path / "out")

    def broken() -> None:
        raise OSError("the cluster is gone")

    launcher = SimpleNamespace(comm=SingleComm(), close=broken)
    run = Run(config, kind="rl", total_steps=1, launcher=launcher)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OSError, match="the cluster is gone"), run:
        run._lock.acquire()
    assert signal.getsignal(signal.SIGTERM) is before
    again = FolderLock(tmp_path / "out")
    again.acquire()
    again.release()


@pytest.mark.parametrize("saved", [False, True])
def test_a_restart_goes_on_from_what_the_run_has_saved_else_where_it_was_told_to_begin(
    sums_model, tmp_path, monkeypatch, saved
):
    elsewhere = str(tmp_path / "other" / "step-000004")
    out = tmp_path / "out"
    given = []

    def train(config, launcher):
        given.append(config.run.resume)
        if len(given) > 1:
            return "done"
        if saved:
            (out / "checkpoints" / "step-000006").mkdir(parents=True)
            (out / "checkpoints" / "step-000006" / "manifest.json").write_text("{}")
        raise WorkerLost("died")

    monkeypatch.setattr(controller, "connected", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(controller, "OnRay", lambda *_: None)
    monkeypatch.setattr(controller, "train_rl", train)
    config = on_ray(sums_model, out, run={"resume": elsewhere})
    assert controller.train_on_ray(config) == "done"
    assert given == [elsewhere, "auto" if saved else elsewhere]


def test_two_runs_in_one_folder(tmp_path):
    one = FolderLock(tmp_path)
    two = FolderLock(tmp_path)
    one.acquire()
    with pytest.raises(ConfigError, match=r"(?s)another run writes to.*process \d+ on"):
        two.acquire()
    one.release()
    two.acquire()
    two.release()


def test_a_killed_process_holds_no_lock(tmp_path):
    code = (
        f"import os, signal\nfrom pathlib import Path\n"
        f"from engine_trainer.run.lock import FolderLock\n"
        f"FolderLock(Path({str(tmp_path)!r})).acquire()\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    again = FolderLock(tmp_path)
    again.acquire()
    again.release()


def test_fewer_rows_than_a_batch_are_refused(tmp_path):
    section = RunSection(output_dir=str(tmp_path), epochs=2.0)
    given = {"key": "batch_size", "data": DataSection(source="rows.jsonl")}
    assert section.total_steps(8, 8, **given) == 2
    with pytest.raises(
        ConfigError,
        match=r"(?s)7 rows of rows.jsonl are left, but a step takes 8.*a smaller batch_size",
    ):
        section.total_steps(7, 8, **given)


def test_a_worker_draws_by_the_runs_seed_and_its_own_number():
    def drawn(*seed):
        EngineWorker("engine-0").setup(".", [], [], seed)
        return random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002 - what user code draws from

    assert drawn(1, 0) == drawn(1, 0)
    for column in zip(drawn(1, 0), drawn(1, 1), drawn(2, 0), strict=True):
        assert len(set(column)) == 3

"""Replicas that are lost while the run goes on (``ray.elastic``).

The others take their prompts and new ones join. The engines' processes are never started again.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ray_runs import local_cluster, on_ray, result_of, rows_of
from rollout_rows import rollouts_of
from waiting import until

pytest.importorskip("ray", reason="the extra ray")
pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

import in_flight_local  # noqa: E402 - behind importorskip

from engine_api.registry import RolloutRegistry  # noqa: E402
from engine_trainer.placement.ray.replicas import ReplicasLost  # noqa: E402
from engine_trainer.rl.on_ray import train_on_ray  # noqa: E402

TWO = {"engines": 1, "rollouts": 2}


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Path:
    """Return the file of faults, empty (see ``ray_faults``)."""
    return tmp_path_factory.mktemp("faults") / "plan.json"


@pytest.fixture(scope="module", autouse=True)
def cluster(plan):
    with local_cluster(3, plan):
        yield


@pytest.fixture(scope="module")
def alone(sums_model, tmp_path_factory):
    """Return the result of a run that loses nothing, and that is not elastic."""
    out = tmp_path_factory.mktemp("alone") / "out"
    train_on_ray(on_ray(sums_model, out, ray=TWO))
    return result_of(out)


def fault(worker: str, method: str, nth: int = 1, when: str = "before") -> dict:
    return {"worker": worker, "method": method, "nth": nth, "when": when, "do": "kill"}


def processes(kind: str, marker: Path) -> set[int]:
    """Return the ids of the workers of a kind on the cluster whose file of faults is ``marker``."""
    found: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_bytes()
            if name.startswith(f"ray::{kind}".encode()) and (
                str(marker).encode() in (folder / "environ").read_bytes()
            ):
                found.add(int(folder.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


@contextmanager
def meanwhile(look: Callable[[], None]) -> Iterator[None]:
    """Call ``look`` all the time while the body runs."""
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            look()
            time.sleep(0.05)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def replicas_of(out: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k.startswith("replicas/")} for r in rows if r["step"]]


def run(model: Path, out: Path, plan: Path, faults: list[dict], *, ray=None, **sections) -> None:
    """Train with faults, all of which occur, in the same processes of the engines."""
    plan.write_text(json.dumps(faults))
    config = on_ray(model, out, ray={**TWO, "elastic": True, **(ray or {})}, **sections)
    until(lambda: not processes("EngineWorker", plan))  # those of the run before
    engines: set[int] = set()
    with meanwhile(lambda: engines.update(processes("EngineWorker", plan))):
        train_on_ray(config)
    assert json.loads(plan.read_text()) == []
    assert len(engines) == config.ray.engines


def test_a_replica_killed_while_it_generates_is_replaced_and_the_result_is_the_same(
    sums_model, tmp_path, plan, alone, caplog
):
    caplog.set_level(logging.WARNING, logger="engine_trainer")
    out = tmp_path / "out"
    run(sums_model, out, plan, [fault("rollout-1", "generate_and_score")])
    assert result_of(out) == alone
    assert "rollout-1 is lost, and another one is started" in caplog.text
    assert sum(row["replicas/lost"] for row in replicas_of(out)) == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    "faults",
    [
        [fault("rollout-0", "connect", nth=2)],
        [fault("rollout-1", "read", nth=2)],
        [fault("rollout-0", "read", nth=3), fault("rollout-1", "read", nth=6)],
    ],
    ids=["before it connects", "in the middle", "both, one after the other"],
)
def test_a_replica_killed_during_a_sync_keeps_neither_the_engine_nor_the_others(
    sums_model, tmp_path, plan, alone, faults
):
    run(sums_model, tmp_path / "out", plan, faults)
    assert result_of(tmp_path / "out") == alone


@pytest.mark.nightly
def test_a_replica_killed_twice_and_its_neighbour_too_are_all_replaced(
    sums_model, tmp_path, plan, alone
):
    faults = [
        fault("rollout-0", "generate_and_score"),
        fault("rollout-0", "generate_and_score", when="after"),
        fault("rollout-1", "generate_and_score", nth=2),
    ]
    run(sums_model, tmp_path / "out", plan, faults)
    assert result_of(tmp_path / "out") == alone


@pytest.mark.nightly
def test_the_only_replica_is_replaced_and_the_result_is_the_same(sums_model, tmp_path, plan):
    train_on_ray(on_ray(sums_model, tmp_path / "alone", ray={"engines": 2, "rollouts": 1}))
    out = tmp_path / "out"
    run(
        sums_model,
        out,
        plan,
        [fault("rollout-0", "generate_and_score", nth=2)],
        ray={"engines": 2, "rollouts": 1},
        run={"profile_steps": [1, 2]},
    )
    traces = {path.name for path in (out / "profile" / "step-000001").iterdir()}
    assert traces == {"engine-0.json.gz", "engine-1.json.gz", "rollout-0.json.gz"}
    assert result_of(out) == result_of(tmp_path / "alone")
    (seconds,) = [r["replicas/rejoin_s"] for r in replicas_of(out) if "replicas/rejoin_s" in r]
    assert seconds > 0


@pytest.mark.nightly
def test_a_replica_killed_while_the_engine_trains_is_noticed_then(
    sums_model, tmp_path, plan, caplog
):
    """The kill comes from outside, at any moment after the first step."""
    out = tmp_path / "out"
    killed: list[int] = []

    def kill() -> None:
        rows = out / "metrics.jsonl"
        if not killed and rows.is_file() and rows.read_text().count("\n") > 1:
            victim = min(processes("RolloutWorker", plan))
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)

    with meanwhile(kill):
        run(sums_model, out, plan, [], run={"steps": 40, "save_every": 0})
    assert len(killed) == 1
    assert [row["step"] for row in rows_of(out)] == list(range(1, 41))
    assert sum(row["replicas/lost"] for row in replicas_of(out)) == 1


def test_without_any_replica_left_the_run_ends_with_the_cause(sums_model, tmp_path, plan):
    faults = [fault("rollout-0", "generate_and_score"), fault("rollout-1", "generate_and_score")]
    said = r"(?s)no replica is left.*rollout-[01], generate_and_score: the worker died"
    with pytest.raises(ReplicasLost, match=said):
        run(sums_model, tmp_path / "out", plan, faults, ray={"restarts": 0})


@pytest.mark.nightly
def test_prompts_that_end_each_replica_end_the_run(sums_model, tmp_path, plan):
    """A reward ends the process that calls it, at every start again."""
    said = r"(?s)the same group was lost with 2 replicas.*generate_and_score: the worker died"
    with pytest.raises(ReplicasLost, match=said):
        run(
            sums_model,
            tmp_path / "out",
            plan,
            [],
            ray={"restarts": 0, "rollouts": 3, "cpus_per_worker": 0.5},
            reward={"name": "deadly", "workers": 0, "timeout_s": None},
            algorithm={"prompts_per_step": 1},
        )


FULL = {
    "overlap": {"mode": "full", "max_staleness": 1, "slice_tokens": 2},
    "rollout": {"max_new_tokens": 8, "batch_size": 16},
    "run": {"steps": 6, "save_every": 3, "rollouts": "all"},
}


@pytest.mark.parametrize(
    "faults",
    [
        [fault("rollout-1", "advance", nth=3), fault("rollout-0", "connect", nth=4)],
        pytest.param(
            [fault("rollout-0", "advance", nth=2), fault("rollout-1", "advance", nth=2)],
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["one in a slice and one in a sync", "both in a slice"],
)
def test_fully_asynchronous_replicas_are_replaced_and_no_prompt_is_lost(
    sums_model, tmp_path, plan, faults
):
    out = tmp_path / "out"
    run(sums_model, out, plan, faults, **FULL)
    rows = rows_of(out)
    assert [r["step"] for r in rows] == list(range(1, 7))
    assert all(r["rollout/groups"] == 8 for r in rows)
    manifest = json.loads((out / "checkpoints" / "step-000006" / "manifest.json").read_text())
    state = manifest["extra"]["loop"]
    dropped = sum(r["rollout/dropped_groups"] for r in rows)
    assert state["position"] - len(state.get("pending", [])) == 6 * 8 + dropped
    assert sum(r["learned"] for r in rollouts_of(out)) == 6 * 8 * 4
    assert sum(row["replicas/lost"] for row in replicas_of(out)) == 2


@pytest.fixture
def in_flight() -> Iterator[str]:
    """Return the name of a rollout that takes weights while it generates."""
    in_flight_local.register()
    yield in_flight_local.BACKEND
    RolloutRegistry.unregister(in_flight_local.BACKEND)


def test_replicas_that_take_weights_in_flight_are_replaced_and_no_prompt_is_lost(
    sums_model, tmp_path, plan, in_flight
):
    """Lose one between two tokens, and one in a sync, which is repeated with the other.

    The failed sync ends the generations of the replica that is left, too.
    """
    out = tmp_path / "out"
    faults = [fault("rollout-1", "collect", nth=6), fault("rollout-0", "connect", nth=4)]
    ray = {"imports": ["ray_faults", "in_flight_local"]}
    rollout = {"name": in_flight}
    run(sums_model, out, plan, faults, ray=ray, **FULL | {"rollout": FULL["rollout"] | rollout})
    rows = rows_of(out)
    assert [r["step"] for r in rows] == list(range(1, 7))
    assert all(r["rollout/groups"] == 8 for r in rows)
    assert any(r["rollout/continued"] > 0 for r in rows)
    manifest = json.loads((out / "checkpoints" / "step-000006" / "manifest.json").read_text())
    state = manifest["extra"]["loop"]
    dropped = sum(r["rollout/dropped_groups"] for r in rows)
    assert state["position"] - len(state.get("pending", [])) == 6 * 8 + dropped
    assert sum(r["learned"] for r in rollouts_of(out)) == 6 * 8 * 4
    assert sum(row["replicas/lost"] for row in replicas_of(out)) == 2


@pytest.mark.nightly
def test_one_step_off_goes_on_though_no_replica_was_left_for_a_while(sums_model, tmp_path, plan):
    out = tmp_path / "out"
    sections = {
        "overlap": {"mode": "one_step_off"},
        "run": {"steps": 4},
        "eval": {"source": str(sums_model / "test.jsonl"), "every": 2},
    }
    faults = [fault("rollout-0", "generate_and_score", nth=3)]
    run(sums_model, out, plan, faults, ray={"rollouts": 1}, **sections)
    rows = rows_of(out)
    assert [r["step"] for r in rows] == list(range(5))
    assert all(r["rollout/groups"] == 8 for r in rows[1:])

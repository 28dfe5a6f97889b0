"""Replicas that are lost while the run goes on (``ray.elastic``).

The others take their prompts and new ones join. The engines' processes are never started again.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ray_runs import local_cluster, on_ray, result_of, rows_of
from rollout_rows import rollouts_of

pytest.importorskip("ray", reason="the extra ray")
pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

from engine_trainer.placement.ray.replicas import ReplicasLost  # noqa: E402 - behind importorskip
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


@contextmanager
def engines_of(marker: Path) -> Iterator[set[int]]:
    """Collect the ids of all processes of the engines that the body starts."""
    found: set[int] = set()
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    if (
                        (folder / "cmdline").read_bytes().startswith(b"ray::EngineWorker")
                        and str(marker).encode() in (folder / "environ").read_bytes()
                    ):
                        found.add(int(folder.name))
                except OSError:  # it has ended meanwhile
                    continue

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
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
    with engines_of(plan) as engines:
        train_on_ray(config)
    assert json.loads(plan.read_text()) == []
    assert len(engines) == config.ray.engines


def test_a_replica_killed_while_it_generates_is_replaced_and_the_result_is_the_same(
    sums_model, tmp_path, plan, alone, caplog
):
    caplog.set_level(logging.WARNING, logger="engine_trainer")
    out = tmp_path / "out"
    run(sums_model, out, plan, [fault("rollout-1", "generate_and_score")], run={"steps": 3})
    assert result_of(out) == alone
    assert "rollout-1 is lost, and another one is started" in caplog.text
    assert sum(row["replicas/lost"] for row in replicas_of(out)) == 1

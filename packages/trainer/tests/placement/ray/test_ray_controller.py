"""A controller that is killed.

No process of its cluster stays, and the same command resumes from the last checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ray_runs import ON_RAY, local_cluster, result_of, start, tree
from waiting import DEADLINE_S, until

ray = pytest.importorskip("ray", reason="the extra ray")
pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def left_of(marker: str) -> list[str]:
    """Return the processes that were started with this text in their environment."""
    found: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes():
                found.append(
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
        except OSError:  # it ended meanwhile, or is not ours
            continue
    return found


def killed_at(config: dict, plan: Path, method: str, *, environment=None) -> None:
    """Start a controller that is killed as its engine worker begins ``method`` a second time."""
    process = start(config, plan.parent / "run.yaml", environment=environment)
    plan.write_text(
        json.dumps(
            [
                {
                    "worker": "engine-0",
                    "method": method,
                    "nth": 2,
                    "when": "before",
                    "do": process.pid,
                }
            ]
        )
    )
    text, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -9, text
    assert json.loads(plan.read_text()) == []


@pytest.fixture(scope="module")
def alone(sums_model, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "out"
    process = start(tree(sums_model, out, run={"steps": 4}), out.parent / "run.yaml")
    text, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, text
    return result_of(out)


def on_one_engine(model: Path, out: Path, **ray) -> dict:
    return tree(model, out, launcher="ray", ray={**ON_RAY, "engines": 1, **ray}, run={"steps": 4})


def test_a_cluster_of_its_own_goes_with_the_controller(sums_model, tmp_path, alone):
    plan = tmp_path / "plan.json"
    config = on_one_engine(sums_model, tmp_path / "out")
    killed_at(config, plan, "train", environment={"RAY_FAULTS": str(plan)})
    process = start(config, tmp_path / "run.yaml")
    text, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, text
    assert "resumed from" in text
    assert result_of(tmp_path / "out") == alone
    # Ray's agents look for their node every half minute.
    until(lambda: not left_of(str(plan)), missing=lambda: left_of(str(plan)))


@pytest.mark.nightly
def test_a_cluster_that_it_joined_gets_its_workers_back(sums_model, tmp_path, alone):
    plan = tmp_path / "plan.json"
    # One CPU: a worker that stayed would keep the next run from starting.
    with local_cluster(1, plan):
        config = on_one_engine(
            sums_model, tmp_path / "out", address=ray.get_runtime_context().gcs_address
        )
        for method in ("generate_and_score", "save"):
            killed_at(config, plan, method)
        process = start(config, tmp_path / "run.yaml")
        text, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, text
    assert result_of(tmp_path / "out") == alone


@pytest.mark.nightly
def test_a_second_run_in_the_folder_is_refused_while_the_first_one_runs(sums_model, tmp_path):
    config = tree(sums_model, tmp_path / "out", run={"steps": 5000})
    first = start(config, tmp_path / "first.yaml")
    try:
        until((tmp_path / "out" / "metrics.jsonl").is_file)
        second = start(config, tmp_path / "second.yaml")
        text, _ = second.communicate(timeout=DEADLINE_S)
        assert second.returncode == 2
        assert "another run writes to" in text
        assert f"process {first.pid} on" in text
    finally:
        first.kill()
        first.communicate()

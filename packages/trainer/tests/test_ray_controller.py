"""The controller itself is killed: nothing of its cluster stays, and the same command goes on from the last checkpoint."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from ray_runs import ON_RAY, result_of, start, tree

pytest.importorskip("ray", reason="the extra ray")
pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]
GONE_S = 60.0  # Ray's agents look for their node every half minute


def left_of(marker: str) -> list[str]:
    """Processes that were started with this text in their environment."""
    found: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it ended meanwhile, or is not ours
            continue
    return found


def test_killed_in_generation_update_and_save_it_ends_as_one_left_alone(sums_model, tmp_path):
    plan = tmp_path / "plan.json"
    ray = {**ON_RAY, "engines": 1}
    trees = {
        name: tree(sums_model, tmp_path / name, launcher="ray", ray=ray, run={"steps": 4}) for name in ("alone", "out")
    }
    process = start(trees["alone"], tmp_path / "alone.yaml")
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    for method, nth in (("answer", 2), ("train", 1), ("save", 1)):
        process = start(trees["out"], tmp_path / "out.yaml", environment={"RAY_FAULTS": str(plan)})
        plan.write_text(
            json.dumps([{"worker": "engine-0", "method": method, "nth": nth, "when": "before", "do": process.pid}])
        )
        text, _ = process.communicate(timeout=120)
        assert process.returncode == -9, text
    process = start(trees["out"], tmp_path / "out.yaml")
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    assert "resumed from" in text
    assert result_of(tmp_path / "out") == result_of(tmp_path / "alone")
    end = time.monotonic() + GONE_S
    while left := left_of(str(plan)):
        assert time.monotonic() < end, left
        time.sleep(0.5)


def test_a_second_run_in_the_folder_is_refused_while_the_first_one_runs(sums_model, tmp_path):
    config = tree(sums_model, tmp_path / "out", run={"steps": 5000})
    first = start(config, tmp_path / "first.yaml")
    try:
        end = time.monotonic() + 60
        while not (tmp_path / "out" / "metrics.jsonl").is_file():
            assert time.monotonic() < end
            time.sleep(0.1)
        second = start(config, tmp_path / "second.yaml")
        text, _ = second.communicate(timeout=60)
        assert second.returncode == 2
        assert "another run writes to" in text
        assert f"process {first.pid} on" in text
    finally:
        first.kill()
        first.communicate()

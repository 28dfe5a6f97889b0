"""The table of margins sums up runs of right engines, and says which came too near to a bound."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from layout import ROOT


@pytest.fixture
def margins(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    path = list(sys.path)
    yield importlib.import_module("margins")
    sys.path[:] = path


def line(seed: int, margin: float | None, *, status: str = "passed", **changes: Any) -> dict:
    return {
        "case": "train.policy",
        "engine": "fsdp2",
        "kernel": "own",
        "world": 1,
        "dtype": "float32",
        "model_type": "language_model",
        "seed": seed,
        "status": status,
        "margin": margin,
    } | changes


def test_summary_has_the_distribution_and_the_worst_run(margins: Any) -> None:
    lines = [line(seed, seed / 1000) for seed in range(500)]
    lines.append(line(7, 0.75, kernel="math", world=2))

    row = margins.summary(lines)["cases"]["train.policy"]

    assert (row["runs"], row["seeds"], row["kernels"], row["not passed"]) == (501, 500, 2, 0)
    assert (row["median"], row["99.9 %"], row["max"]) == (0.25, 0.75, 0.75)
    assert row["worst"] == "fsdp2, math, world 2, seed 7"
    assert margins.too_near(margins.summary(lines)) == []


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (line(3, 0.81), "0 of 2 did not pass, largest margin 0.81"),
        (line(3, 1.34, status="failed"), "1 of 2 did not pass, largest margin 1.34"),
        (line(3, None, status="suite-error"), "1 of 2 did not pass, largest margin 0.10"),
    ],
)
def test_what_comes_too_near_is_named(margins: Any, bad: dict, text: str) -> None:
    (problem,) = margins.too_near(margins.summary([line(0, 0.1), bad]))

    assert problem.startswith(f"train.policy: {text}")


def test_a_case_that_never_ran_to_its_end_is_named(margins: Any) -> None:
    (problem,) = margins.too_near(margins.summary([line(0, None, status="suite-error")]))

    assert problem.startswith("train.policy: 1 of 1 did not pass")


def test_the_last_line_of_a_run_counts(margins: Any, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text("".join(json.dumps(line(0, margin)) + "\n" for margin in (0.9, 0.2)))

    assert [one["margin"] for one in margins.read([file])] == [0.2]


def test_the_recorded_runs_are_of_right_engines(margins: Any) -> None:
    assert margins.too_near(json.loads(margins.RECORD.read_text())) == []

"""The exit status of ``tools/elastic.py``, which kills replicas of an elastic run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from layout import ROOT


@pytest.mark.parametrize(
    ("status", "kills", "engines", "said"),
    [
        (0, 2, {7}, []),
        (1, 2, {7}, ["expected the run to end with status 0, got 1"]),
        (0, 1, {7}, ["expected 2 kills with a successor, got 1"]),
        (0, 2, {7, 8}, ["expected one process of the engine, saw [7, 8]"]),
    ],
)
def test_a_run_that_failed_is_a_problem_like_a_kill_without_a_successor(
    monkeypatch, status, kills, engines, said
):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from elastic import Kill, Killer, find_problems

    killer = Killer(2, signal.SIGKILL, "mark", Path("metrics.jsonl"), seed=0)
    killer.kills = [Kill(steps=1, noticed_s=0.1, serving_s=10.0)] * kills
    killer.engines = engines
    assert find_problems(killer, 2, status) == said

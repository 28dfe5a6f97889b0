"""The completions that a run has kept, as rows: shared by the tests of the loop and of Ray."""

from __future__ import annotations

from pathlib import Path

from engine_trainer.telemetry.rollouts import FOLDER, files_of, path_of, read_rollouts

CLOCKS = ("time", "seconds")
"""Columns that no two runs have in common."""


def rows_of_step(out: Path, step: int) -> list[dict]:
    return read_rollouts(path_of(out / FOLDER, step)).to_pylist()


def without_clocks(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name not in CLOCKS} for row in rows]


def rollouts_of(out: Path) -> list[dict]:
    """All rows of a run, without what a clock says."""
    rows = [row for path in files_of(out / FOLDER) for row in read_rollouts(path).to_pylist()]
    return without_clocks(rows)

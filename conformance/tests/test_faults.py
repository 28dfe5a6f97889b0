"""Tests that the faults which cases make are those of the disk alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine_api.registry import EngineRegistry
from engine_conformance.cases import Target, load_cases, run_case
from engine_conformance.cli import offer


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["faults.save_hf", "faults.killed_in_save_hf"])
def test_an_engine_that_connects_its_ranks_late_is_right(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    offer("connecting_engine:PLUGIN", tmp_path / "site")
    EngineRegistry.refresh()

    outcome = run_case(load_cases()[name], Target(backend="connecting", root=tmp_path))

    assert outcome.status == "passed", outcome.message

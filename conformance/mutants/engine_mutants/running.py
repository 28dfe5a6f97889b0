"""Runs of a mutant's case, on the mutant and on the engine without the defect."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from engine_conformance.cases import Target, load_cases, run_case
from engine_conformance.results import BAD, Outcome
from engine_mutants.mutant import Mutant

__all__ = ["control", "controls", "is_caught", "kill"]


def kill(mutant: Mutant, root: Path) -> Outcome:
    """Run the named case on the mutant and return its outcome."""
    return run_case(load_cases()[mutant.case], mutant.target(root))


def is_caught(outcome: Outcome) -> bool:
    """Return whether a case failed as it must for a wrong engine.

    A fault of the suite's own, or a case that did not run, does not count.
    """
    return outcome.status in BAD


def control(case: str, target: Target) -> Outcome:
    """Run a case on the engine without the defect and return its outcome."""
    return run_case(load_cases()[case], target)


def controls(mutants: Iterable[Mutant], root: Path) -> dict[str, tuple[str, Target]]:
    """Return every case and setting that some mutant names, once, by a readable name.

    Those of undeclared capabilities are left out: the engine without the defect declares them.
    """
    found: dict[str, tuple[str, Target]] = {}
    for mutant in mutants:
        if not mutant.hides:
            target = replace(mutant.target(root), backend="loopback", patience=1.0)
            sizes = [f"{name}{size}" for name, size in mutant.layout.items()]
            sizes += [f"{name}-{value}" for name, value in mutant.options.items()]
            setting = (f"world{mutant.world}", *sizes, mutant.dtype, mutant.model_type)
            name = "-".join((mutant.case, *setting))
            found.setdefault(name, (mutant.case, target))
    return found

"""What the tool and the suite's tests do with a mutant: run its case, and run it on the engine without the defect."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from engine_conformance.cases import Target, load_cases, run_case
from engine_conformance.results import BAD, Outcome
from engine_mutants.mutant import Mutant

__all__ = ["control", "controls", "is_caught", "kill"]


def kill(one: Mutant, root: Path) -> Outcome:
    """How the named case ends for the mutant."""
    return run_case(load_cases()[one.case], one.target(root))


def is_caught(outcome: Outcome) -> bool:
    """Whether it ended as it must for a wrong engine; a fault of the suite's own, or a case that did not run, is none."""
    return outcome.status in BAD


def control(case: str, target: Target) -> Outcome:
    """How a case ends for the engine without the defect."""
    return run_case(load_cases()[case], target)


def controls(mutants: Iterable[Mutant], root: Path) -> dict[str, tuple[str, Target]]:
    """By a readable name: every case and setting that some mutant names, once.

    Without those of undeclared capabilities: the engine without the defect declares them.
    """
    found: dict[str, tuple[str, Target]] = {}
    for one in mutants:
        if not one.hides:
            target = replace(one.target(root), backend="loopback", patience=1.0)
            sizes = [f"{name}{size}" for name, size in one.layout.items()]
            name = "-".join((one.case, f"world{one.world}", *sizes, one.dtype, one.model_type))
            found.setdefault(name, (one.case, target))
    return found

"""What a case is: one MUST of the contract as a function that runs against any engine by name."""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from engine_api.capabilities import Capability
from engine_conformance.cases._target import Target
from engine_conformance.compare import ConformanceFailure

__all__ = [
    "CASES",
    "GROUPS",
    "Case",
    "CaseFunction",
    "Outcome",
    "SkipCase",
    "Status",
    "case",
    "load_cases",
    "must",
    "run_case",
]

CaseFunction = Callable[[Target], "float | None"]
"""Raises `ConformanceFailure` (or the pool's `RankError`); returns the margin where it compared numbers."""

Status = Literal["passed", "failed", "skipped", "error"]

GROUPS = (
    "plugin",
    "contract",
    "forward",
    "train",
    "steps",
    "checkpoint",
    "faults",
    "export",
    "parallel",
    "memory",
    "lora",
)
_MODULES = (*GROUPS, "objectives", "refusals")  # the last two belong to train and contract
CASES: dict[str, Case] = {}
_HINTS = "If this fails"


class SkipCase(Exception):
    """The case cannot say anything on this machine; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A MUST of the contract.

    Attributes:
        id: ``group.name``; never changes its meaning.
        since: the contract version from which it holds.
        requires: capabilities without which it does not apply.
        world: world sizes at which it says something.
        dtypes: precisions of computation at which it is worth running.
        slow: takes more than about ten seconds.
    """

    id: str
    function: CaseFunction
    since: str
    requires: tuple[Capability, ...]
    world: tuple[int, ...]
    dtypes: tuple[str, ...]
    slow: bool

    @property
    def must(self) -> str:
        """The requirement, one line."""
        return inspect.cleandoc(self.function.__doc__ or "").splitlines()[0]

    @property
    def hints(self) -> str:
        """What to look at when it fails, and the defects of the field that it was made from."""
        _, _, hints = inspect.cleandoc(self.function.__doc__ or "").partition(_HINTS)
        return " ".join(hints.split()).removeprefix(": ")

    def why_not(self, target: Target) -> str | None:
        """Why this case does not apply to ``target``, or None."""
        missing = [str(c) for c in self.requires if c not in target.capabilities]
        if missing:
            return f"not declared: {', '.join(missing)}"
        if target.world not in self.world:
            return f"says nothing at world {target.world}"
        return None if target.dtype in self.dtypes else f"says nothing in {target.dtype}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a case ended; ``margin`` is its worst error over the tolerance."""

    status: Status
    seconds: float
    margin: float | None = None
    message: str = ""


def case(
    *,
    id: str,  # noqa: A002 - the word that the reports use
    since: str = "1.0",
    requires: tuple[Capability, ...] = (),
    world: tuple[int, ...] = (1, 2, 4),
    dtypes: tuple[str, ...] = ("float32",),
    slow: bool = False,
) -> Callable[[CaseFunction], CaseFunction]:
    """Register a case; see `Case` for the arguments."""

    def register(function: CaseFunction) -> CaseFunction:
        assert id not in CASES, f"two cases are called {id}"
        assert function.__doc__, f"{id} has no MUST"
        CASES[id] = Case(
            id=id, function=function, since=since, requires=requires, world=world, dtypes=dtypes, slow=slow
        )
        return function

    return register


def load_cases() -> dict[str, Case]:
    """Every case by id, in the order of `GROUPS`."""
    for module in _MODULES:
        import_module(f"engine_conformance.cases.{module}")
    order = sorted(CASES.values(), key=lambda one: GROUPS.index(one.id.split(".")[0]))  # stable within a group
    return {one.id: one for one in order}


def must(condition: bool, quantity: str, problem: str, *, where: str = "") -> None:
    """Raise `ConformanceFailure` unless ``condition``."""
    if not condition:
        raise ConformanceFailure(quantity, problem, where=where)


def run_case(one: Case, target: Target) -> Outcome:
    """Run one case and report how it ended; never raises for what an engine does."""
    began = time.monotonic()

    def outcome(status: Status, message: str = "", margin: float | None = None) -> Outcome:
        return Outcome(status=status, seconds=time.monotonic() - began, margin=margin, message=message)

    if reason := one.why_not(target):
        return outcome("skipped", reason)
    try:
        margin = one.function(target)
    except SkipCase as skip:
        return outcome("skipped", str(skip))
    except ConformanceFailure as failure:
        return outcome("failed", str(failure), failure.margin)
    except AssertionError as failure:
        return outcome("failed", str(failure))
    except Exception:  # noqa: BLE001 - the boundary of one case: the next one must still run
        return outcome("error", traceback.format_exc())
    return outcome("passed", margin=margin)

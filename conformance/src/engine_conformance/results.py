"""The result of a run: one row per case and setting, each in exactly one of nine statuses.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

__all__ = ["BAD", "STATUSES", "Key", "Outcome", "Part", "Row", "Setting", "Status", "SuiteRun"]

Status = Literal[
    "passed",
    "failed",
    # Undeclared, and refused as it must be.
    "refused",
    # Undeclared, and not refused.
    "accepted-undeclared",
    # Listed in the deviations, and fails.
    "deviation",
    # Listed in the deviations, and passes.
    "stale-deviation",
    # The device, the world size or a package is absent.
    "not-run",
    # No result before the deadline.
    "timeout",
    # The suite's own fault.
    "suite-error",
]
STATUSES: tuple[Status, ...] = get_args(Status)
BAD: frozenset[Status] = frozenset({"failed", "accepted-undeclared", "stale-deviation", "timeout"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a case.

    ``margin`` is its largest error over the tolerance. ``hints`` replaces the hints of the case
    where it failed for a reason that has nothing to do with what the case is about.
    """

    status: Status
    seconds: float
    margin: float | None = None
    message: str = ""
    hints: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The circumstances under which a case ran.

    ``variant`` names the layout and the options of a repeated case; it is empty for all others,
    which run in the layout and with the options that were asked for.
    """

    model_type: str
    device: str
    world: int
    dtype: str
    variant: str = ""

    def __str__(self) -> str:
        text = f"{self.model_type}, {self.device}, world {self.world}, {self.dtype}"
        return f"{text}, {self.variant}" if self.variant else text


Key = tuple[str, Setting]
"""The subject of a row: the id of a case, and its setting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One case in one setting.

    Attributes:
        case: its id.
        must: the requirement, one line.
        profile: ``engine``, ``rl`` or ``rollout``.
        group: ``core``, a capability, the profile's name, or ``variants`` for a repeated case.
        provisional: whether the row is reported without being part of the verdict.
        hints: places to look at, from the case's docstring; empty when it passed.
        repeat: the command that runs it again.
        deviation: the reason and the issue of a listed deviation.
        outcome: its ``message`` says what was wrong, where, and by how much, or why the case was
            not run; it is empty when the case passed.
    """

    case: str
    must: str
    profile: str
    group: str
    setting: Setting
    outcome: Outcome
    provisional: bool = False
    hints: str = ""
    repeat: str = ""
    deviation: Mapping[str, str] | None = None

    @property
    def key(self) -> Key:
        """The subject of the row: a case in a setting."""
        return self.case, self.setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One of the runs that were joined into a report.

    Attributes:
        digest: the digest of its own ``report.json``.
        started, seconds, command, selection, environment: as in its `SuiteRun`, except that the
            selection has no ``complete``.
    """

    digest: str
    started: str
    seconds: float
    command: Sequence[str]
    selection: Mapping[str, Any]
    environment: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteRun:
    """The contents of a report.

    Attributes:
        name: the engine's backend or the rollout that was run.
        distribution: ``name==version`` of the distribution that offers it, and its descriptor's
            target.
        contract: the version that the descriptor states.
        declared: its capabilities.
        families: the model families that it declares and the suite computes, of which alone models
            were made; empty if it declares none, and models of all were made.
        trace: the registry's choice, one line per candidate.
        command: the arguments after ``engine-conformance``.
        selection: the cases and settings asked for, as in the command line's options.
        certify: whether a certificate was asked for.
        environment: versions and machine, by name.
        suite: version and digest of the suite.
        started: ISO 8601, UTC.
        sources: SHA-256 of the files of the engine's package, its partner's and engine-api, by
            package.
        parts: the runs that were joined into this one; empty for a run of its own.
        commits: the commits that the packages of ``sources`` and the suite were made from, by
            package, as far as they are known; ``-dirty`` at the end of a commit means that files
            differed from it.
        planned: the rows of the whole certificate, in its order, if this run is a part of one or
            was joined from parts; empty for any other run.
    """

    name: str
    distribution: str
    contract: str
    declared: Sequence[str]
    trace: Sequence[str]
    command: Sequence[str]
    selection: Mapping[str, Any]
    certify: bool
    environment: Mapping[str, str]
    suite: Mapping[str, str]
    started: str
    seconds: float
    rows: Sequence[Row] = field(repr=False)
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    parts: Sequence[Part] = ()
    commits: Mapping[str, str] = field(default_factory=dict[str, str])
    families: Sequence[str] = ()
    planned: Sequence[Key] = field(default=(), repr=False)

    @property
    def is_part(self) -> bool:
        """True if the run has some rows of a certificate, and not all."""
        return not {row.key for row in self.rows}.issuperset(self.planned)

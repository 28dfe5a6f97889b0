"""What the reports show of a run beside its rows: the same sums and sentences in all of them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine_conformance.environment import SHIMMED
from engine_conformance.report.document import counts
from engine_conformance.results import BAD, Row, Run, Setting
from engine_conformance.verdict import Judgement, Verdict, untested

__all__ = [
    "GroupView",
    "ProfileView",
    "absent",
    "by_case",
    "commands",
    "facts",
    "lane",
    "margin_text",
    "precisions",
    "problems",
    "profiles",
    "reasons",
    "requirements",
    "worst_row",
]

_WELL = ("passed", "refused")
_MACHINE = ("python", "system", "cpu", "accelerator")  # what of the environment is no distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupView:
    """One group of cases in one profile and model type."""

    name: str
    verdict: Verdict
    counts: dict[str, int]  # of the statuses that occur
    provisional: int
    worst: Row | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileView:
    """One verdict: why it is no better, and its groups."""

    judgement: Judgement
    reasons: list[str]
    groups: list[GroupView]


def profiles(run: Run, verdicts: Iterable[Judgement]) -> list[ProfileView]:
    """One a verdict, in their order."""
    return [
        ProfileView(
            judgement=one,
            reasons=reasons(run, one),
            groups=[_group(run, one, name) for name in one.groups],
        )
        for one in verdicts
    ]


def _group(run: Run, one: Judgement, name: str) -> GroupView:
    rows = [row for row in _rows_of(run, one) if row.group == name]
    found = {status: number for status, number in counts(rows).items() if number}
    return GroupView(
        name=name,
        verdict=one.groups[name],
        counts=found,
        provisional=sum(row.provisional for row in rows),
        worst=worst_row(rows),
    )


def _rows_of(run: Run, one: Judgement) -> list[Row]:
    return [
        row
        for row in run.rows
        if (row.profile, row.setting.model_type) == (one.profile, one.model_type)
    ]


def reasons(run: Run, one: Judgement) -> list[str]:
    """Why a verdict is no better than it is; empty for ``conformant``."""
    if one.verdict == "conformant":
        return []
    rows = [row for row in _rows_of(run, one) if not row.provisional]
    short = [
        f"{number} {status}"
        for status, number in counts(rows).items()
        if number and status not in _WELL
    ]
    told = [", ".join(short)] if short else []
    if not rows:
        told.append("no case ran that counts")
    if not run.selection["complete"]:
        told.append("not all cases were asked for")
    if missing := untested(run.rows, run.declared):
        told.append(f"declared, but shown by no case that passed: {', '.join(missing)}")
    return told


def problems(rows: Iterable[Row]) -> list[Row]:
    """What did not pass, and is no listed deviation; what could not run is `absent`."""
    return [row for row in rows if row.outcome.status in BAD or row.outcome.status == "suite-error"]


def absent(rows: Iterable[Row]) -> dict[str, dict[Setting, list[str]]]:
    """The cases that were not run, by reason and setting."""
    found: dict[str, dict[Setting, list[str]]] = {}
    for row in rows:
        if row.outcome.status == "not-run":
            found.setdefault(row.outcome.message, {}).setdefault(row.setting, []).append(row.case)
    return found


def by_case(rows: Iterable[Row]) -> dict[str, dict[str, list[Row]]]:
    """Rows by lane and case, in the order in which they ran."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        found.setdefault(lane(row), {}).setdefault(row.case, []).append(row)
    return found


def lane(row: Row) -> str:
    """The group's name, with the profile where the name does not say it."""
    return row.group if row.profile in ("engine", row.group) else f"{row.profile}: {row.group}"


def worst_row(rows: Iterable[Row]) -> Row | None:
    """The one with the largest margin; None if no numbers were compared."""
    compared = [(row.outcome.margin, row) for row in rows if row.outcome.margin is not None]
    return max(compared, key=lambda pair: pair[0])[1] if compared else None


def margin_text(margin: float | None) -> str:
    """Two digits, or a whole number; empty where nothing was compared."""
    if margin is None:
        return ""
    if not math.isfinite(margin):
        return "infinite"
    return "bitwise" if margin == 0 else f"{margin:.0f}" if 10 <= margin < 1e6 else f"{margin:.2g}"


def requirements(run: Run) -> tuple[list[str], list[str]]:
    """What to install to repeat the run, as pip takes it, and what it does not find on its usual index."""
    plugin, engine = run.selection["plugin"], run.distribution.partition("==")[0]
    installed: Mapping[str, str] = {
        name: version
        for name, version in run.environment.items()
        if name not in _MACHINE and version != "not installed" and not (plugin and name == engine)
    }
    notes = [
        f"{name} {version} comes from the package index of its own builds"
        for name, version in installed.items()
        if "+" in version
    ]
    if plugin:
        notes.append(f"the module of {plugin} must be on the Python path")
    elif "==" not in run.distribution:
        notes.append(f"what was tested is no distribution: {run.distribution}")
    return [f"{name}=={version}" for name, version in installed.items()], notes


def precisions(settings: Iterable[Setting]) -> str:
    """Return the precisions, each with its numbers of ranks where they are not the same for all."""
    worlds: dict[str, set[int]] = {}
    for one in settings:
        worlds.setdefault(one.dtype, set()).add(one.world)
    if all(found == next(iter(worlds.values())) for found in worlds.values()):
        return ", ".join(worlds)
    return "; ".join(
        f"{dtype} on {', '.join(map(str, sorted(found)))}" for dtype, found in worlds.items()
    )


def commands(run: Run) -> list[str]:
    """Return the command lines that make the report again: of each of its parts, and of the joining."""
    lines = [shlex.join(["engine-conformance", *part.command]) for part in run.parts]
    own = shlex.join(["engine-conformance", *run.command])
    return lines if own in lines else [*lines, own]


def facts(run: Run, digest: str) -> Sequence[tuple[str, str]]:
    """What was tested, with what, when and where: a name and a text each."""
    suite = run.suite
    settings = [row.setting for row in run.rows]
    shimmed = run.environment.get("accelerator") == SHIMMED
    devices = [SHIMMED if shimmed and one.device == "cpu" else one.device for one in settings]
    return [
        ("Distribution", run.distribution),
        ("Contract", run.contract),
        ("Suite", f"{suite['version']} (contract {suite['contract']}), SHA-256 {suite['digest']}"),
        ("Declared capabilities", ", ".join(run.declared) or "none"),
        ("Devices", ", ".join(dict.fromkeys(devices))),
        (
            "Numbers of ranks",
            ", ".join(str(world) for world in sorted({one.world for one in settings})),
        ),
        ("Precisions", precisions(settings)),
        ("Started", run.started),
        ("Duration", f"{run.seconds:.1f} s"),
        ("Digest of report.json", digest),
    ]

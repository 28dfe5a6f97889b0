"""Summaries of a run that all kinds of reports show in addition to its rows."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine_api.config import Parallelism
from engine_conformance.environment import SHIMMED
from engine_conformance.report.document import counts
from engine_conformance.results import BAD, Part, Row, Setting, SuiteRun
from engine_conformance.variants import name_variant
from engine_conformance.verdict import ProfileVerdict, Verdict, unavailable, untested

__all__ = [
    "GroupView",
    "ProfileView",
    "absent",
    "by_case",
    "commands",
    "coverage",
    "describe_selection",
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
# Facts of the environment that are no distributions.
_MACHINE = ("python", "system", "cpu", "accelerator")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupView:
    """One group of cases in one profile and model type."""

    name: str
    verdict: Verdict
    counts: dict[str, int]
    """Numbers of rows by status, for the statuses that occur."""
    provisional: int
    worst: Row | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileView:
    """One verdict with the reasons why it is no better, and its groups."""

    result: ProfileVerdict
    reasons: list[str]
    groups: list[GroupView]


def profiles(run: SuiteRun, verdicts: Iterable[ProfileVerdict]) -> list[ProfileView]:
    """Return one view per verdict, in their order."""
    return [
        ProfileView(
            result=result,
            reasons=reasons(run, result),
            groups=[_group(run, result, name) for name in result.groups],
        )
        for result in verdicts
    ]


def _group(run: SuiteRun, result: ProfileVerdict, name: str) -> GroupView:
    rows = [row for row in _rows_of(run, result) if row.group == name]
    found = {status: number for status, number in counts(rows).items() if number}
    return GroupView(
        name=name,
        verdict=result.groups[name],
        counts=found,
        provisional=sum(row.provisional for row in rows),
        worst=worst_row(rows),
    )


def _rows_of(run: SuiteRun, result: ProfileVerdict) -> list[Row]:
    about = (result.profile, result.model_type)
    return [row for row in run.rows if (row.profile, row.setting.model_type) == about]


def reasons(run: SuiteRun, result: ProfileVerdict) -> list[str]:
    """Return the reasons why a verdict is no better than it is.

    There are none for ``conformant``.
    """
    if result.verdict == "conformant":
        return []
    rows = [row for row in _rows_of(run, result) if not row.provisional]
    short = [
        f"{number} {status}"
        for status, number in counts(rows).items()
        if number and status not in _WELL
    ]
    found = [", ".join(short)] if short else []
    if not rows:
        found.append("no case ran that counts")
    if run.is_part:
        found.append(f"a part of a certificate, {coverage(run)}")
    elif not run.selection["complete"]:
        found.append("not all cases were asked for")
    missing = untested(run.rows, run.declared)
    if missing and not run.is_part:
        found.append(f"declared, but shown by no case that passed: {', '.join(missing)}")
    return found


def coverage(run: SuiteRun) -> str:
    """Return what a part of a certificate covers: numbers of its rows, and how it was chosen."""
    there = {row.key for row in run.rows}
    rows = f"{sum(key in there for key in run.planned)} of {len(run.planned)} rows"
    chosen = run.selection
    by = f"part {chosen['part']}" if chosen.get("part") else f"--case {','.join(chosen['cases'])}"
    return f"{rows} ({by})"


def problems(rows: Iterable[Row]) -> list[Row]:
    """Return rows that neither passed nor are listed deviations.

    `absent` has those not run.
    """
    return [row for row in rows if row.outcome.status in BAD or row.outcome.status == "suite-error"]


def absent(rows: Iterable[Row]) -> dict[str, dict[Setting, list[str]]]:
    """Return the cases that were not run, by reason and setting."""
    found: dict[str, dict[Setting, list[str]]] = {}
    for row in rows:
        if row.outcome.status == "not-run":
            found.setdefault(row.outcome.message, {}).setdefault(row.setting, []).append(row.case)
    return found


def by_case(rows: Iterable[Row]) -> dict[str, dict[str, list[Row]]]:
    """Return the rows by lane and case, in the order in which they ran."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        found.setdefault(lane(row), {}).setdefault(row.case, []).append(row)
    return found


def lane(row: Row) -> str:
    """Return the group's name, with the profile in front if the name does not imply it."""
    return row.group if row.profile in ("engine", row.group) else f"{row.profile}: {row.group}"


def worst_row(rows: Iterable[Row]) -> Row | None:
    """Return the row with the largest margin, or None if no numbers were compared."""
    compared = [(row.outcome.margin, row) for row in rows if row.outcome.margin is not None]
    return max(compared, key=lambda pair: pair[0])[1] if compared else None


def margin_text(margin: float | None) -> str:
    """Return a margin with two digits or as a whole number, or "" if nothing was compared."""
    if margin is None:
        return ""
    if not math.isfinite(margin):
        return "infinite"
    return "bitwise" if margin == 0 else f"{margin:.0f}" if 10 <= margin < 1e6 else f"{margin:.2g}"


def requirements(run: SuiteRun) -> tuple[list[str], list[str]]:
    """Return pip's arguments to repeat the run, and notes on what its index does not have."""
    plugin = run.selection["plugin"]
    engine = run.distribution.partition("==")[0]
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
    """Return the precisions, with their numbers of ranks if these are not the same for all."""
    worlds: dict[str, set[int]] = {}
    for setting in settings:
        worlds.setdefault(setting.dtype, set()).add(setting.world)
    if all(found == next(iter(worlds.values())) for found in worlds.values()):
        return ", ".join(worlds)
    return "; ".join(
        f"{dtype} on {', '.join(map(str, sorted(found)))}" for dtype, found in worlds.items()
    )


def describe_selection(part: Part) -> str:
    """Return which cases a part's run was to show: by module, a number for each, if by name."""
    chosen = part.selection
    if chosen.get("part"):
        return f"part {chosen['part']}"
    if not chosen["cases"]:
        return "the quick tier" if chosen["quick"] else "all cases"
    modules = Counter(name.partition(".")[0] for name in chosen["cases"])
    return ", ".join(f"{number} of {module}" for module, number in sorted(modules.items()))


def commands(run: SuiteRun) -> list[str]:
    """Return the command lines that make the report again: each part's, and the joining's."""
    lines = [shlex.join(["engine-conformance", *part.command]) for part in run.parts]
    own = shlex.join(["engine-conformance", *run.command])
    return lines if own in lines else [*lines, own]


def _variants_text(run: SuiteRun) -> str:
    """Return the layout and the options of the cases, and those in which some were repeated."""
    chosen = run.selection
    layout = Parallelism(**chosen["layout"])
    own = name_variant(layout, chosen.get("options", {})) or "data parallel with default options"
    variants = dict.fromkeys(row.setting.variant for row in run.rows if row.setting.variant)
    if not variants:
        return f"{own} only, except for cases that set a layout themselves"
    return f"{own}; some cases also with {'; '.join(variants)}"


def _commit_text(commits: Mapping[str, str]) -> str:
    """Return the packages' commits, or the one that all of them have."""
    if len(set(commits.values())) == 1:
        return f"{next(iter(commits.values()))} ({', '.join(commits)})"
    return ", ".join(f"{name} {commit}" for name, commit in commits.items())


def facts(run: SuiteRun, digest: str) -> Sequence[tuple[str, str]]:
    """Return what was tested, with what, when and where, as pairs of a name and a text."""
    suite = run.suite
    settings = [row.setting for row in run.rows]
    shimmed = run.environment.get("accelerator") == SHIMMED
    devices = [SHIMMED if shimmed and s.device == "cpu" else s.device for s in settings]
    return [
        ("Distribution", run.distribution),
        *([("Commit", _commit_text(run.commits))] if run.commits else []),
        ("Contract", run.contract),
        ("Suite", f"{suite['version']} (contract {suite['contract']}), SHA-256 {suite['digest']}"),
        ("Declared capabilities", ", ".join(run.declared) or "none"),
        *(
            (f"Declared, and refused here: {name}", reason)
            for name, reason in unavailable(run.rows, run.declared).items()
        ),
        *([("Model families", f"{', '.join(run.families)} alone")] if run.families else []),
        ("Devices", ", ".join(dict.fromkeys(devices))),
        (
            "Numbers of ranks",
            ", ".join(str(world) for world in sorted({setting.world for setting in settings})),
        ),
        ("Precisions", precisions(settings)),
        ("Layouts and options", _variants_text(run)),
        ("Started", run.started),
        ("Duration", f"{run.seconds:.1f} s"),
        ("Digest of report.json", digest),
    ]

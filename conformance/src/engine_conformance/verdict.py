"""Verdicts and the exit code of a run, from its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine_conformance.results import BAD, Key, Row

__all__ = [
    "EXIT",
    "ProfileVerdict",
    "Verdict",
    "compute_verdicts",
    "exit_code",
    "is_complete",
    "unavailable",
    "untested",
    "verdict_of",
]

Verdict = Literal["conformant", "partial", "non-conformant"]
EXIT = {"conformant": 0, "not conformant": 1, "usage": 2, "could not run": 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileVerdict:
    """The verdict on one profile of one model type, and on each group of cases in it."""

    profile: str
    model_type: str
    verdict: Verdict
    groups: Mapping[str, Verdict]


def verdict_of(rows: Iterable[Row]) -> Verdict:
    """Return the verdict on some rows.

    It is ``non-conformant`` if a row that counts fails, and ``partial`` if nothing ran
    or something could not be shown.
    """
    statuses = {row.outcome.status for row in rows if not row.provisional}
    if statuses & BAD:
        return "non-conformant"
    return "conformant" if statuses and statuses <= {"passed", "refused"} else "partial"


def compute_verdicts(
    rows: Sequence[Row], *, complete: bool, declared: Sequence[str] = ()
) -> list[ProfileVerdict]:
    """Return one verdict per profile and model type, in the order in which they ran.

    Args:
        rows: the rows of one run.
        complete: false if cases were picked by hand, or by a quick tier: then no verdict is better
            than ``partial``.
        declared: capabilities, each of which a case that passed must have shown.
    """
    keys = dict.fromkeys((row.profile, row.setting.model_type) for row in rows)
    missing = untested(rows, declared)
    return [_compute_verdict(rows, key, complete=complete and not missing) for key in keys]


def is_complete(
    selection: Mapping[str, Any],
    rows: Sequence[Row] = (),
    parts: Sequence[Mapping[str, Any]] = (),
    planned: Sequence[Key] = (),
) -> bool:
    """Return whether nothing was left out by hand, without which no verdict is ``conformant``.

    For a joined report: whether each setting of its rows was asked for as a whole by
    one of its parts, or all parts of a certificate are there.

    Args:
        selection: the cases and settings asked for, by the names of a report's ``selection``.
        rows: the rows of a joined report.
        parts: the selections of a joined report's parts.
        planned: the rows of the whole certificate of which the parts are.
    """
    if not parts:
        # Reports from before certificates came in parts name no part.
        picked = selection["cases"] or selection["quick"] or selection.get("part")
        return not picked
    there = {row.key for row in rows}
    whole = set(planned) if there.issuperset(planned) else set[Key]()
    return all(row.key in whole or any(_asked_for_all(part, row) for part in parts) for row in rows)


def _asked_for_all(selection: Mapping[str, Any], row: Row) -> bool:
    """Return whether a selection had every case of the row's setting, model type and profile."""
    model_types = selection["model_types"]
    profiles = selection["profiles"]
    return (
        is_complete(selection)
        and row.setting.world in selection["worlds"]
        and row.setting.dtype in selection["dtypes"]
        and (not model_types or row.setting.model_type in model_types)
        and (not profiles or row.profile in profiles)
    )


def _compute_verdict(
    rows: Sequence[Row], key: tuple[str, str], *, complete: bool
) -> ProfileVerdict:
    profile, model_type = key
    mine = [row for row in rows if (row.profile, row.setting.model_type) == key]
    names = dict.fromkeys(row.group for row in mine)
    groups: dict[str, Verdict] = {
        name: verdict_of(row for row in mine if row.group == name) for name in names
    }
    verdict = verdict_of(mine)
    if verdict == "conformant" and not complete:
        verdict = "partial"
    return ProfileVerdict(profile=profile, model_type=model_type, verdict=verdict, groups=groups)


def untested(rows: Sequence[Row], declared: Sequence[str]) -> list[str]:
    """Return declared capabilities that no case showed.

    Any case on several ranks shows ``dp``. A capability that was refused for want of a package is
    shown as far as it can be (`unavailable`).
    """
    if not any(row.profile == "engine" for row in rows):
        return []
    passed = [row for row in rows if row.outcome.status == "passed"]
    shown = {row.group for row in passed} | set(unavailable(rows, declared))
    if any(row.setting.world > 1 and not row.setting.variant for row in passed):
        shown.add("dp")
    return sorted(set(map(str, declared)) - shown)


def unavailable(rows: Sequence[Row], declared: Sequence[str]) -> dict[str, str]:
    """Return declared capabilities that were refused for want of a package, with the reasons."""
    names = set(map(str, declared))
    return {
        row.group: row.outcome.message
        for row in rows
        if row.outcome.status == "refused" and row.group in names
    }


def exit_code(
    rows: Sequence[Row],
    verdicts: Sequence[ProfileVerdict],
    *,
    certify: bool,
    part: bool = False,
) -> int:
    """Return the exit code of a run.

    0: nothing failed, and with ``certify`` every verdict is conformant; 1: something
    failed or is not conformant; 3: nothing was shown.

    Args:
        rows: the rows of one run.
        verdicts: as `compute_verdicts` returns them.
        certify: whether a certificate was asked for.
        part: whether the rows are a part of a certificate, of which only the whole has a verdict:
            with ``certify`` each of them must have been shown.
    """
    statuses = [row.outcome.status for row in rows if not row.provisional]
    if any(status in BAD for status in statuses):
        return EXIT["not conformant"]
    if "suite-error" in statuses or not any(status in ("passed", "refused") for status in statuses):
        return EXIT["could not run"]
    if part and certify:
        shown = set(statuses) <= {"passed", "refused"}
        return EXIT["conformant"] if shown else EXIT["not conformant"]
    if certify and any(result.verdict != "conformant" for result in verdicts):
        return EXIT["not conformant"]
    return EXIT["conformant"]

"""Joining of several reports of one engine into one, whose verdict is computed like any other.

Joined reports must be about the same thing: engine, suite, versions, kind of machine
and options. A case that ran in several of them counts as the worst that was seen, so
that a verdict cannot be got by running until it passes. Only a result that showed
nothing (not run, or a fault of the suite's own) gives way to one that did. Of parts of
one certificate each case and setting is in one part alone. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine_conformance.environment import SHIMMED, SIMULATED
from engine_conformance.errors import UsageError
from engine_conformance.report.document import parts_of, read_document
from engine_conformance.results import Key, Part, Row, Status, SuiteRun
from engine_conformance.verdict import is_complete

__all__ = [
    "check_certified",
    "check_same_plan",
    "check_whole",
    "differences",
    "joined_environment",
    "joined_selection",
    "list_keys",
    "merge",
    "shown",
    "sorted_keys",
]

# From the status that counts most: bad, a listed deviation, good, and those that show nothing.
_STATUSES: tuple[Status, ...] = (
    "failed",
    "timeout",
    "accepted-undeclared",
    "stale-deviation",
    "deviation",
    "passed",
    "refused",
    "suite-error",
    "not-run",
)
_SHOWED_NOTHING = ("suite-error", "not-run")
# The options of the selection that all reports must have in common.
_SAME_OPTIONS = ("device", "layout", "partner", "plugin", "options", "seed")
# The options that say which rows a certificate has, with the selection's field of each.
_SETTINGS = {
    "world": "worlds",
    "dtype": "dtypes",
    "model-type": "model_types",
    "profile": "profiles",
}
# Facts that belong to the kind of machine only where the cases ran on them.
_HOST = ("cpu",)
_MACHINE = (*_HOST, "accelerator")
# The most cases and settings that an error lists.
_MOST = 3
# Numbers of devices and cores: a larger machine of the same kind is the same kind.
_COUNTED = re.compile(r"^\d+ x |, \d+ cores$")


def shown(run: SuiteRun) -> frozenset[Key]:
    """Return the cases and settings of which a run has shown something and that need no rerun."""
    return frozenset(row.key for row in run.rows if row.outcome.status not in _SHOWED_NOTHING)


def differences(first: SuiteRun, other: SuiteRun, *, any_machine: bool = False) -> list[str]:
    """Return the reasons why two runs cannot be joined: expected (the first's value) and got.

    Args:
        first: a run.
        other: another one.
        any_machine: whether the kinds of machine may differ. A simulated device stays another one.
    """
    want = _shared_facts(first, any_machine=any_machine)
    got = _shared_facts(other, any_machine=any_machine)
    return [
        f"{name}: expected {want.get(name)!r}, got {got.get(name)!r}"
        for name in dict.fromkeys((*want, *got))
        if want.get(name) != got.get(name)
    ]


def _shared_facts(run: SuiteRun, *, any_machine: bool) -> dict[str, Any]:
    """Return the facts by name that joined reports must have in common."""
    facts = {
        "name": run.name,
        "distribution": run.distribution,
        "contract": run.contract,
        "declared capabilities": list(run.declared),
        "declared model families": list(run.families),
    }
    facts |= {f"suite's {name}": text for name, text in run.suite.items()}
    facts |= {f"digest of {name}'s files": text for name, text in run.sources.items()}
    facts |= {f"--{name}": run.selection.get(name) or None for name in _SAME_OPTIONS}
    # Versions and the kind of machine, without the numbers of devices and cores.
    left_out = () if run.selection["device"] == "cpu" else _HOST
    if any_machine and run.environment.get("accelerator") not in (SHIMMED, SIMULATED):
        left_out = _MACHINE
    return facts | {
        n: _COUNTED.sub("", text) for n, text in run.environment.items() if n not in left_out
    }


def merge(
    documents: Mapping[str, Mapping[str, Any]],
    *,
    command: Sequence[str],
    certify: bool,
    any_machine: bool = False,
) -> SuiteRun:
    """Join reports into one run, whose parts they are.

    Args:
        documents: by the name that errors show, as their paths; each must have been verified.
        command: the arguments after ``engine-conformance``, for the report.
        certify: whether a certificate was asked for, for the report.
        any_machine: whether the kinds of machine may differ (`differences`).

    Raises:
        UsageError: if there is nothing to join, or reports do not belong together; the text says
            which and why.
    """
    runs = {label: read_document(document)[0] for label, document in documents.items()}
    if not runs:
        raise UsageError("merge: name at least one report.json")
    (first_label, first), *others = runs.items()
    for label, other in others:
        if problems := differences(first, other, any_machine=any_machine):
            reasons = "".join(f"\n  {problem}" for problem in problems)
            raise UsageError(
                f"{label} cannot be joined with {first_label}: "
                f"they are not about the same thing{reasons}\n"
                "  run both with the same versions on the same kind of machine"
            )
    parts = [part for document in documents.values() for part in parts_of(document)]
    digests = [part.digest for part in parts]
    if twice := sorted({digest for digest in digests if digests.count(digest) > 1}):
        raise UsageError(
            f"merge: the run with digest {twice[0][:12]}… is given twice; name each report once"
        )
    planned = _joined_plan(runs)
    if certify or planned:
        check_certified(documents)
    rows = _joined_rows((row for run in runs.values() for row in run.rows), planned)
    selections = [part.selection for part in parts]
    complete = is_complete({}, rows, selections, planned)
    return replace(
        first,
        trace=list(dict.fromkeys(line for run in runs.values() for line in run.trace)),
        command=list(command),
        selection=joined_selection(selections, complete=complete) | {"complete": complete},
        certify=certify,
        environment=joined_environment([part.environment for part in parts]),
        started=min(part.started for part in parts),
        seconds=sum(part.seconds for part in parts),
        rows=rows,
        parts=tuple(parts),
        planned=planned,
    )


def check_certified(documents: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise unless each report is a part of a certificate, or of runs that left nothing out.

    Cases that were picked by hand, without a certificate in view, complete none.

    Args:
        documents: by the name that errors show.

    Raises:
        UsageError: it names the first report that is neither.
    """
    for label, document in documents.items():
        if read_document(document)[0].planned:
            continue
        for part in parts_of(document):
            if not is_complete(part.selection):
                raise UsageError(
                    f"{label} is no part of a certificate: it was run without --certify, and left "
                    f"cases out ({_name_selection(part.selection)})\n"
                    "  run it again with --certify, or leave it out"
                )


def check_same_plan(earlier: SuiteRun, planned: Sequence[Key]) -> None:
    """Raise unless a run that is continued is of the certificate that will be run.

    Args:
        earlier: the run that is continued.
        planned: the rows of the certificate; empty if no part of one will run.

    Raises:
        UsageError: it names rows that one of them alone has.
    """
    alone = set(earlier.planned) ^ set(planned)
    if not alone:
        return
    if not earlier.planned:
        what = "no part of the certificate that would run now"
    elif not planned:
        what = "a part of a certificate, and what would run now is none"
    else:
        what = "a part of another certificate than what would run now"
    raise UsageError(
        f"--continue: the report is {what}; one of them alone has"
        f"{list_keys(sorted_keys(alone))}\n"
        "  use the same --world, --dtype, --model-type and --profile, and --certify in both or in "
        "none, or another --report folder"
    )


def check_whole(run: SuiteRun) -> None:
    """Raise unless every row is there of the certificates whose parts were joined.

    Raises:
        UsageError: it names the certificate, and the parts and the cases that are missing.
    """
    there = {row.key for row in run.rows}
    for options, selections in _by_certificate(run.parts).items():
        own = [key for key in run.planned if any(_covers(one, key) for one in selections)]
        missing = [key for key in own if key not in there]
        if not missing:
            continue
        words = [one["part"] for one in selections if one.get("part")]
        counts = {word.partition("/")[2] for word in words}
        absent: list[str] = []
        # Parts that were picked by --case have no numbers.
        if len(counts) == 1 and len(words) == len(selections):
            count = counts.pop()
            numbered = (f"{number}/{count}" for number in range(1, int(count) + 1))
            absent = [word for word in numbered if word not in words]
        named = f"part {', '.join(absent)}" if absent else "a part"
        given = ", ".join(_name_selection(one) for one in selections)
        raise UsageError(
            f"merge: {named} of the certificate is missing: {len(missing)} of {len(own)} rows "
            f"are in no report{list_keys(missing)}\n"
            f"  given of the certificate of {options}: {given}\n"
            "  run what is missing, and join it; without --certify the result is a larger part"
        )


def _by_certificate(parts: Sequence[Part]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the selections of parts by the options that each certificate was asked for with."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for part in parts:
        given = part.selection
        options = " ".join(
            f"--{name} {','.join(map(str, given[key]))}"
            for name, key in _SETTINGS.items()
            if given[key]
        )
        found.setdefault(options, []).append(given)
    return found


def _covers(selection: Mapping[str, Any], key: Key) -> bool:
    """Return whether a selection asks for a row's setting."""
    _, setting = key
    types = selection["model_types"]
    return (
        setting.world in selection["worlds"]
        and setting.dtype in selection["dtypes"]
        and (not types or setting.model_type in types)
    )


def _joined_plan(runs: Mapping[str, SuiteRun]) -> list[Key]:
    """Return the rows of the certificates of which runs are parts.

    Raises:
        UsageError: if two parts have a row in common, or are of certificates that have some, and
            not all, rows in common.
    """
    plans: dict[frozenset[Key], Sequence[Key]] = {}
    labels: dict[frozenset[Key], str] = {}
    owners: dict[Key, str] = {}
    for label, run in runs.items():
        if not run.planned:
            continue
        plan = frozenset(run.planned)
        for other, first in labels.items():
            if other != plan and other & plan:
                alone = list_keys(sorted_keys(other ^ plan))
                raise UsageError(
                    f"{label} and {first} are parts of two certificates, which have only some "
                    f"rows in common; one of them alone has{alone}\n"
                    "  run both parts with the same --world, --dtype, --model-type and --profile"
                )
        plans.setdefault(plan, run.planned)
        labels.setdefault(plan, label)
        done = shown(run)
        own = [key for key in run.planned if key in done]
        if twice := [key for key in own if key in owners]:
            owner = owners[twice[0]]
            raise UsageError(
                f"{label} ({_name_selection(run.selection)}) has rows that {owner} "
                f"({_name_selection(runs[owner].selection)}) "
                f"has, too: {len(twice)}{list_keys(twice)}\n"
                "  each row of a certificate is in one part: name one of these reports alone"
            )
        owners |= dict.fromkeys(own, label)
    return [key for plan in plans.values() for key in plan]


def sorted_keys(keys: Iterable[Key]) -> list[Key]:
    """Return cases and settings by their texts."""
    return sorted(keys, key=lambda key: (key[0], str(key[1])))


def _name_selection(selection: Mapping[str, Any]) -> str:
    """Return which part of all cases a selection asks for."""
    if part := selection.get("part"):
        return f"part {part}"
    if cases := selection["cases"]:
        return f"--case {','.join(cases)}"
    return "--tier quick" if selection["quick"] else "all cases"


def list_keys(keys: Sequence[Key]) -> str:
    """Return the first cases and settings, each on a line of its own."""
    lines = [f"\n  {case} in {setting}" for case, setting in keys[:_MOST]]
    more = f"\n  and {len(keys) - _MOST} more" if len(keys) > _MOST else ""
    return "".join(lines) + more


def _joined_rows(rows: Iterable[Row], planned: Sequence[Key]) -> list[Row]:
    """Return one row per case and setting, the worst seen.

    Planned rows come first, in the plan's order, and others in that of their first appearance.
    """
    found: dict[Key, Row] = {}
    for row in rows:
        before = found.get(row.key)
        if before is None or _rank(row) < _rank(before):
            found[row.key] = row
    inside = [found.pop(key) for key in planned if key in found]
    return [*inside, *found.values()]


def _rank(row: Row) -> tuple[int, float]:
    margin = row.outcome.margin
    return _STATUSES.index(row.outcome.status), 0.0 if margin is None else -margin


def joined_selection(selections: Sequence[Mapping[str, Any]], *, complete: bool) -> dict[str, Any]:
    """Return what was asked for altogether.

    An empty list means all, and stays empty. Joined parts that are complete (`is_complete`) have
    left no case out.
    """
    first = dict(selections[0])
    for name in ("worlds", "dtypes", "model_types", "profiles", "cases"):
        lists = [selection[name] for selection in selections]
        words = list(dict.fromkeys(word for words in lists for word in words))
        first[name] = words if all(lists) else []
    asked = list(dict.fromkeys(selection.get("part", "") for selection in selections))
    first["part"] = ", ".join(filter(None, asked))
    if complete:
        first |= {"cases": [], "part": ""}
    first["worlds"] = sorted(first["worlds"])
    first["quick"] = all(selection["quick"] for selection in selections)
    first["patience"] = max(selection["patience"] for selection in selections)
    return first


def joined_environment(environments: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return every fact, with all of its texts where they differ, as numbers of devices do."""
    names = dict.fromkeys(name for facts in environments for name in facts)
    return {
        name: "; ".join(dict.fromkeys(facts[name] for facts in environments if name in facts))
        for name in names
    }

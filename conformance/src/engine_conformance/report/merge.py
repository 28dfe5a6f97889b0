"""Joining of several reports of one engine into one, whose verdict is computed like any other.

Joined reports must be about the same thing: engine, suite, versions, kind of machine
and options. A case that ran in several of them counts as the worst that was seen, so
that a verdict cannot be got by running until it passes. Only a result that showed
nothing (not run, or a fault of the suite's own) gives way to one that did. Imports no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine_conformance.errors import UsageError
from engine_conformance.report.document import parts_of, read_document
from engine_conformance.results import Row, Setting, Status, SuiteRun
from engine_conformance.verdict import is_complete

__all__ = ["Key", "differences", "joined_environment", "joined_selection", "key", "merge", "shown"]

Key = tuple[str, Setting]
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
# Facts that belong to the kind of machine only where the cases ran on them.
_HOST = ("cpu",)
# Numbers of devices and cores: a larger machine of the same kind is the same kind.
_COUNTED = re.compile(r"^\d+ x |, \d+ cores$")


def key(row: Row) -> Key:
    """Return the subject of a row: a case in a setting."""
    return row.case, row.setting


def shown(run: SuiteRun) -> frozenset[Key]:
    """Return the cases and settings of which a run has shown something and that need no rerun."""
    return frozenset(key(row) for row in run.rows if row.outcome.status not in _SHOWED_NOTHING)


def differences(first: SuiteRun, other: SuiteRun) -> list[str]:
    """Return the reasons why two runs cannot be joined: expected (the first's value) and got."""
    want = _shared_facts(first)
    got = _shared_facts(other)
    return [
        f"{name}: expected {want.get(name)!r}, got {got.get(name)!r}"
        for name in dict.fromkeys((*want, *got))
        if want.get(name) != got.get(name)
    ]


def _shared_facts(run: SuiteRun) -> dict[str, Any]:
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
    return facts | {
        n: _COUNTED.sub("", text) for n, text in run.environment.items() if n not in left_out
    }


def merge(
    documents: Mapping[str, Mapping[str, Any]], *, command: Sequence[str], certify: bool
) -> SuiteRun:
    """Join reports into one run, whose parts they are.

    Args:
        documents: by the name that errors show, as their paths; each must have been verified.
        command: the arguments after ``engine-conformance``, for the report.
        certify: whether a certificate was asked for, for the report.

    Raises:
        UsageError: if there is nothing to join, or reports do not belong together; the text says
            which and why.
    """
    runs = {label: read_document(document)[0] for label, document in documents.items()}
    if not runs:
        raise UsageError("merge: name at least one report.json")
    (first_label, first), *others = runs.items()
    for label, other in others:
        if problems := differences(first, other):
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
    rows = _joined_rows(row for run in runs.values() for row in run.rows)
    selection = joined_selection([part.selection for part in parts])
    complete = is_complete(selection, rows, [part.selection for part in parts])
    return replace(
        first,
        trace=list(dict.fromkeys(line for run in runs.values() for line in run.trace)),
        command=list(command),
        selection=selection | {"complete": complete},
        certify=certify,
        environment=joined_environment([part.environment for part in parts]),
        started=min(part.started for part in parts),
        seconds=sum(part.seconds for part in parts),
        rows=rows,
        parts=tuple(parts),
    )


def _joined_rows(rows: Iterable[Row]) -> list[Row]:
    """Return one row per case and setting, the worst seen, in the order of first appearance."""
    found: dict[Key, Row] = {}
    for row in rows:
        before = found.get(key(row))
        if before is None or _rank(row) < _rank(before):
            found[key(row)] = row
    return list(found.values())


def _rank(row: Row) -> tuple[int, float]:
    margin = row.outcome.margin
    return _STATUSES.index(row.outcome.status), 0.0 if margin is None else -margin


def joined_selection(selections: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what was asked for altogether.

    An empty list means all, and stays empty.
    """
    first = dict(selections[0])
    for name in ("worlds", "dtypes", "model_types", "profiles", "cases"):
        lists = [selection[name] for selection in selections]
        words = list(dict.fromkeys(word for words in lists for word in words))
        first[name] = words if all(lists) else []
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

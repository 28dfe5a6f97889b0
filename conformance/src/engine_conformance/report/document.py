"""Conversion of a run to one JSON document and back.

`schema.json` describes it field by field.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from engine_conformance.environment import installed_code
from engine_conformance.results import STATUSES, Key, Outcome, Part, Row, Setting, SuiteRun
from engine_conformance.verdict import ProfileVerdict

__all__ = ["INFINITE", "SCHEMA", "counts", "digest", "parts_of", "read_document", "to_document"]

SCHEMA = "1"
# JSON has no infinity.
INFINITE = "infinite"
_SETTING = ("model_type", "device", "world", "dtype", "variant")


def to_document(run: SuiteRun, verdicts: Sequence[ProfileVerdict]) -> dict[str, Any]:
    """Return everything about a run as JSON values, with times rounded to milliseconds.

    Args:
        run: a run of the installed suite, which alone can be written; ``run.selection`` holds the
            selection's fields and ``complete``.
        verdicts: as `engine_conformance.verdict.compute_verdicts` returns them.
    """
    # JSON has lists only: a document that is read must equal the one that was written.
    selection = json.loads(json.dumps(dict(run.selection), allow_nan=False))
    document = {
        "schema": SCHEMA,
        "contract": run.contract,
        "suite": dict(run.suite),
        "code": installed_code(),
        "name": run.name,
        "distribution": run.distribution,
        "trace": list(run.trace),
        "declared": list(run.declared),
        **({"families": list(run.families)} if run.families else {}),
        "verdicts": [
            {
                "profile": j.profile,
                "model_type": j.model_type,
                "verdict": j.verdict,
                "groups": dict(j.groups),
            }
            for j in verdicts
        ],
        "environment": dict(run.environment),
        "complete": selection.pop("complete"),
        "selection": selection,
        "command": _without_places(run.command),
        "certify": run.certify,
        "started": run.started,
        "seconds": round(run.seconds, 3),
        "counts": counts(run.rows),
        "rows": [_row(row) for row in run.rows],
        "sources": dict(run.sources),
        "commits": dict(run.commits),
        "parts": [asdict(part) | {"command": _without_places(part.command)} for part in run.parts],
        **({"planned": _plan(run.planned)} if run.planned else {}),
    }
    return document | {"digest": digest(document)}


def read_document(document: Mapping[str, Any]) -> tuple[SuiteRun, list[ProfileVerdict]]:
    """Return the run and the verdicts of a document that fits the schema."""
    fields = (
        "name",
        "distribution",
        "contract",
        "declared",
        "trace",
        "command",
        "certify",
        "environment",
        "suite",
        "started",
        "seconds",
    )
    run = SuiteRun(
        **{name: document[name] for name in fields},
        selection=document["selection"] | {"complete": document["complete"]},
        rows=[_read_row(row) for row in document["rows"]],
        # Reports from before reports could be joined have neither sources nor parts.
        sources=document.get("sources", {}),
        # Reports from before 2026-11-25 name no commits.
        commits=document.get("commits", {}),
        parts=tuple(Part(**part) for part in document.get("parts", [])),
        families=tuple(document.get("families", ())),
        planned=tuple(
            (case, Setting(**{name: entry[name] for name in _SETTING}))
            for entry in document.get("planned", [])
            for case in entry["cases"]
        ),
    )
    return run, [ProfileVerdict(**entry) for entry in document["verdicts"]]


def parts_of(document: Mapping[str, Any]) -> list[Part]:
    """Return the runs that a report consists of: its parts, or itself."""
    if parts := document.get("parts"):
        return [Part(**part) for part in parts]
    names = ("digest", "started", "seconds", "command", "selection", "environment")
    return [Part(**{name: document[name] for name in names})]


def counts(rows: Iterable[Row]) -> dict[str, int]:
    """Return the number of rows that ended in each of the nine statuses."""
    found = Counter(row.outcome.status for row in rows)
    return {status: found[status] for status in STATUSES}


def digest(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all but the digest itself.

    Keys are sorted, without white space and in ASCII, so that layout does not matter.
    """
    content = {name: value for name, value in document.items() if name != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _without_places(command: Sequence[str]) -> list[str]:
    """Return a command with the names alone of what it gives absolute paths of.

    They are places of one machine, where nobody else has a folder of reports.
    """
    return [
        f"{option}{equals}{Path(value).name}" if Path(value).is_absolute() else word
        for word in command
        for option, equals, value in [word.rpartition("=")]
    ]


def _row(row: Row) -> dict[str, Any]:
    outcome = row.outcome
    setting = row.setting
    return {
        "case": row.case,
        "must": row.must,
        "profile": row.profile,
        "group": row.group,
        **{name: getattr(setting, name) for name in _SETTING},
        "status": outcome.status,
        "seconds": round(outcome.seconds, 3),
        "margin": _margin(outcome.margin),
        "message": outcome.message,
        "hints": row.hints,
        "repeat": row.repeat,
        "provisional": row.provisional,
        "deviation": None if row.deviation is None else dict(row.deviation),
    }


def _plan(planned: Sequence[Key]) -> list[dict[str, Any]]:
    """Return cases and settings, with the cases of one setting in one entry."""
    return [
        {name: getattr(setting, name) for name in _SETTING} | {"cases": [case for case, _ in keys]}
        for setting, keys in groupby(planned, key=itemgetter(1))
    ]


def _margin(margin: float | None) -> float | str | None:
    # An error that is not a number is within no tolerance, so it counts as infinite.
    return INFINITE if margin is not None and not math.isfinite(margin) else margin


def _read_row(entry: Mapping[str, Any]) -> Row:
    margin = math.inf if entry["margin"] == INFINITE else entry["margin"]
    same = ("case", "must", "profile", "group", "hints", "repeat", "provisional", "deviation")
    return Row(
        **{name: entry[name] for name in same},
        # Reports from before cases were repeated name no variant.
        setting=Setting(**{name: entry[name] for name in _SETTING if name in entry}),
        outcome=Outcome(
            status=entry["status"],
            seconds=entry["seconds"],
            margin=margin,
            message=entry["message"],
        ),
    )

"""A badge, as shields.io's endpoint reads it (https://shields.io/badges/endpoint-badge)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from engine_conformance.verdict import Verdict

__all__ = ["badge", "worst"]

# From best to worst, as `Verdict` lists them.
_ORDER: tuple[Verdict, ...] = get_args(Verdict)
_COLORS: Mapping[Verdict, str] = {
    "conformant": "brightgreen",
    "partial": "yellow",
    "non-conformant": "red",
}


def badge(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report's badge: the worst verdict on the ``engine`` profile, or on what ran."""
    every = document["verdicts"]
    engine = [entry["verdict"] for entry in every if entry["profile"] == "engine"]
    verdict = worst(engine or [entry["verdict"] for entry in every])
    label = f"engine contract {document['contract']}"
    return {"schemaVersion": 1, "label": label, "message": verdict, "color": _COLORS[verdict]}


def worst(verdicts: list[Verdict]) -> Verdict:
    """Return the worst verdict.

    Without any it is ``partial``, for nothing was shown.
    """
    return max(verdicts, key=_ORDER.index) if verdicts else "partial"

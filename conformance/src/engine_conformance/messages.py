"""Texts of a row for people: one line for a case that passed, a full account of one that did not.

Imports no torch.
"""

from __future__ import annotations

from engine_conformance.results import BAD, Row

__all__ = ["describe", "line"]

_WIDE = 36


def line(row: Row) -> str:
    """Return status, case, setting, margin and time, and the reason if the case did not run."""
    outcome = row.outcome
    margin = outcome.margin
    shown = "" if margin is None else "bitwise" if margin == 0 else f"margin {margin:.2g}"
    text = (
        f"{outcome.status:<10} {row.case:<{_WIDE}} {row.setting}  "
        f"{shown:<14} {outcome.seconds:5.1f} s"
    )
    return f"{text}  {outcome.message}" if outcome.status == "not-run" else text


def describe(row: Row) -> str:
    """Return the requirement, what was seen, likely causes, and the command that repeats it."""
    status = row.outcome.status
    title = f"{status.upper()} {row.case} [{row.setting}]"
    parts = [f"MUST: {row.must}", row.outcome.message.rstrip()]
    if row.deviation:
        listed = row.deviation
        parts.append(f"listed: {listed['reason']} ({listed['issue']}, until {listed['until']})")
    if status in BAD and row.hints:
        parts.append(f"if this fails: {row.hints}")
    parts.append(f"repeat: {row.repeat}")
    return "\n".join([title, *("  " + part.replace("\n", "\n  ") for part in parts)])

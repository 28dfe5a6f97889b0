"""How a row is told to a person: one line when all is well, the whole story when not. Imports no torch."""

from __future__ import annotations

from engine_conformance.results import BAD, Row

__all__ = ["describe", "line"]

_WIDE = 36


def line(row: Row) -> str:
    """One line: status, case, setting, margin and time; for a case that did not run, why."""
    outcome, margin = row.outcome, row.outcome.margin
    told = "" if margin is None else "bitwise" if margin == 0 else f"margin {margin:.2g}"
    text = f"{outcome.status:<10} {row.case:<{_WIDE}} {row.setting}  {told:<14} {outcome.seconds:5.1f} s"
    return f"{text}  {outcome.message}" if outcome.status == "not-run" else text


def describe(row: Row) -> str:
    """What was required, what was seen instead, what it may come from, and the line that repeats it."""
    status = row.outcome.status
    title = f"{status.upper()} {row.case} [{row.setting}]"
    parts = [f"MUST: {row.must}", row.outcome.message.rstrip()]
    if row.deviation:
        parts.append(
            f"listed: {row.deviation['reason']} ({row.deviation['issue']}, until {row.deviation['until']})"
        )
    if status in BAD and row.hints:
        parts.append(f"if this fails: {row.hints}")
    parts.append(f"repeat: {row.repeat}")
    return "\n".join([title, *("  " + part.replace("\n", "\n  ") for part in parts)])

"""The last lines that the console shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine_conformance.report.document import counts
from engine_conformance.report.view import margin_text, reasons, worst_row
from engine_conformance.results import Run
from engine_conformance.verdict import Judgement

__all__ = ["summary"]


def summary(run: Run, verdicts: Sequence[Judgement], *, folder: Path | None) -> str:
    """Verdicts and why, counts, the worst margin, the time, and where the reports are (``folder``, if any)."""
    lines = []
    for one in verdicts:
        why = "; ".join(reasons(run, one))
        lines.append(
            f"{one.profile} / {one.model_type}: {one.verdict.upper()}"
            + (f" ({why})" if why else "")
        )
    told = ", ".join(f"{number} {status}" for status, number in counts(run.rows).items() if number)
    lines.append(f"{len(run.rows)} rows: {told or 'nothing ran'}; {run.seconds:.1f} s")
    if worst := worst_row(run.rows):
        lines.append(
            f"worst margin: {margin_text(worst.outcome.margin)}, {worst.case} [{worst.setting}]"
        )
    if folder is not None:
        lines.append(f"reports: {folder}")
    return "\n".join(lines)

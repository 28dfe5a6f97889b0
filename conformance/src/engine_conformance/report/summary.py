"""Summary of a run, shown as the last lines on the console."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine_conformance.report.document import counts
from engine_conformance.report.view import coverage, margin_text, reasons, worst_row
from engine_conformance.results import SuiteRun
from engine_conformance.verdict import ProfileVerdict

__all__ = ["summary"]


def summary(run: SuiteRun, verdicts: Sequence[ProfileVerdict], *, folder: Path | None) -> str:
    """Return verdicts with reasons, counts, worst margin, time, and the reports' folder, if any."""
    lines = []
    for result in verdicts:
        why = "; ".join(reasons(run, result))
        verdict = f"{result.verdict.upper()} ({why})" if why else result.verdict.upper()
        lines.append(f"{result.profile} / {result.model_type}: {verdict}")
    totals = ", ".join(
        f"{number} {status}" for status, number in counts(run.rows).items() if number
    )
    lines.append(f"{len(run.rows)} rows: {totals or 'nothing ran'}; {run.seconds:.1f} s")
    if worst := worst_row(run.rows):
        lines.append(
            f"worst margin: {margin_text(worst.outcome.margin)}, {worst.case} [{worst.setting}]"
        )
    if run.is_part:
        lines.append(
            f"this is a part of a certificate, {coverage(run)}: "
            "`engine-conformance merge PARTS --certify --report DIR` joins all parts"
        )
    if folder is not None:
        lines.append(f"reports: {folder}")
    return "\n".join(lines)

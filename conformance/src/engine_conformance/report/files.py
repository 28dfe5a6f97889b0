"""Writer of the folder of reports."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engine_conformance.report.badge import badge
from engine_conformance.report.document import to_document
from engine_conformance.report.junit import junit
from engine_conformance.report.render import certificate, html
from engine_conformance.results import SuiteRun
from engine_conformance.verdict import ProfileVerdict

__all__ = ["write_reports"]


def write_reports(folder: Path, run: SuiteRun, verdicts: Sequence[ProfileVerdict]) -> list[Path]:
    """Write all files of a report and return their paths.

    They are ``report.json``, ``certificate.md``, ``report.html``, ``junit.xml`` and
    ``badge.json``. All are written under other names first, so that a failure leaves an
    earlier report as it was.

    Raises:
        OSError: if the folder cannot be made or written; it names the path.
    """
    document = to_document(run, verdicts)
    texts = {
        "report.json": json.dumps(document, indent=1, allow_nan=False) + "\n",
        "certificate.md": certificate(document),
        "report.html": html(document),
        "junit.xml": junit(document),
        "badge.json": json.dumps(badge(document), indent=2) + "\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".reports-") as draft:
        for name, text in texts.items():
            # An engine's message may hold half of a surrogate pair, which UTF-8 cannot encode.
            (Path(draft) / name).write_text(text, encoding="utf-8", errors="backslashreplace")
        return [(Path(draft) / name).replace(folder / name) for name in texts]

"""Reports of a run: written, rendered, and checked again later. Imports no torch.

``report.json`` holds everything (`schema.json` describes it); all other files are
rendered from it.
"""

from __future__ import annotations

from engine_conformance.report.badge import badge
from engine_conformance.report.document import read_document, to_document
from engine_conformance.report.files import write_reports
from engine_conformance.report.junit import junit
from engine_conformance.report.merge import (
    check_certified,
    check_whole,
    differences,
    merge,
    shown,
)
from engine_conformance.report.render import certificate, html
from engine_conformance.report.renewal import SUITE, renew
from engine_conformance.report.summary import summary
from engine_conformance.report.verify import verify

__all__ = [
    "SUITE",
    "badge",
    "certificate",
    "check_certified",
    "check_whole",
    "differences",
    "html",
    "junit",
    "merge",
    "read_document",
    "renew",
    "shown",
    "summary",
    "to_document",
    "verify",
    "write_reports",
]

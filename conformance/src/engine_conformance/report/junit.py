"""JUnit XML as GitHub and GitLab read it: one suite per setting, one test case per row."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from typing import Any

from engine_conformance.messages import describe
from engine_conformance.report.document import read_document
from engine_conformance.results import BAD, Row

__all__ = ["junit"]

# The characters that XML 1.0, section 2.2, excludes, as terminal colours and NUL in a message.
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(document: Mapping[str, Any]) -> str:
    """Return the XML text of a report.

    ``failed``, ``accepted-undeclared``, ``stale-deviation`` and ``timeout`` are
    failures, ``suite-error`` is an error, ``not-run`` and ``deviation`` are skipped. So
    is any status of a provisional case, which does not count.
    """
    run, _ = read_document(document)
    root = ET.Element(
        "testsuites", name=_legal(f"engine-conformance {run.name}"), time=f"{run.seconds:.3f}"
    )
    for setting in dict.fromkeys(row.setting for row in run.rows):
        suite = ET.SubElement(root, "testsuite", name=_legal(str(setting)), timestamp=run.started)
        for row in run.rows:
            if row.setting == setting:
                _add(suite, row)
        _total(suite)
    _total(root)
    ET.indent(root)
    return ET.tostring(root, encoding="utf-8", xml_declaration=True).decode() + "\n"


def _add(suite: ET.Element, row: Row) -> None:
    # Readers tell test cases apart by class and name alone, so the name holds the setting.
    name = f"{row.case} [{row.setting}]"
    group = f"{row.profile}.{row.group}"
    seconds = f"{row.outcome.seconds:.3f}"
    testcase = ET.SubElement(
        suite, "testcase", name=_legal(name), classname=_legal(group), time=seconds
    )
    if kind := _kind(row):
        outcome = row.outcome
        status = f"provisional, {outcome.status}" if row.provisional else outcome.status
        message = _legal(f"{status}: {_reason(row)}")
        element = ET.SubElement(testcase, kind, type=outcome.status, message=message)
        element.text = _legal(outcome.message if outcome.status == "not-run" else describe(row))


def _kind(row: Row) -> str | None:
    status = row.outcome.status
    if status in ("passed", "refused"):
        return None
    if row.provisional or status in ("not-run", "deviation"):
        return "skipped"
    return "failure" if status in BAD else "error"


def _reason(row: Row) -> str:
    listed = row.deviation
    if row.outcome.status == "deviation" and listed:
        return f"{listed['reason']} ({listed['issue']}, until {listed['until']})"
    lines = row.outcome.message.strip().splitlines() or ["no message"]
    # The last line of a traceback is the error.
    return lines[-1] if row.outcome.status == "suite-error" else lines[0]


def _total(parent: ET.Element) -> None:
    cases = list(parent.iter("testcase"))
    parent.set("tests", str(len(cases)))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        parent.set(attribute, str(sum(case.find(tag) is not None for case in cases)))
    if parent.tag == "testsuite":
        parent.set("time", f"{sum(float(case.get('time', 0)) for case in cases):.3f}")


def _legal(text: str) -> str:
    return _ILLEGAL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)

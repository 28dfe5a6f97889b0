"""Write the README's table of certificates from conformance/reports/.

With ``--check``, check that the table is current instead.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from matrix import ROOT, replace_section, table, write_or_check

from engine_conformance.environment import SHIMMED, suite
from engine_conformance.report import verify
from engine_conformance.report.view import precisions
from engine_conformance.results import Setting

README, REPORTS = ROOT / "README.md", ROOT / "conformance" / "reports"
HEAD = (
    "engine",
    "model type",
    "device",
    "ranks",
    "precision",
    "cases",
    "worst margin",
    "verdict",
    "verifies today",
    "commit",
    "when",
)


def render() -> str:
    """Return one row per report and model type, of the ``engine`` and the ``rollout`` profile."""
    rows = [
        row
        for path in sorted(REPORTS.glob("**/report.json"))
        for row in _rows(path, json.loads(path.read_text()))
    ]
    return table(HEAD, rows)


def _rows(path: Path, report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    link = path.with_name("certificate.md").relative_to(ROOT).as_posix()
    chosen = report["selection"]
    verifies = _verifies(path, report)
    for one in (v for v in report["verdicts"] if v["profile"] in ("engine", "rollout")):
        mine = [
            r
            for r in report["rows"]
            if (r["profile"], r["model_type"]) == (one["profile"], one["model_type"])
        ]
        shown = sum(r["status"] in ("passed", "refused") for r in mine)
        margins = [
            math.inf if r["margin"] == "infinite" else r["margin"]
            for r in mine
            if r["margin"] is not None
        ]
        yield (
            f"`{report['name']}` ({report['distribution'].split(' ')[0]})",
            one["model_type"],
            _device(report),
            ", ".join(map(str, chosen["worlds"])),
            precisions(_settings(mine)),
            f"{shown} of {len(mine)}",
            f"{max(margins):.2g}" if margins else "-",
            f"[{one['verdict']}]({link})",
            verifies,
            _commit(report),
            report["started"][:10],
        )


def _verifies(path: Path, report: Mapping[str, Any]) -> str:
    """Return whether a report verifies with this tree's suite, and the reason if it does not."""
    ours, theirs = suite()["contract"], report["suite"]["contract"]
    if not verify(path, suite=suite()):
        return f"yes, contract {ours}"
    if theirs != ours:
        return f"no: of an older contract ({theirs})"
    return "no: of an older suite" if report["suite"] != suite() else "no: altered"


def _commit(report: Mapping[str, Any]) -> str:
    """Return the commits that were tested, shortened, or "not stated"."""
    known = {commit.partition("-") for commit in report.get("commits", {}).values()}
    return ", ".join(f"{one[0][:9]}{''.join(one[1:])}" for one in sorted(known)) or "not stated"


def _settings(rows: Iterable[Mapping[str, Any]]) -> list[Setting]:
    names = [one.name for one in fields(Setting)]
    return [Setting(**{name: row[name] for name in names if name in row}) for row in rows]


def _device(report: Mapping[str, Any]) -> str:
    device = report["selection"]["device"]
    accelerator = report["environment"].get("accelerator", "unknown")
    if device == "cpu":
        return accelerator if accelerator == SHIMMED else device
    return f"{device} ({accelerator})"


if __name__ == "__main__":
    sys.exit(
        write_or_check(
            README, replace_section(README.read_text(), "certificates", render()), "reports.py"
        )
    )

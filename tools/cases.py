"""Write docs/cases.md from the conformance cases' docstrings, or check that it is current (``--check``)."""

from __future__ import annotations

import sys

from matrix import ROOT, table, write_or_check

from engine_conformance.cases import load_cases

PAGE = ROOT / "docs" / "cases.md"
INTRODUCTION = """\
# Conformance cases

<!-- Generated from the cases' docstrings by tools/cases.py: change them there. -->

`python -m engine_conformance.run_cases --backend NAME --world 1,2 [--case GLOB]` runs them against any engine by name.
Each compares per token or per weight with a float64 oracle that shares no code with any engine, or asks for an error.
"""


def render() -> str:
    """The whole page."""
    rows = [
        (f"`{one.id}`", one.must, ", ".join(map(str, one.world)), ", ".join(one.requires), one.since)
        for one in load_cases().values()
    ]
    return f"{INTRODUCTION}\n{table(('case', 'MUST', 'ranks', 'requires', 'since'), rows)}\n"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, render(), "cases.py"))

"""Write docs/cases.md from the docstrings of the conformance cases.

With ``--check``, check that the page is current instead.
"""

from __future__ import annotations

import sys

from matrix import ROOT, table, write_or_check

from engine_api.capabilities import Capability
from engine_conformance.cases import Case, load_cases
from engine_conformance.cases._case import PROFILES
from engine_conformance.variants import CASES, CASES_OF_EXPERTS, LAYOUTS, name_variant

PAGE = ROOT / "docs" / "cases.md"
INTRODUCTION = """\
# Conformance cases

<!-- Generated from the cases' docstrings by tools/cases.py: change them there. -->

`engine-conformance run NAME [--world 1,2] [--case ID]` runs these cases against any engine by name,
and `explain ID` prints a whole one. Each case compares results per token or per weight with a
float64 oracle that shares no code with any engine, or bit for bit with the engine itself, or asks
for an error. *Core* cases apply to every engine, *undeclared* ones to engines that do not declare
the capability, and the others to engines that declare the capability that is their group.
[The contract](contract.md) states what each case demands. `--tier quick` leaves out the *full*
tier, and runs those with *once* on the smallest number of ranks alone.
"""
REPEATED = """\
## Repeated cases

A run of all cases repeats these in each declared layout, on the smallest number of several ranks
that it has, and with the options that the descriptor lists as
[`variants`](contract.md#plugin-variants).
"""
SHORT = {"language_model": "lm", "value_model": "value"}


def render() -> str:
    """Return the whole page, one table per profile."""
    parts = [INTRODUCTION]
    for profile in PROFILES:
        cases = [one for one in load_cases().values() if one.profile == profile]
        head = ("case", "MUST", "group", "models", "ranks", "precisions", "tier", "since")
        parts.append(
            f"## Profile `{profile}`: {len(cases)} "
            f"cases\n\n{table(head, [_row(one) for one in cases])}"
        )
    parts.append(f"{REPEATED}\n{table(('case', 'repeated in'), _repeated())}")
    return "\n".join(parts)


def _repeated() -> list[tuple[str, str]]:
    layouts = [
        (name_variant(layout, {}), CASES_OF_EXPERTS if capability == Capability.EP else CASES)
        for capability, layout in LAYOUTS.items()
    ]
    options = ("options of `variants`", CASES)
    found = dict.fromkeys((*CASES, *CASES_OF_EXPERTS))
    return [
        (f"`{case}`", ", ".join(name for name, cases in (*layouts, options) if case in cases))
        for case in found
    ]


def _row(one: Case) -> tuple[str, ...]:
    return (
        f"[`{one.id}`](contract.md#{one.id})",
        one.must,
        "undeclared" if one.probes else one.group,
        ", ".join(SHORT[m] for m in one.model_types),
        ", ".join(map(str, one.world)),
        ", ".join(one.dtypes),
        {False: "full", True: "quick", "once": "quick, once"}[one.quick],
        one.since,
    )


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, render(), "cases.py"))

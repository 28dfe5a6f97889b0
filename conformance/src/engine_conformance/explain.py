"""Descriptions of the cases for people: a table of all, and the full text of one."""

from __future__ import annotations

import inspect
from difflib import get_close_matches

from engine_conformance.errors import UsageError

__all__ = ["explain_case", "list_cases"]


def list_cases(profile: str | None = None, group: str | None = None) -> str:
    """Return one line per case, narrowed by the two arguments.

    Raises:
        UsageError: if no case is left.
    """
    from engine_conformance.cases import load_cases

    cases = [c for c in load_cases().values() if profile in (None, c.profile)]
    groups = sorted({c.group for c in cases})
    rows: list[tuple[str, ...]] = []
    for case in cases:
        shown = "undeclared" if case.probes else case.group
        if group in (None, shown):
            worlds = ",".join(map(str, case.world))
            rows.append((case.id, shown, worlds, "quick" if case.quick else "", case.must))
    if not rows:
        raise UsageError(f"no case is of group {group!r}; groups: {', '.join(groups)}")
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    padded = [
        [*(cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)), row[4]]
        for row in rows
    ]
    return "\n".join(map("  ".join, padded))


def explain_case(name: str) -> str:
    """Return a case's requirement, details, conditions, hints, code location and command.

    Raises:
        UsageError: if the id is unknown; the text has similar ids.
    """
    from engine_conformance.cases import load_cases

    cases = load_cases()
    if name not in cases:
        near = get_close_matches(name, cases, n=3, cutoff=0.4)
        hint = "`engine-conformance list` shows all"
        if near:
            hint = f"did you mean {' or '.join(near)}?"
        raise UsageError(f"no case is called {name!r}; {hint}")
    case = cases[name]
    applies = f"needs {', '.join(case.requires)}" if case.requires else "every engine"
    if case.probes:
        applies = f"engines that do not declare {case.probes}"
    if case.in_flight:
        applies = "rollouts that declare in_flight"
    if case.families:
        applies += f", with models of {' or '.join(case.families)}"
    facts = {
        "MUST": case.must,
        "details": case.details,
        "applies to": applies,
        "model types": ", ".join(case.model_types),
        "world sizes": ", ".join(map(str, case.world)),
        "precisions": ", ".join(case.dtypes),
        "profile": f"{case.profile}, group {case.group}, since contract {case.since}",
        "if this fails": case.hints,
        "code": f"{case.function.__module__}, line {inspect.getsourcelines(case.function)[1]}",
        "run": f"engine-conformance run NAME --case {case.id} --world {case.world[0]}",
    }
    return "\n".join([case.id, *(f"  {title}: {text}" for title, text in facts.items() if text)])

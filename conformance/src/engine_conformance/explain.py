"""What the cases are, for people: a table of all, and the whole of one."""

from __future__ import annotations

import inspect
from difflib import get_close_matches

from engine_conformance.errors import UsageError

__all__ = ["explain_case", "list_cases"]


def list_cases(profile: str | None = None, group: str | None = None) -> str:
    """One line a case; the two arguments pick.

    Raises:
        UsageError: if nothing is left.
    """
    from engine_conformance.cases import load_cases

    cases = [c for c in load_cases().values() if profile in (None, c.profile)]
    groups = sorted({c.group for c in cases})
    rows = [
        (
            c.id,
            "undeclared" if c.probes else c.group,
            ",".join(map(str, c.world)),
            "quick" if c.quick else "",
            c.must,
        )
        for c in cases
        if group in (None, "undeclared" if c.probes else c.group)
    ]
    if not rows:
        raise UsageError(f"no case is of group {group!r}; groups: {', '.join(groups)}")
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)), row[4]]
        )
        for row in rows
    )


def explain_case(name: str) -> str:
    """The requirement, the details, when it applies, what to look at, where it stands, and how to run it.

    Raises:
        UsageError: on an unknown id, with the near matches.
    """
    from engine_conformance.cases import load_cases

    cases = load_cases()
    if name not in cases:
        near = get_close_matches(name, cases, n=3, cutoff=0.4)
        hint = (
            f"did you mean {' or '.join(near)}?" if near else "`engine-conformance list` shows all"
        )
        raise UsageError(f"no case is called {name!r}; {hint}")
    one = cases[name]
    applies = f"needs {', '.join(one.requires)}" if one.requires else "every engine"
    if one.probes:
        applies = f"engines that do not declare {one.probes}"
    facts = {
        "MUST": one.must,
        "details": one.details,
        "applies to": applies,
        "model types": ", ".join(one.model_types),
        "world sizes": ", ".join(map(str, one.world)),
        "precisions": ", ".join(one.dtypes),
        "profile": f"{one.profile}, group {one.group}, since contract {one.since}",
        "if this fails": one.hints,
        "code": f"{one.function.__module__}, line {inspect.getsourcelines(one.function)[1]}",
        "run": f"engine-conformance run NAME --case {one.id} --world {one.world[0]}",
    }
    return "\n".join([one.id, *(f"  {title}: {text}" for title, text in facts.items() if text)])

"""Renewal of a report after a change of the suite: rows that the change does not touch are kept.

A report holds the digest of the code that decides its cases, by module of cases
(`engine_conformance.environment.code_digests`). Rows of cases whose digest is that of the
installed suite are what this suite would have found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine_conformance.environment import installed_code, suite
from engine_conformance.errors import UsageError
from engine_conformance.report.document import parts_of, read_document, to_document
from engine_conformance.report.merge import list_keys, sorted_keys
from engine_conformance.results import Key, SuiteRun
from engine_conformance.verdict import compute_verdicts

__all__ = ["SUITE", "changed_cases", "renew"]

SUITE = "engine-conformance"
"""The name of the suite's own version among a report's facts."""


def changed_cases(document: Mapping[str, Any]) -> list[str]:
    """Return the cases that the installed suite decides differently than a report's, sorted.

    They are cases of the report whose code has changed or that are no more, and new ones of its
    profiles and capabilities.
    """
    if document["suite"] == suite():
        return []
    # The cases import torch, which a report of the installed suite does not need.
    from engine_conformance.cases import load_cases

    cases = load_cases()
    theirs, ours = document.get("code", {}), installed_code()
    reported = {row["case"] for row in document["rows"]}
    profiles = {entry["profile"] for entry in document["verdicts"]}
    declared = set(document["declared"])
    concern = reported | {
        case.id
        for case in cases.values()
        if case.profile in profiles and declared.issuperset(map(str, case.requires))
    }

    def has_changed(name: str) -> bool:
        if name not in cases:
            return True
        module = cases[name].function.__module__.rpartition(".")[2]
        return theirs.get(module) != ours[module]

    return sorted(filter(has_changed, concern))


def renew(document: Mapping[str, Any], now: SuiteRun, planned: Sequence[Key]) -> dict[str, Any]:
    """Return a report without its rows of changed cases, as a part of a certificate of this suite.

    Args:
        document: a verified report of an older suite of the same contract.
        now: a run of the installed suite about the same thing (`differences`).
        planned: the rows of the whole certificate.

    Raises:
        UsageError: if the certificate has not all rows that would be kept; the text names some.
    """
    run, _ = read_document(document)
    changed = set(changed_cases(document))
    rows = [row for row in run.rows if row.case not in changed]
    if left_over := {row.key for row in rows} - set(planned):
        raise UsageError(
            "--continue: the report has rows that the certificate that would run now has not"
            f"{list_keys(sorted_keys(left_over))}\n"
            "  use the --world, --dtype, --model-type and --profile of the report, or another "
            "--report folder"
        )
    complete = {row.key for row in rows}.issuperset(planned)
    part = replace(
        run,
        selection=dict(run.selection) | {"complete": complete},
        suite=now.suite,
        # Of the tested packages, whose files are the same, and of the suite that runs now.
        commits={name: run.commits[name] for name in run.sources if name in run.commits}
        | dict(now.commits),
        environment=dict(run.environment) | {SUITE: now.environment[SUITE]},
        rows=rows,
        planned=planned,
        parts=tuple(parts_of(document)),
    )
    return to_document(part, compute_verdicts(rows, complete=complete, declared=run.declared))

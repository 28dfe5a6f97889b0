"""Check that a ``report.json`` is whole, unaltered, consistent, and of this suite."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_api.plugin import is_older
from engine_conformance.errors import CannotRun
from engine_conformance.report.document import SCHEMA, counts, digest, read_document
from engine_conformance.report.merge import joined_environment, joined_selection
from engine_conformance.report.renewal import changed_cases
from engine_conformance.results import SuiteRun
from engine_conformance.verdict import compute_verdicts, is_complete

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError

__all__ = ["schema", "verify"]

# Limit of the problems shown of a document that does not fit the schema.
_MOST = 10
_LONG = 200
# Limit of the cases that a text names.
_NAMED = 5
# Seconds by which a sum of rounded times may be off.
_ROUNDED = 0.002


@cache
def schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of ``report.json``."""
    return json.loads(
        resources.files("engine_conformance.report").joinpath("schema.json").read_text("utf-8")
    )


def verify(path: Path, *, suite: Mapping[str, str], renewable: bool = False) -> list[str]:
    """Return the problems of a report, one text each.

    An empty list means that it is good.

    No content of the file raises an error.

    Args:
        path: a ``report.json``.
        suite: version, contract and digest of the installed suite, which verifies.
        renewable: whether a report of an older suite is good if some of its rows can be kept
            (`engine_conformance.report.renewal`).

    Raises:
        CannotRun: if jsonschema is not installed (extra ``verify``).
    """
    validator = _validator()
    try:
        document = json.loads(path.read_bytes(), parse_float=_finite, parse_constant=_finite)
        problems = list(_misfits(document, validator))
    except OSError as error:
        return [f"{path}: cannot be read: {error.strerror}"]
    except ValueError as error:
        return [f"{path}: no JSON: {error}"]
    except RecursionError:
        return [f"{path}: no report: nested too deeply"]
    if problems:
        return [f"{path}: {problem}" for problem in problems]
    checks: list[Callable[[], Iterator[str]]] = [
        lambda: _altered(document),
        lambda: _contradictions(document),
        lambda: _other_suite(document, suite, renewable=renewable),
    ]
    return [f"{path}: {problem}" for check in checks for problem in check()]


def _validator() -> Draft202012Validator:
    # Runs and their reports work without jsonschema: only checking a report needs it.
    try:
        from jsonschema import Draft202012Validator
    except ImportError as error:
        raise CannotRun(
            f"a report is checked with jsonschema, which is not there: {error}\n"
            "  to do: pip install 'engine-conformance[verify]'"
        ) from error
    return Draft202012Validator(schema())


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {text}")
    return number


def _misfits(document: Any, validator: Draft202012Validator) -> Iterator[str]:
    """Yield the fields that do not fit the schema, or only the version if that differs."""
    version = document.get("schema") if isinstance(document, dict) else None
    if isinstance(version, str) and re.fullmatch("[0-9]{1,6}", version) and version != SCHEMA:
        age = "an older" if int(version) < int(SCHEMA) else "a newer"
        yield (
            f"{age} report: schema {version}, this suite reads {SCHEMA}; "
            f"run the suite again with: {_command_to_repeat(document)}"
        )
        return
    errors = sorted(validator.iter_errors(document), key=lambda error: list(error.path))
    errors.sort(key=lambda error: list(error.path) != ["schema"])
    for error in errors[:_MOST]:
        yield _misfit(error)
    if len(errors) > _MOST:
        yield f"and {len(errors) - _MOST} more fields that do not fit schema {SCHEMA}"


def _misfit(error: ValidationError) -> str:
    where = error.json_path.removeprefix("$").removeprefix(".") or "the document"
    message = error.message if len(error.message) <= _LONG else error.message[:_LONG] + " …"
    wanted = error.schema.get("description") if isinstance(error.schema, dict) else None
    return f"{where}: {message}" + (f"; expected: {wanted}" if wanted else "")


def _command_to_repeat(document: Mapping[str, Any]) -> str:
    command = document.get("command")
    if isinstance(command, list) and command and all(isinstance(word, str) for word in command):
        return shlex.join(["engine-conformance", *command])
    return "engine-conformance run NAME --report DIR"


def _altered(document: Mapping[str, Any]) -> Iterator[str]:
    found = digest(document)
    if found != document["digest"]:
        yield (
            f"altered after it was written: it states digest {document['digest'][:12]}…, "
            f"its content has {found[:12]}…"
        )


def _contradictions(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield every statement that does not follow from the rows and the selection."""
    run, stated = read_document(document)
    selections = [part.selection for part in run.parts]
    complete = is_complete(document["selection"], run.rows, selections, run.planned)
    if document["complete"] != complete:
        yield f"complete: states {document['complete']}, its selection says {complete}"
    yield from _joined_wrongly(document, run, complete=complete)
    for status, number in counts(run.rows).items():
        if document["counts"][status] != number:
            yield f"counts.{status}: states {document['counts'][status]}, its rows give {number}"
    given = {(j.profile, j.model_type): j for j in stated}
    derived = {
        (j.profile, j.model_type): j
        for j in compute_verdicts(run.rows, complete=complete, declared=run.declared)
    }
    if len(given) < len(stated):
        yield "verdicts: two are about the same profile and model type"
    for about in dict.fromkeys((*given, *derived)):
        if given.get(about) == derived.get(about):
            continue
        states, gives = (
            repr(found[about].verdict) if about in found else "nothing"
            for found in (given, derived)
        )
        yield (
            f"verdicts: {' / '.join(about)}: states {states}, its rows give {gives}"
            f"{_groups(given, derived, about)}"
        )


def _joined_wrongly(document: Mapping[str, Any], run: SuiteRun, *, complete: bool) -> Iterator[str]:
    """Yield what does not follow from a joined report's parts, and cases reported twice."""
    for name, keys in (("rows", [row.key for row in run.rows]), ("planned", run.planned)):
        twice = [(key, number) for key, number in Counter(keys).items() if number > 1]
        for (case, setting), number in twice:
            yield f"{name}: {case} in {setting} is there {number} times"
    if not run.parts:
        return
    if complete and (missing := set(run.planned) - {row.key for row in run.rows}):
        yield f"rows: {len(missing)} of the certificate's planned rows are missing"
    selections = [part.selection for part in run.parts]
    if document["selection"] != joined_selection(selections, complete=complete):
        yield "selection: is not what its parts asked for"
    yield from _sums_that_differ(document, run)
    for setting in dict.fromkeys(row.setting for row in run.rows):
        asked_for = any(
            setting.world in selection["worlds"] and setting.dtype in selection["dtypes"]
            for selection in selections
        )
        if not asked_for:
            yield f"rows: no part asked for {setting}"


def _sums_that_differ(document: Mapping[str, Any], run: SuiteRun) -> Iterator[str]:
    """Yield what a joined report states of its machine and its time, and its parts do not."""
    if document["environment"] != joined_environment([part.environment for part in run.parts]):
        yield "environment: is not that of its parts"
    if document["started"] != min(part.started for part in run.parts):
        yield "started: is not when the first of its parts did"
    seconds = sum(part.seconds for part in run.parts)
    if abs(document["seconds"] - seconds) > _ROUNDED:
        yield f"seconds: states {document['seconds']}, its parts took {seconds:.3f}"


def _groups(given: Mapping[Any, Any], derived: Mapping[Any, Any], key: tuple[str, str]) -> str:
    if key not in given or key not in derived:
        return ""
    stated = given[key].groups
    found = derived[key].groups
    names = [
        name for name in dict.fromkeys((*stated, *found)) if stated.get(name) != found.get(name)
    ]
    return f" (groups that differ: {', '.join(names)})" if names else ""


def _other_suite(
    document: Mapping[str, Any], suite: Mapping[str, str], *, renewable: bool
) -> Iterator[str]:
    """Yield the reason why a report is not of this suite: the contract, or the code.

    Nothing is wrong with a suite that decides the report's cases as this one does.
    """
    theirs = document["suite"]
    if theirs == dict(suite):
        return
    if is_older(theirs["contract"], suite["contract"]):
        reason = f"of an older contract ({theirs['contract']})"
        if added := _cases_after(theirs["contract"], document):
            reason += f", without the cases {', '.join(added)}"
    elif is_older(suite["contract"], theirs["contract"]):
        reason = f"of a newer contract ({theirs['contract']})"
    else:
        changed = changed_cases(document)
        kept = {row["case"] for row in document["rows"]} - set(changed)
        if not changed or (kept and renewable):
            return
        reason = "of this contract, and of a suite whose code decides differently"
        if kept and document["certify"]:
            yield (
                f"{reason}: {_name_some(changed)}; `engine-conformance run` with the options of "
                "the report, --certify and --continue runs these again, and keeps the rows of "
                f"{len(kept)} other cases"
            )
            return
    written, own = (
        f"{facts['version']} (contract {facts['contract']}, digest {facts['digest'][:12]}…)"
        for facts in (theirs, suite)
    )
    yield (
        f"{reason}: written by suite {written}, this is {own}: "
        f"to compare, run this suite with: {_command_to_repeat(document)}"
    )


def _name_some(cases: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(cases) - _NAMED} more" if len(cases) > _NAMED else ""
    return ", ".join(cases[:_NAMED]) + more


def _cases_after(contract: str, document: Mapping[str, Any]) -> list[str]:
    """Return the cases of later contracts that concern a report's profiles and capabilities."""
    # The cases import torch, which a report that verifies does not need.
    from engine_conformance.cases import load_cases

    profiles = {entry["profile"] for entry in document["verdicts"]}
    declared = set(document["declared"])
    later = [
        case
        for case in load_cases().values()
        if is_older(contract, case.since)
        and case.profile in profiles
        and declared.issuperset(map(str, case.requires))
    ]
    return [f"{case.id} ({case.since})" for case in sorted(later, key=lambda case: case.since)]

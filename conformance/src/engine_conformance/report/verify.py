"""Whether a ``report.json`` is whole, unaltered, consistent, and of this suite."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from engine_conformance.report.document import SCHEMA, counts, digest, read_document
from engine_conformance.verdict import judgements

__all__ = ["schema", "verify"]

_MOST = 10  # problems that are told of a document that does not fit the schema
_LONG = 200


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of ``report.json``."""
    return json.loads(resources.files("engine_conformance.report").joinpath("schema.json").read_text("utf-8"))


def verify(path: Path, *, suite: Mapping[str, str]) -> list[str]:
    """What is wrong with a report, one text a problem; none means good. Raises for nothing that the file holds.

    Args:
        path: a ``report.json``.
        suite: version, contract and digest of the suite that verifies.
    """
    try:
        document = json.loads(path.read_bytes(), parse_float=_finite, parse_constant=_finite)
        problems = list(_misfits(document))
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
        lambda: _other_suite(document, suite),
    ]
    return [f"{path}: {problem}" for check in checks for problem in check()]


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number of JSON, or too large")
    return number


def _misfits(document: Any) -> Iterator[str]:
    """Where a document does not fit the schema; another version of it is all that is said then."""
    version = document.get("schema") if isinstance(document, dict) else None
    if isinstance(version, str) and re.fullmatch("[0-9]{1,6}", version) and version != SCHEMA:
        age = "an older" if int(version) < int(SCHEMA) else "a newer"
        yield f"{age} report: schema {version}, this suite reads {SCHEMA}; run the suite again with: {_again(document)}"
        return
    errors = sorted(Draft202012Validator(schema()).iter_errors(document), key=lambda error: list(error.path))
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


def _again(document: Mapping[str, Any]) -> str:
    command = document.get("command")
    if isinstance(command, list) and command and all(isinstance(word, str) for word in command):
        return shlex.join(["engine-conformance", *command])
    return "engine-conformance run NAME --report DIR"


def _altered(document: Mapping[str, Any]) -> Iterator[str]:
    found = digest(document)
    if found != document["digest"]:
        yield f"altered after it was written: it states digest {document['digest'][:12]}…, its content has {found[:12]}…"


def _contradictions(document: Mapping[str, Any]) -> Iterator[str]:
    """What does not follow from the rows and the selection."""
    run, stated = read_document(document)
    chosen = document["selection"]
    if document["complete"] != (complete := not chosen["cases"] and not chosen["quick"]):
        yield f"complete: states {document['complete']}, its selection says {complete}"
    for status, number in counts(run.rows).items():
        if document["counts"][status] != number:
            yield f"counts.{status}: states {document['counts'][status]}, its rows give {number}"
    given = {(j.profile, j.model_type): j for j in stated}
    derived = {(j.profile, j.model_type): j for j in judgements(run.rows, complete=complete, declared=run.declared)}
    if len(given) < len(stated):
        yield "verdicts: two are about the same profile and model type"
    for key in dict.fromkeys((*given, *derived)):
        told = [repr(one.verdict) if (one := found.get(key)) else "nothing" for found in (given, derived)]
        if given.get(key) != derived.get(key):
            yield f"verdicts: {' / '.join(key)}: states {told[0]}, its rows give {told[1]}{_groups(given, derived, key)}"


def _groups(given: Mapping[Any, Any], derived: Mapping[Any, Any], key: tuple[str, str]) -> str:
    if key not in given or key not in derived:
        return ""
    stated, found = given[key].groups, derived[key].groups
    names = [name for name in dict.fromkeys((*stated, *found)) if stated.get(name) != found.get(name)]
    return f" (groups that differ: {', '.join(names)})" if names else ""


def _other_suite(document: Mapping[str, Any], suite: Mapping[str, str]) -> Iterator[str]:
    theirs = document["suite"]
    if theirs == dict(suite):
        return
    told = [f"{one['version']} (contract {one['contract']}, digest {one['digest'][:12]}…)" for one in (theirs, suite)]
    yield f"written by suite {told[0]}, this is {told[1]}: to compare, run this suite with: {_again(document)}"

"""Tests of reports that are altered, forged, old, or absent."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_conformance.report import to_document, verify
from engine_conformance.report.document import digest
from report_samples import LISTED, SUITE, made, stored


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    *parents, last = path.split(".")

    def change(document: Any) -> None:
        for name in parents:
            document = document[int(name) if isinstance(document, list) else name]
        document[int(last) if isinstance(document, list) else last] = value

    return change


def drop(path: str) -> Callable[[dict[str, Any]], None]:
    *parents, last = path.split(".")

    def change(document: Any) -> None:
        for name in parents:
            document = document[int(name) if isinstance(document, list) else name]
        del document[last]

    return change


MISFITS = [
    (put("schema", 1), "schema", "'1' was expected"),
    (put("schema", None), "schema", "'1' was expected"),
    (put("contract", "one"), "contract", "as 1.0"),
    (put("suite.digest", "abc"), "suite.digest", "64 hexadecimal digits"),
    (put("suite.author", "me"), "suite", "'author' was unexpected"),
    (put("name", ""), "name", "a text that is not empty"),
    (put("trace", "a text"), "trace", "a list of texts"),
    (put("declared", [1]), "declared[0]", "a text"),
    (
        put("verdicts.0.verdict", "certified"),
        "verdicts[0].verdict",
        "'conformant', 'partial', 'non-conformant'",
    ),
    (put("verdicts.0.groups.core", "good"), "verdicts[0].groups.core", "is not one of"),
    (put("verdicts.0.profile", "core"), "verdicts[0].profile", "'engine', 'rl', 'rollout'"),
    (drop("verdicts.0.groups"), "verdicts[0]", "'groups' is a required property"),
    (put("environment.torch", 2), "environment.torch", "a text"),
    (put("complete", "yes"), "complete", "true unless cases were picked"),
    (put("selection.worlds", []), "selection.worlds", "numbers of ranks"),
    (put("selection.worlds", [0]), "selection.worlds[0]", "1 or more"),
    (put("selection.patience", 0), "selection.patience", "a factor above 0"),
    (put("selection.seed", -1), "selection.seed", "a whole number of 0 or more"),
    (put("selection.speed", 3), "selection", "'speed' was unexpected"),
    (put("selection.layout.tp", "2"), "selection.layout.tp", "a whole number of 1 or more"),
    (put("command", None), "command", "a list of texts"),
    (put("certify", 1), "certify", "whether a certificate was asked for"),
    (put("started", "yesterday"), "started", "ISO 8601"),
    (put("started", "2026-01-31T12:00:00+02:00"), "started", "in UTC"),
    (put("seconds", -1), "seconds", "0 or more"),
    (put("counts.passed", 1.5), "counts.passed", "a whole number of 0 or more"),
    (drop("counts.timeout"), "counts", "'timeout' is a required property"),
    (put("rows", {}), "rows", "one entry per case and setting"),
    (put("rows.0", "plugin.light"), "rows[0]", "is not of type 'object'"),
    (put("rows.0.status", "skipped"), "rows[0].status", "one of the nine statuses"),
    (put("rows.0.margin", "small"), "rows[0].margin", '"infinite"'),
    (put("rows.0.margin", -0.5), "rows[0].margin", "a number of 0 or more"),
    (put("rows.0.margin", True), "rows[0].margin", "a number of 0 or more"),
    (put("rows.0.world", 0), "rows[0].world", "a whole number of 1 or more"),
    (put("rows.0.world", "2"), "rows[0].world", "a whole number of 1 or more"),
    (put("rows.0.note", "x"), "rows[0]", "'note' was unexpected"),
    (drop("rows.0.repeat"), "rows[0]", "'repeat' is a required property"),
    (
        put("rows.0.deviation", {"reason": "so", "issue": "#1"}),
        "rows[0].deviation",
        "'until' is a required property",
    ),
    (put("rows.0.deviation", LISTED | {"until": "soon"}), "rows[0].deviation.until", "a date"),
    (
        put("rows.0.status", "deviation"),
        "rows[0].deviation",
        "a deviation's reason, issue and until",
    ),
    (put("digest", "0" * 63), "digest", "64 hexadecimal digits"),
    (drop("digest"), "the document", "'digest' is a required property"),
    (put("comment", "hello"), "the document", "'comment' was unexpected"),
]


@pytest.mark.parametrize(("change", "where", "expected"), MISFITS)
def test_what_does_not_fit_the_schema_is_told(
    tmp_path: Path, change: Any, where: str, expected: str
) -> None:
    document = copy.deepcopy(to_document(*made()))
    change(document)
    path = stored(tmp_path / "report.json", document)
    problems = verify(path, suite=SUITE)
    assert len(problems) == 1
    assert problems[0].startswith(f"{path}: {where}: ")
    assert expected in problems[0]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "no JSON"),
        (b"{'schema': 1}", "no JSON"),
        (b'{"schema": "1",', "no JSON"),
        (b"\xff\xfe\x00", "no JSON"),
        (b'{"seconds": NaN}', "no JSON"),
        (b'{"seconds": 1e999}', "no JSON"),
        (b'{"seconds": ' + b"9" * 5000 + b"}", "no JSON"),
        (b"[]", "the document: [] is not of type 'object'"),
        (b"null", "the document: None is not of type 'object'"),
        (b"{}", "the document: 'schema' is a required property"),
        (b'{"rows": ' + b"[" * 900 + b"]" * 900 + b"}", ""),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (
            b'{"schema": "0", "command": ["run", "acme", "--world", "1,2"]}',
            (
                "schema 0, this suite reads 1; run the suite again with: "
                "engine-conformance run acme --world 1,2"
            ),
        ),
        (b'{"schema": "0"}', "an older report: "),
        (b'{"schema": "0", "command": 7}', "engine-conformance run NAME --report DIR"),
        (b'{"schema": "2"}', "a newer report: schema 2"),
        (b'{"schema": "' + b"9" * 5000 + b'"}', "schema: "),
        (b'{"schema": "\xc2\xb2"}', "schema: "),
    ],
)
def test_a_file_that_is_no_report(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(content)
    problems = verify(path, suite=SUITE)
    assert any(expected in problem for problem in problems)
    assert max(map(len, problems)) < 1000


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert verify(tmp_path, suite=SUITE) == [f"{tmp_path}: cannot be read: Is a directory"]
    assert "cannot be read: No such file" in verify(tmp_path / "none.json", suite=SUITE)[0]


def test_many_misfits_are_counted(tmp_path: Path) -> None:
    document = to_document(*made())
    for entry in document["rows"]:
        entry["status"] = "fine"
    problems = verify(stored(tmp_path / "report.json", document), suite=SUITE)
    assert len(problems) == 11
    assert f"and {len(document['rows']) - 10} more fields" in problems[-1]


@pytest.mark.parametrize("path", ["rows.0.seconds", "seconds", "rows.9.margin"])
def test_an_altered_report_shows(tmp_path: Path, path: str) -> None:
    document = to_document(*made())
    put(path, 0.125)(document)
    [problem] = verify(stored(tmp_path / "report.json", document), suite=SUITE)
    assert "altered after it was written" in problem


def test_layout_is_no_alteration(tmp_path: Path) -> None:
    document = to_document(*made())
    shuffled = dict(reversed(document.items()))
    (tmp_path / "report.json").write_text(json.dumps(shuffled, indent=7, ensure_ascii=False))
    assert verify(tmp_path / "report.json", suite=SUITE) == []


def flatter(document: dict[str, Any]) -> None:
    for one in document["verdicts"]:
        one["verdict"] = "conformant"


FORGERIES = [
    (
        flatter,
        "verdicts: engine / language_model: states 'conformant', its rows give 'non-conformant'",
    ),
    (put("verdicts.0.groups.lora", "partial"), "groups that differ: lora"),
    (
        put("verdicts", []),
        "verdicts: engine / language_model: states nothing, its rows give 'non-conformant'",
    ),
    (
        lambda document: document["verdicts"].append(document["verdicts"][0]),
        "two are about the same profile",
    ),
    (put("counts.failed", 0), "counts.failed: states 0, its rows give 3"),
    (put("selection.quick", True), "complete: states True, its selection says False"),
    (put("complete", False), "complete: states False, its selection says True"),
    (
        put("declared", ["dp", "lora", "tp"]),
        "verdicts: rl / language_model: states 'conformant', its rows give 'partial'",
    ),
]


@pytest.mark.parametrize(("change", "expected"), FORGERIES)
def test_verdicts_follow_from_rows_though_the_digest_is_right(
    tmp_path: Path, change: Any, expected: str
) -> None:
    document = copy.deepcopy(to_document(*made()))
    change(document)
    document["digest"] = digest(document)
    problems = verify(stored(tmp_path / "report.json", document), suite=SUITE)
    assert any(expected in problem for problem in problems)
    assert not any("altered" in problem for problem in problems)


@pytest.mark.parametrize("other", [{"version": "0.2.0"}, {"digest": "b" * 64}, {"contract": "1.1"}])
def test_another_suite_is_named(tmp_path: Path, other: dict[str, str]) -> None:
    document = to_document(*made())
    # As in reports from before it was written, of which no row can be kept.
    del document["code"]
    document["digest"] = digest(document)
    path = stored(tmp_path / "report.json", document)
    [problem] = verify(path, suite=SUITE | other)
    assert "written by suite 0.1.0 (contract 1.0, digest aaaaaaaaaaaa…), this is " in problem
    assert next(iter(other.values()))[:12] in problem
    remedy = (
        "to compare, run this suite with: "
        "engine-conformance run acme --world 1,2 --report 'my reports'"
    )
    assert remedy in problem

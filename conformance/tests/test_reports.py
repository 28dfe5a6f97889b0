"""Tests of the reports: written, read back, and summarized for machines and the console."""

from __future__ import annotations

import errno
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator

from engine_conformance.report import (
    badge,
    certificate,
    html,
    junit,
    read_document,
    summary,
    to_document,
    verify,
    write_reports,
)
from engine_conformance.report.verify import schema
from engine_conformance.results import STATUSES, Part, Row
from engine_conformance.verdict import Verdict
from report_samples import GOOD, OTHERS, SUITE, made, row, stored

FILES = ["report.json", "certificate.md", "report.html", "junit.xml", "badge.json"]


def test_a_document_gives_the_run_back() -> None:
    run, verdicts = made()
    text = json.dumps(to_document(run, verdicts), allow_nan=False)
    assert read_document(json.loads(text)) == (run, verdicts)


def test_a_command_names_no_place_of_the_machine_that_ran_it() -> None:
    command = ["run", "acme", "--report", "/home/me/reports/acme", "--plugin", "acme.plugin:PLUGIN"]
    command += ["--deviations=/home/me/known.toml", "--option", "spec=a/b=c", "--report", "reports"]
    run, verdicts = made(command=command)
    part = Part(
        digest="a" * 64,
        started=run.started,
        seconds=1.0,
        command=command,
        selection=run.selection,
        environment=run.environment,
    )
    document = to_document(replace(run, parts=(part,)), verdicts)
    told = ["run", "acme", "--report", "acme", "--plugin", "acme.plugin:PLUGIN"]
    told += ["--deviations=known.toml", "--option", "spec=a/b=c", "--report", "reports"]
    assert document["command"] == told
    assert document["parts"][0]["command"] == told


def test_a_document_fits_the_schema_and_verifies(tmp_path: Path) -> None:
    Draft202012Validator.check_schema(schema())
    document = to_document(*made())
    assert list(Draft202012Validator(schema()).iter_errors(document)) == []
    assert verify(stored(tmp_path / "report.json", document), suite=SUITE) == []


def test_the_schema_knows_what_the_code_knows() -> None:
    from engine_conformance.cases._case import PROFILES
    from engine_conformance.plan import Selection

    defined = schema()["$defs"]
    properties = schema()["properties"]
    assert tuple(defined["status"]["enum"]) == STATUSES == tuple(properties["counts"]["properties"])
    assert tuple(defined["verdict"]["enum"]) == get_args(Verdict)
    assert tuple(defined["profile"]["enum"]) == PROFILES
    assert set(properties["selection"]["properties"]) == {field.name for field in fields(Selection)}
    for part in (schema(), defined["row"], properties["selection"], properties["counts"]):
        # These came later than certificates that stand; absent, there were none.
        later = {"options", "seed", "sources", "parts", "commits", "variant", "families"}
        later |= {"part", "planned", "code"}
        assert set(part["required"]) == set(part["properties"]) - later, (
            "nothing else may be left out"
        )


def test_a_real_selection_fits() -> None:
    from engine_api.config import Parallelism
    from engine_conformance.plan import Selection

    chosen = Selection(name="acme", layout=Parallelism(tp=2), profiles=("engine",), partner="other")
    document = to_document(*made(selection=chosen.as_dict() | {"complete": chosen.complete}))
    assert document["selection"]["layout"] == {"tp": 2}
    assert list(Draft202012Validator(schema()).iter_errors(document)) == []


def test_the_reports_need_no_torch() -> None:
    code = "import sys, engine_conformance.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("margin", "written"),
    [(math.inf, "infinite"), (math.nan, "infinite"), (None, None), (0.0, 0.0), (1e-12, 1e-12)],
)
def test_margins_are_json(margin: float | None, written: Any) -> None:
    document = to_document(*made([row("forward.logprobs", margin=margin)]))
    assert json.loads(json.dumps(document, allow_nan=False))["rows"][0]["margin"] == written
    assert list(Draft202012Validator(schema()).iter_errors(document)) == []
    run, _ = read_document(document)
    assert run.rows[0].outcome.margin == (math.inf if written == "infinite" else margin)
    assert all("forward.logprobs" in text for text in (html(document), junit(document)))
    assert ("forward.logprobs" in certificate(document)) == (margin is not None), (
        "only the worst margin's case"
    )


def test_all_reports_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "reports"
    paths = write_reports(folder, *made())
    assert paths == [folder / name for name in FILES]
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert verify(paths[0], suite=SUITE) == []
    assert json.loads(paths[4].read_text()) == badge(json.loads(paths[0].read_text()))


def test_a_failed_write_leaves_the_old_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in write_reports(tmp_path, *made())}
    write = Path.write_text

    def full(path: Path, *args: Any, **kwargs: Any) -> int:
        if path.name == "junit.xml":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"junit\.xml"):
        write_reports(tmp_path, *made(GOOD))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "file"))):
        write_reports(tmp_path / "file", *made())


def test_every_status_has_its_place_in_junit() -> None:
    root = ET.fromstring(junit(to_document(*made())))
    kinds = {
        "failed": "failure",
        "accepted-undeclared": "failure",
        "stale-deviation": "failure",
        "timeout": "failure",
        "suite-error": "error",
        "not-run": "skipped",
        "deviation": "skipped",
    }
    found = {case.get("name", "").split(" ")[0]: case for case in root.iter("testcase")}
    assert set(found) == {one.case for one in (*GOOD, *OTHERS)}
    for one in (*GOOD, *OTHERS):
        kind = "skipped" if one.provisional else kinds.get(one.outcome.status)
        assert [child.tag for child in found[one.case]] == ([kind] if kind else [])
        if kind:
            assert found[one.case][0].get("type") == one.outcome.status
            assert one.outcome.message.splitlines()[-1] in (found[one.case][0].text or "")
    assert (
        found["train.moe"][0]
        .get("message", "")
        .endswith("(https://example.org/issues/12, until 2027-03-31)")
    )
    assert found["memory.peak"][0].get("message") == "suite-error: KeyError: 'x'"
    assert found["parallel.four"][0].get("message") == "not-run: needs 4 cpu devices, there are 2"
    assert found["train.next"][0].get("message", "").startswith("provisional, failed: ")


def test_junit_has_a_suite_a_setting_and_adds_up() -> None:
    run, verdicts = made()
    root = ET.fromstring(junit(to_document(run, verdicts)))
    suites = root.findall("testsuite")
    assert [suite.get("name") for suite in suites] == list(
        dict.fromkeys(str(one.setting) for one in run.rows)
    )
    for name in ("tests", "failures", "errors", "skipped"):
        assert int(root.get(name, "")) == sum(int(suite.get(name, "")) for suite in suites)
    assert [root.get(name) for name in ("tests", "failures", "errors", "skipped")] == [
        "17",
        "5",
        "1",
        "3",
    ]
    names = [(case.get("classname"), case.get("name")) for case in root.iter("testcase")]
    assert len(set(names)) == len(names)


def test_texts_that_xml_and_utf_8_refuse(tmp_path: Path) -> None:
    rows = [row("train.norm", "failed", 2.0, message="\x1b[31mred\x00 \ud800 \ufffe é <&>")]
    paths = write_reports(tmp_path, *made(rows))
    failure = ET.fromstring(paths[3].read_bytes()).find(".//failure")
    assert failure is not None
    assert "\\x1b[31mred\\x00 \\xd800 \\xfffe é <&>" in (failure.text or "")
    assert verify(paths[0], suite=SUITE) == []
    assert all("[31mred" in path.read_text(encoding="utf-8") for path in paths[1:3])


@pytest.mark.parametrize(
    ("rows", "message", "color"),
    [
        (GOOD, "conformant", "brightgreen"),
        ([*GOOD, row("rl.other", "failed", profile="rl", group="rl")], "conformant", "brightgreen"),
        ([*GOOD, OTHERS[3]], "partial", "yellow"),
        ([*GOOD, OTHERS[0], OTHERS[3]], "non-conformant", "red"),
        ([row("rollout.a", profile="rollout", group="rollout")], "conformant", "brightgreen"),
        (
            [row("rollout.a", "timeout", profile="rollout", group="rollout")],
            "non-conformant",
            "red",
        ),
        ([], "partial", "yellow"),
    ],
)
def test_the_badge_is_the_worst_of_the_engine(rows: list[Row], message: str, color: str) -> None:
    expected = {
        "schemaVersion": 1,
        "label": "engine contract 1.0",
        "message": message,
        "color": color,
    }
    assert badge(to_document(*made(rows))) == expected


def test_the_summary_says_all_that_a_console_needs() -> None:
    run, verdicts = made()
    lines = summary(run, verdicts, folder=Path("out")).splitlines()
    bad = (
        "1 accepted-undeclared, 1 deviation, 1 stale-deviation, 1 not-run, 1 timeout, 1 suite-error"
    )
    assert lines == [
        f"engine / language_model: NON-CONFORMANT (2 failed, {bad})",
        "engine / value_model: CONFORMANT",
        "rl / language_model: CONFORMANT",
        f"17 rows: 7 passed, 3 failed, 1 refused, {bad}; 93.1 s",
        "worst margin: infinite, export.names [language_model, cpu, world 1, float32]",
        "reports: out",
    ]


def test_the_summary_says_why_a_verdict_is_partial() -> None:
    run, verdicts = made(GOOD[:2], selection={"quick": True, "complete": False})
    text = summary(run, verdicts, folder=None)
    told = (
        "not all cases were asked for; "
        "declared, but shown by no case that passed: dp, lora, value-head"
    )
    assert text.splitlines()[0] == f"engine / language_model: PARTIAL ({told})"
    assert "reports:" not in text
    provisional = [row("train.next", "failed", provisional=True)]
    assert "no case ran that counts" in summary(*made(provisional, declared=[]), folder=None)
    assert "0 rows: nothing ran" in summary(*made([]), folder=None)

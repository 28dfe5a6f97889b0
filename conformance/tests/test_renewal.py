"""Tests of what a change of the suite leaves of a report, and of the rest of its rows run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine_conformance import environment
from engine_conformance.cli import main
from engine_conformance.report import to_document, verify
from engine_conformance.report.document import digest
from report_samples import SUITE, made, row, stored

PLUGIN = "engine_loopback.plugin:PLUGIN"
FILES = {
    "__init__.py": "",
    "session.py": "from engine_conformance.cases import load_cases",
    "report/view.py": "",
    "gold/weights.bin": "1",
    "cases/__init__.py": "from engine_conformance.cases._case import load_cases",
    "cases/_case.py": "load_cases = 1",
    "cases/_losses.py": "import engine_conformance.cases._sums",
    "cases/_sums.py": "",
    "cases/train.py": "from engine_conformance.cases import _losses as losses",
    "cases/rl.py": "from engine_conformance.cases._losses import loss",
    "cases/export.py": "from engine_conformance.cases import train",
    "cases/forward.py": "",
    "cases/table.json": "{}",
    "cases/parts/__init__.py": "",
    "cases/parts/one.py": "",
}
MODULES = {"train", "rl", "export", "forward"}
KNOWN = [row("forward.causal", margin=0.02), row("train.accumulation", margin=0.4)]


def written(folder: Path, **changes: str) -> Path:
    for name, text in (FILES | changes).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("changed", "modules"),
    [
        ("cases/forward.py", {"forward"}),
        ("cases/train.py", {"train", "export"}),
        ("cases/_sums.py", {"train", "rl", "export"}),
        ("cases/_case.py", MODULES),
        ("session.py", MODULES),
        ("gold/weights.bin", MODULES),
        ("cases/table.json", MODULES),
        ("cases/parts/one.py", MODULES),
        ("report/view.py", set[str]()),
    ],
)
def test_a_change_concerns_the_modules_of_cases_that_import_it(
    tmp_path: Path, changed: str, modules: set[str]
) -> None:
    before = environment.code_digests(written(tmp_path / "before"))
    text = f"{FILES[changed]}\nx = 2\n"
    after = environment.code_digests(written(tmp_path / "after", **{changed: text}))
    assert before.keys() == after.keys() == MODULES
    assert {name for name in MODULES if before[name] != after[name]} == modules


@pytest.mark.parametrize(
    "statement",
    ["from ._sums import x", "from . import _sums", "from engine_conformance import cases"],
)
def test_an_import_that_names_no_module_of_cases_is_an_error(
    tmp_path: Path, statement: str
) -> None:
    folder = written(tmp_path, **{"cases/forward.py": statement})
    with pytest.raises(ValueError, match=r"cases/forward\.py: expected "):
        environment.code_digests(folder)


def test_every_module_with_cases_has_a_digest() -> None:
    from engine_conformance.cases import load_cases

    modules = {case.function.__module__.rpartition(".")[2] for case in load_cases().values()}
    assert environment.installed_code().keys() == modules


def of_an_older_suite(document: dict[str, Any], *changed: str) -> dict[str, Any]:
    """Return a report as a suite wrote it whose modules differ from today's in those named."""
    code = document["code"] | dict.fromkeys(changed, "c" * 64)
    suite = document["suite"] | {"digest": "b" * 64}
    document = document | {"code": code, "suite": suite}
    return document | {"digest": digest(document)}


def problems_of(tmp_path: Path, *changed: str) -> list[str]:
    document = of_an_older_suite(to_document(*made(KNOWN, declared=[], certify=True)), *changed)
    return verify(stored(tmp_path / "report.json", document), suite=SUITE)


def test_a_report_whose_cases_have_not_changed_verifies(tmp_path: Path) -> None:
    assert problems_of(tmp_path) == []
    # No rollout ran.
    assert problems_of(tmp_path, "rollout") == []


def test_cases_that_have_changed_are_named_with_the_way_to_keep_the_others(tmp_path: Path) -> None:
    [problem] = problems_of(tmp_path, "train")
    assert "a suite whose code decides differently: train.accumulation, " in problem
    assert " more; `engine-conformance run` with the options of the report" in problem
    kept = "--certify and --continue runs these again, and keeps the rows of 1 other cases"
    assert problem.endswith(kept)


def test_a_quick_report_is_not_advised_to_become_a_certificate(tmp_path: Path) -> None:
    document = of_an_older_suite(to_document(*made(KNOWN, declared=[])), "train")
    document = document | {"certify": False}
    path = stored(tmp_path / "report.json", document | {"digest": digest(document)})
    [problem] = verify(path, suite=SUITE)
    assert "--certify" not in problem
    assert "to compare, run this suite with: engine-conformance run acme" in problem


def test_a_report_is_not_renewed_if_every_case_has_changed(tmp_path: Path) -> None:
    [problem] = problems_of(tmp_path, "train", "forward")
    assert "written by suite 0.1.0" in problem


@pytest.mark.slow
@pytest.mark.distributed
def test_a_renewed_certificate_keeps_what_has_not_changed_and_runs_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["run", "loopback", "--plugin", PLUGIN, "--model-type", "value_model", "--certify"]
    run += ["--world", "1", "--patience", "10", "--report", str(tmp_path)]
    path = tmp_path / "report.json"
    # One rank shows no capability of several, so that the verdict is partial.
    assert main(run) == 1
    first = json.loads(path.read_text())
    older = of_an_older_suite(first, "rl")
    facts = {"engine-conformance": "0.0.9", "cpu": "Another CPU, 64 cores"}
    older["environment"] = older["environment"] | facts
    stored(path, older | {"digest": digest(older)})
    assert main(["verify", str(path)]) == 1
    capsys.readouterr()
    for other, told in ((["--case", "lora.*"], "leave out --case"), (["--world", "2"], "has not")):
        assert main([*run, "--continue", *other]) == 2
        shown = capsys.readouterr()
        assert "--continue: " in shown.err
        assert told in shown.err
        assert "passed " not in shown.out
    # What a first run does not come to, the next one goes on with.
    assert main([*run, "--continue", "--limit", "0"]) != 0
    capsys.readouterr()
    assert main([*run, "--continue"]) == 1
    shown = capsys.readouterr().out
    again = [entry for entry in first["rows"] if entry["case"].startswith("rl.")]
    kept = len(first["rows"]) - len(again)
    assert f"{kept} of {len(first['rows'])} rows are kept\n" in shown
    assert shown.count("\npassed ") == len(again)
    renewed = json.loads(path.read_text())
    names = ("verdicts", "counts", "suite", "code", "selection", "commits", "complete")
    assert {name: renewed[name] for name in names} == {name: first[name] for name in names}
    assert [entry["case"] for entry in renewed["rows"]] == [
        entry["case"] for entry in first["rows"]
    ]
    assert renewed["environment"]["engine-conformance"] == "0.0.9; 0.1.0"
    assert renewed["environment"]["cpu"] == "; ".join(
        ("Another CPU, 64 cores", first["environment"]["cpu"])
    )
    assert len(renewed["parts"]) == 3
    text = (tmp_path / "certificate.md").read_text()
    assert text.count("| Another CPU, 64 cores | all cases |") == 1
    assert text.count(f"| {len({entry['case'] for entry in again})} of rl |") == 2
    assert main(["verify", str(path)]) == 0
    # A change that concerns no row is written down without a run, and not joined before.
    stored(path, of_an_older_suite(renewed, "rollout"))
    assert main(["merge", str(path), "--report", str(tmp_path / "joined")]) == 2
    assert "is of an older suite, though of one that decides" in capsys.readouterr().err
    assert main([*run, "--continue"]) == 1
    assert "passed " not in capsys.readouterr().out
    assert json.loads(path.read_text())["suite"] == first["suite"]

"""Tests of whole runs whose ranks raise, die or stall, which the run reports and survives."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_api.registry import EngineRegistry
from engine_conformance.cases import Case, Target
from engine_conformance.cli import main
from engine_conformance.plan import Selection
from engine_conformance.results import Outcome
from engine_conformance.session import run_selection
from engine_mutants import load_mutants
from engine_mutants.mutant import install

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module", autouse=True)
def mutants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    load_mutants()
    install(tmp_path_factory.mktemp("mutants") / "site")
    yield
    EngineRegistry.refresh()


def children() -> set[int]:
    """Return the ids of processes whose parent is this process."""
    found = set[int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it ended while we looked
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status", "told", "patience"),
    [
        # Only what stalls is ended by the clock: it must not be so short that a busy machine
        # stalls, too.
        ("raises", "failed", "rank 1 raised", "10"),
        ("dies", "failed", "rank 1 died", "10"),
        pytest.param("stalls", "timeout", "rank 1 stalled", "1", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_leaves_is_reported_and_the_next_case_passes(
    name: str,
    status: str,
    told: str,
    patience: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = children()
    code = main(
        [
            "run",
            f"mutant-empty-rank-{name}",
            "--case",
            "forward.no_documents,forward.temperature",
            "--world",
            "2",
            "--model-type",
            "language_model",
            "--patience",
            patience,
            "--report",
            str(tmp_path),
        ]
    )
    assert code == 1
    first, second = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert (first["case"], first["status"]) == ("forward.temperature", "passed")
    assert (second["case"], second["status"]) == ("forward.no_documents", status)
    assert told in second["message"]
    assert "rank 0" in second["message"], "every rank is told of"
    assert "File " in second["message"], "with its stack"
    assert "repeat: engine-conformance run" in capsys.readouterr().out
    assert children() <= before, "a process is left behind"


@pytest.mark.slow
def test_a_run_that_fails_does_not_spoil_the_next(tmp_path: Path) -> None:
    arguments = [
        "--case",
        "forward.no_documents",
        "--world",
        "2",
        "--model-type",
        "language_model",
        "--quiet",
    ]
    assert main(["run", "mutant-empty-rank-raises", *arguments]) == 1
    assert main(["run", "loopback", *arguments, "--report", str(tmp_path)]) == 0
    assert main(["verify", str(tmp_path / "report.json")]) == 0


@pytest.mark.slow
def test_a_deviation_turns_a_failure_into_partial_and_rots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = tmp_path / "conformance.toml"
    entry = (
        '[[deviation]]\ncase = "forward.loss_weight"\nreason = "r"\n'
        'issue = "https://example.org/1"\nuntil = 2999-01-01\n'
    )
    listed.write_text(entry)
    arguments = [
        "--case",
        "forward.loss_weight",
        "--world",
        "1",
        "--model-type",
        "language_model",
        "--deviations",
        str(listed),
    ]
    assert (
        main(["run", "mutant-outputs-in-float64", *arguments]) == 3
    )  # a deviation alone shows nothing
    assert "DEVIATION forward.loss_weight" in capsys.readouterr().out
    assert main(["run", "loopback", *arguments]) == 1
    assert "STALE-DEVIATION" in capsys.readouterr().out


BENT = """
from dataclasses import replace
from engine_loopback.plugin import PLUGIN as LOOPBACK
ROWS = tuple(replace(row, backends=("bent",), target=row.target + "s") for row in LOOPBACK.rows)
PLUGIN = replace(LOOPBACK, name="bent", rows=ROWS)
"""


@pytest.mark.slow
def test_a_misspelt_class_fails_once_before_the_first_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bent_plugin.py").write_text(BENT)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["--plugin", "bent_plugin:PLUGIN", "--case", "train.*", "--world", "1"]
    EngineRegistry.refresh()
    assert main(["run", "bent", *arguments]) == 3
    told = capsys.readouterr()
    assert "train." not in told.out
    assert (
        "the descriptor names engine_loopback.engine:LoopbackEngineWithLMHeads: "
        "engine_loopback.engine has no 'LoopbackEngineWithLMHeads'; "
        "did you mean LoopbackEngineWithLMHead" in told.err
    )


def test_after_a_case_that_hung_deadlines_are_shorter_and_after_three_the_run_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hang(case: Case, target: Target, **_: object) -> Outcome:
        patience[case.id] = target.patience
        status = "passed" if len(patience) == 3 else "timeout"
        return Outcome(status=status, seconds=0.1, message="" if status == "passed" else "stacks")

    patience: dict[str, float] = {}
    monkeypatch.setattr("engine_conformance.session.run_case", hang)
    monkeypatch.setattr("engine_conformance.session._check_classes", lambda _: None)
    selection = Selection(
        name="loopback", worlds=(1,), model_types=("language_model",), cases=("train.*",)
    )
    rows = run_selection(selection, command=[]).rows
    statuses = {row.case: row.outcome.status for row in rows}
    assert [*statuses.values()][:5] == ["timeout", "timeout", "passed", "timeout", "not-run"]
    assert set(statuses.values()) == {"timeout", "passed", "not-run"}
    assert [*patience.values()] == [1.0, 0.25, 0.25, 0.25], "none was started after the third"
    assert rows[0].outcome.message == "stacks"
    assert rows[1].outcome.message.startswith(
        f"the deadline was 0.25 of the usual one, since {rows[0].case} hung before"
    )
    assert rows[4].outcome.message == (
        f"stopped: {rows[0].case}, {rows[1].case}, {rows[3].case} hung; fix these first"
    )


@pytest.mark.slow
def test_a_run_out_of_time_is_gone_on_with_until_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "run",
        "loopback",
        "--case",
        "plugin.contract,forward.loss_weight",
        "--model-type",
        "language_model",
        "--dtype",
        "float32,bfloat16",
        "--world",
        "1",
        "--report",
        str(tmp_path),
        "--continue",
    ]
    assert main([*arguments, "--limit", "-1"]) == 3
    assert "this run begins it" in capsys.readouterr().out
    document = json.loads((tmp_path / "report.json").read_text())
    assert {one["status"] for one in document["rows"]} == {"not-run"}
    assert main([*arguments, "--dtype", "float32"]) == 0
    first = capsys.readouterr().out
    assert first.count("forward.loss_weight") == 1
    assert main(arguments) == 0
    second = capsys.readouterr().out
    assert second.count("forward.loss_weight") == 1, "what was shown is not run again"
    assert "float32" not in second.split("rows:")[0]
    document = json.loads((tmp_path / "report.json").read_text())
    assert [one["status"] for one in document["rows"]] == ["passed"] * 4
    assert len(document["parts"]) == 3
    assert main(arguments) == 0, "nothing is left to run"
    assert len(json.loads((tmp_path / "report.json").read_text())["parts"]) == 3
    assert main(["verify", str(tmp_path / "report.json")]) == 0


@pytest.mark.slow
def test_a_run_goes_on_with_nothing_but_its_own_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--case",
        "plugin.contract",
        "--model-type",
        "language_model",
        "--world",
        "1",
        "--continue",
    ]
    assert main(["run", "loopback", *arguments]) == 2
    assert "name its folder" in capsys.readouterr().err
    assert main(["run", "loopback", *arguments, "--report", str(tmp_path)]) == 0
    assert main(["run", "mutant-empty-rank-raises", *arguments, "--report", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "reports something else than what would run now" in told
    assert "name: expected 'loopback', got 'mutant-empty-rank-raises'" in told

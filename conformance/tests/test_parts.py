"""Tests of certificates that are run in parts: the division, and the parts joined again."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_api.registry import EngineRegistry
from engine_conformance.cli import main, offer
from engine_conformance.errors import CannotRun, UsageError
from engine_conformance.plan import Selection, choose_part, make_plan
from engine_conformance.report.document import digest
from report_samples import stored

PLUGIN = "engine_loopback.plugin:PLUGIN"
WHOLE = Selection(name="loopback", worlds=(1, 2), plugin=PLUGIN)


@pytest.fixture(autouse=True)
def loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    offer(PLUGIN, tmp_path / "site")
    EngineRegistry.refresh()


@pytest.mark.parametrize("count", [2, 3, 13])
def test_each_row_is_in_one_part_and_each_part_has_its_share_of_every_number_of_ranks(
    count: int, tmp_path: Path
) -> None:
    plan = make_plan(WHOLE, tmp_path)
    parts = [
        choose_part(plan, replace(WHOLE, part=f"{number}/{count}"))
        for number in range(1, count + 1)
    ]
    found = Counter(item.key for part in parts for item in part)
    assert found == Counter(item.key for item in plan)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for part in parts:
        assert part == [item for item in plan if item in part], "the plan's order is kept"
        worlds = Counter(item.target.world for item in part)
        assert all(worlds[world] > len(part) / 4 for world in (1, 2)), worlds


def test_a_part_that_has_no_row_or_every_row_is_refused(tmp_path: Path) -> None:
    plan = make_plan(WHOLE, tmp_path)
    with pytest.raises(UsageError, match=f"expected at most {len(plan)} parts"):
        choose_part(plan, replace(WHOLE, part="1/9999"))
    with pytest.raises(UsageError, match="has all rows of the certificate: leave it out"):
        choose_part(plan, replace(WHOLE, cases=("*",)))
    with pytest.raises(CannotRun, match=r"has no row of --case rollout\.\*"):
        choose_part(plan, replace(WHOLE, cases=("rollout.*",)))


def read(folder: Path) -> dict[str, Any]:
    document = json.loads((folder / "report.json").read_text())
    for row in document["rows"]:
        del row["seconds"]
    return document


@pytest.mark.slow
@pytest.mark.distributed
def test_parts_of_a_run_are_joined_to_the_certificate_of_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["run", "loopback", "--plugin", PLUGIN, "--world", "1", "--model-type", "value_model"]
    run += ["--profile", "rl", "--patience", "10", "--certify", "--report"]
    whole, first, second, out = (tmp_path / name for name in ("whole", "first", "second", "out"))

    assert main([*run, str(whole)]) == 0
    assert main([*run, str(first), "--part", "1/2"]) == 0
    assert "this is a part of a certificate, 3 of 5 rows (part 1/2)" in capsys.readouterr().out
    # What a run did not come to, it goes on with in the same folder.
    late = [*run, str(second), "--part", "2/2", "--continue"]
    assert main([*late, "--limit", "0"]) != 0
    # A report of another certificate, or of none, is found before the first row.
    capsys.readouterr()
    for other in ([*late, "--profile", "engine"], [one for one in run if one != "--certify"]):
        again = other if "--certify" in other else [*other, str(second), "--continue"]
        again += ["--case", "rl.*"] if "--certify" not in other else []
        assert main(again) == 2
        shown = capsys.readouterr()
        assert "--continue: the report is a part of a" in shown.err
        assert "passed " not in shown.out
    # Parts are of one kind of machine.
    kept = (second / "report.json").read_text()
    elsewhere = json.loads(kept)
    elsewhere["environment"] = elsewhere["environment"] | {"cpu": "Another CPU, 64 cores"}
    stored(second / "report.json", elsewhere | {"digest": digest(elsewhere)})
    assert main(late) == 2
    assert "cpu: expected 'Another CPU', got" in capsys.readouterr().err
    (second / "report.json").write_text(kept)
    assert main(late) == 0
    assert main(["merge", str(first), "--certify", "--report", str(out)]) == 2
    assert "part 2/2 of the certificate is missing: 2 of 5 rows" in capsys.readouterr().err
    assert main(["merge", str(second), str(first), "--certify", "--report", str(out)]) == 0
    assert main(["verify", str(out / "report.json"), "--parts", str(second), str(first)]) == 0
    want, got = read(whole), read(out)
    same = set(want) - {"digest", "command", "seconds", "started", "parts"}
    assert {name for name in same if want[name] != got[name]} == set()

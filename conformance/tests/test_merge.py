"""Tests of merged reports: the choice, the row that wins, the verdict, and its verification."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine_conformance import environment
from engine_conformance.cli import main
from engine_conformance.errors import UsageError
from engine_conformance.report import (
    certificate,
    check_whole,
    differences,
    merge,
    read_document,
    shown,
    to_document,
    verify,
)
from engine_conformance.report.document import digest
from engine_conformance.results import STATUSES, Row, SuiteRun
from engine_conformance.verdict import compute_verdicts
from report_samples import GOOD, SUITE, WORLD_1, WORLD_2, made, row, stored

HALF = replace(WORLD_1, dtype="bfloat16")
SOURCES = {"acme": "b" * 64, "engine_api": "c" * 64}


def report(rows: list[Row], *, seconds: float = 10.0, **changes: Any) -> dict[str, Any]:
    selection = {"worlds": [1], "dtypes": ["float32"]} | changes.pop("selection", {})
    return to_document(
        *made(rows, selection=selection, seconds=seconds, **({"sources": SOURCES} | changes))
    )


def joined(*documents: Mapping[str, Any], certify: bool = True) -> dict[str, Any]:
    named = {f"report {index}": one for index, one in enumerate(documents)}
    run = merge(named, command=["merge", "a", "b"], certify=certify)
    return to_document(
        run, compute_verdicts(run.rows, complete=run.selection["complete"], declared=run.declared)
    )


def in_half(rows: list[Row]) -> list[Row]:
    return [replace(one, setting=replace(one.setting, dtype="bfloat16")) for one in rows]


FULL = report(GOOD, selection={"worlds": [1, 2]})


def test_both_precisions_in_one_certificate_have_one_verdict(tmp_path: Path) -> None:
    half = report(
        in_half(GOOD),
        selection={"worlds": [1, 2], "dtypes": ["bfloat16"]},
        started="2026-02-01T00:00:00+00:00",
    )
    both = joined(FULL, half)
    assert {one["verdict"] for one in both["verdicts"]} == {"conformant"}
    assert (both["complete"], both["started"], both["seconds"]) == (True, FULL["started"], 20.0)
    assert (both["selection"]["worlds"], both["selection"]["dtypes"]) == (
        [1, 2],
        ["float32", "bfloat16"],
    )
    assert [part["digest"] for part in both["parts"]] == [FULL["digest"], half["digest"]]
    assert len(both["rows"]) == 2 * len(GOOD)
    assert verify(stored(tmp_path / "report.json", both), suite=SUITE) == []
    text = certificate(both)
    assert text.startswith("# Certificate: acme")
    assert all(part["digest"] in text for part in both["parts"])
    assert "engine-conformance merge a b" in text
    assert "engine-conformance run acme --world 1,2 --report 'my reports'" in text


def test_what_one_run_did_not_come_to_another_shows() -> None:
    first = report(
        [row("a.one", margin=0.2), row("a.two", "not-run", message="out of time (--limit)")],
        declared=[],
    )
    second = report([row("a.two", margin=0.4)], declared=[], command=["run", "acme", "--continue"])
    assert shown(read_document(first)[0]) == {("a.one", WORLD_1)}
    assert first["verdicts"][0]["verdict"] == "partial"
    whole = joined(first, second)
    assert [(one["case"], one["status"]) for one in whole["rows"]] == [
        ("a.one", "passed"),
        ("a.two", "passed"),
    ]
    assert whole["verdicts"][0]["verdict"] == "conformant"


ORDER = [
    "failed",
    "timeout",
    "accepted-undeclared",
    "stale-deviation",
    "deviation",
    "passed",
    "refused",
    "suite-error",
]


@pytest.mark.parametrize("order", [1, -1])
def test_the_worst_that_was_seen_counts_but_what_showed_nothing_gives_way(order: int) -> None:
    ranks = [*ORDER, "not-run"]
    assert set(ranks) == set(STATUSES)
    for worse, better in pairwise(ranks):
        both = [
            report([row("a.case", status)], seconds=seconds)
            for status, seconds in ((worse, 1.0), (better, 2.0))
        ]
        [one] = joined(*both[::order])["rows"]
        assert one["status"] == worse
    closer = [report([row("a.case", margin=margin)]) for margin in (0.3, 0.9)]
    assert joined(*closer[::order])["rows"][0]["margin"] == 0.9


def test_a_case_that_failed_once_is_not_healed_by_running_it_again() -> None:
    failed = report([row("a.case", "failed", 3.0)], declared=[])
    passed = report([row("a.case", margin=0.1)], declared=[])
    assert joined(failed, passed)["verdicts"][0]["verdict"] == "non-conformant"


def test_a_setting_that_no_part_asked_for_as_a_whole_is_partial() -> None:
    quick = report(
        [row("a.case", setting=HALF)],
        declared=[],
        selection={"dtypes": ["bfloat16"], "quick": True, "complete": False},
    )
    plain = report([row("a.case")], declared=[])
    assert joined(plain, quick, certify=False)["complete"] is False
    whole = report(
        [row("a.case", setting=HALF), row("a.more", setting=HALF)],
        declared=[],
        selection={"dtypes": ["bfloat16"]},
    )
    assert joined(plain, quick, whole, certify=False)["complete"] is True
    # The whole of one number of ranks says nothing of another.
    two = report(
        [row("a.case", setting=WORLD_2)],
        declared=[],
        selection={"worlds": [2], "cases": ["a.*"], "complete": False},
    )
    assert joined(plain, two, certify=False)["complete"] is False


def differing(**changes: Any) -> dict[str, Any]:
    return report(
        [row("a.case", setting=HALF)], **({"selection": {"dtypes": ["bfloat16"]}} | changes)
    )


ENVIRONMENT = made()[0].environment
UNLIKE = [
    ({"name": "other"}, "name: expected 'acme', got 'other'"),
    (
        {"distribution": "acme-engine==2.2.0 (acme.plugin:PLUGIN)"},
        "distribution: expected 'acme-engine==2.1.0",
    ),
    ({"contract": "1.1"}, "contract: expected '1.0', got '1.1'"),
    ({"suite": SUITE | {"digest": "d" * 64}}, "suite's digest: expected 'aaaa"),
    (
        {"declared": ["dp"]},
        "declared capabilities: expected ['dp', 'lora', 'value-head'], got ['dp']",
    ),
    ({"sources": SOURCES | {"acme": "e" * 64}}, "digest of acme's files: expected 'bbbb"),
    ({"sources": {}}, "digest of engine_api's files: expected 'cccc"),
    ({"environment": {**ENVIRONMENT, "torch": "2.14.0"}}, "torch: expected '2.13.0', got '2.14.0'"),
    (
        {"environment": {**ENVIRONMENT, "cpu": "Other CPU, 2 cores"}},
        "cpu: expected 'Some CPU', got 'Other CPU'",
    ),
    (
        {"environment": {**ENVIRONMENT, "accelerator": "cpu (shimmed)"}},
        "accelerator: expected None",
    ),
    ({"selection": {"device": "cuda"}}, "--device: expected 'cpu', got 'cuda'"),
    ({"selection": {"layout": {"tp": 2}}}, "--layout: expected None, got {'tp': 2}"),
    ({"selection": {"partner": "other"}}, "--partner: expected None, got 'other'"),
    ({"selection": {"plugin": "a:B"}}, "--plugin: expected None, got 'a:B'"),
    ({"selection": {"options": {"x": 1}}}, "--options: expected None, got {'x': 1}"),
]


@pytest.mark.parametrize(("changes", "told"), UNLIKE)
def test_reports_of_different_things_are_not_joined(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match="report 1 cannot be joined with report 0") as caught:
        joined(report([row("a.case")]), differing(**changes))
    assert told in str(caught.value)


def test_more_devices_and_cores_of_the_same_kind_are_the_same_machine() -> None:
    facts = [
        {**ENVIRONMENT, "cpu": f"Some CPU, {cores} cores", "accelerator": f"{n} x NVIDIA H200"}
        for n, cores in ((1, 8), (2, 16))
    ]
    on = [{"device": "cuda", "worlds": [n]} for n in (1, 2)]
    rows = [
        [replace(row("a.case"), setting=replace(WORLD_1, device="cuda", world=n))] for n in (1, 2)
    ]
    one, two = (
        report(r, environment=f, selection=s) for r, f, s in zip(rows, facts, on, strict=True)
    )
    assert joined(one, two)["environment"]["accelerator"] == "1 x NVIDIA H200; 2 x NVIDIA H200"
    # What computes is the accelerator: its host may be another.
    two["environment"]["cpu"] = "Other CPU, 16 cores"
    assert joined(one, two)["environment"]["cpu"] == "Some CPU, 8 cores; Other CPU, 16 cores"


def test_on_request_the_kind_of_machine_may_differ_and_a_device_that_is_simulated_not() -> None:
    def run_on(accelerator: str, **changes: str) -> SuiteRun:
        facts = {**ENVIRONMENT, "accelerator": accelerator, **changes}
        return read_document(report([], environment=facts, selection={"device": "cuda"}))[0]

    one, other = run_on("2 x NVIDIA H100"), run_on("1 x NVIDIA H200")
    assert differences(one, other) == [
        "accelerator: expected 'NVIDIA H100', got 'NVIDIA H200'",
    ]
    assert differences(one, other, any_machine=True) == []
    assert differences(one, run_on("cpu (shimmed)"), any_machine=True)
    assert differences(run_on("simulated"), other, any_machine=True)
    assert differences(one, run_on("1 x NVIDIA H200", torch="2.14.0"), any_machine=True) == [
        "torch: expected '2.13.0', got '2.14.0'"
    ]


def test_a_report_is_joined_once_also_within_a_joined_one() -> None:
    half = differing()
    both = joined(FULL, half)
    with pytest.raises(UsageError, match="is given twice"):
        joined(FULL, FULL)
    with pytest.raises(UsageError, match="is given twice"):
        joined(both, half)
    with pytest.raises(UsageError, match="name at least one"):
        joined()
    third = report([row("a.third")])
    assert len(joined(both, third)["parts"]) == 3


def drop_row(document: dict[str, Any]) -> None:
    document["parts"].pop()


def double_row(document: dict[str, Any]) -> None:
    document["rows"].append(document["rows"][0])
    document["counts"]["passed"] += 1


FORGERIES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (drop_row, "selection: is not what its parts asked for"),
    (drop_row, "rows: no part asked for language_model, cpu, world 1, bfloat16"),
    (double_row, "rows: plugin.light in language_model, cpu, world 1, float32 is there 2 times"),
    (
        lambda d: d["parts"][0]["selection"].update(quick=True),
        "complete: states True, its selection says False",
    ),
    (lambda d: d.update(seconds=1.0), "seconds: states 1.0, its parts took 20.000"),
    (
        lambda d: d.update(started="2026-01-30T12:00:00+00:00"),
        "started: is not when the first of its parts did",
    ),
    (lambda d: d["environment"].update(torch="3.0"), "environment: is not that of its parts"),
]


@pytest.mark.parametrize(("change", "told"), FORGERIES)
def test_a_forged_joined_report_shows_though_its_digest_is_right(
    change: Callable[[dict[str, Any]], Any], told: str, tmp_path: Path
) -> None:
    document = copy.deepcopy(joined(FULL, differing()))
    change(document)
    document["digest"] = digest(document)
    problems = verify(stored(tmp_path / "report.json", document), suite=SUITE)
    assert any(told in problem for problem in problems), problems


ALL = [row.key for row in GOOD]


def part(*rows: Row, part: str = "", cases: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    selection = {"worlds": [1, 2], "part": part, "cases": list(cases), "complete": False}
    given = {"selection": selection, "certify": True, "planned": ALL} | changes
    return report(list(rows), seconds=2.0, **given)


THIRDS = [part(*GOOD[index::3], part=f"{index + 1}/3") for index in range(3)]


def test_the_parts_of_a_certificate_make_the_certificate_of_one_run(tmp_path: Path) -> None:
    for one in THIRDS:
        assert verify(stored(tmp_path / "report.json", one), suite=SUITE) == []
        assert {entry["verdict"] for entry in one["verdicts"]} == {"partial"}
        assert certificate(one).startswith("# Part of a certificate: acme")
    whole = joined(*reversed(THIRDS))
    assert verify(stored(tmp_path / "report.json", whole), suite=SUITE) == []
    one_run = report(GOOD, certify=True, selection={"worlds": [1, 2], "part": ""})
    same = set(one_run) - {"digest", "command", "seconds", "parts"}
    assert {name for name in same if whole[name] != one_run[name]} == set()
    assert certificate(whole).startswith("# Certificate: acme")
    check_whole(read_document(whole)[0])


def test_a_larger_part_is_joined_with_the_rest() -> None:
    two = joined(*THIRDS[:2])
    assert (two["complete"], two["selection"]["part"]) == (False, "1/3, 2/3")
    assert joined(two, THIRDS[2])["complete"] is True


def test_parts_that_were_picked_by_their_cases_make_a_certificate_too() -> None:
    names = sorted({one.case for one in GOOD})
    halves = [
        part(*(one for one in GOOD if one.case in chosen), cases=tuple(chosen))
        for chosen in (names[:3], names[3:])
    ]
    whole = joined(*halves)
    assert (whole["complete"], whole["selection"]["cases"]) == (True, [])
    with pytest.raises(UsageError, match=r"a part of the certificate is missing: \d of 8 rows"):
        check_whole(read_document(joined(halves[0]))[0])


def test_certificates_of_two_precisions_are_each_joined_from_parts() -> None:
    half = in_half(GOOD)

    def share(index: int, count: int) -> dict[str, Any]:
        selection = {
            "worlds": [1, 2],
            "dtypes": ["bfloat16"],
            "part": f"{index + 1}/{count}",
            "complete": False,
        }
        return part(*half[index::count], planned=[one.key for one in half], selection=selection)

    both = joined(joined(*THIRDS), joined(share(0, 2), share(1, 2)))
    assert both["complete"] is True
    assert joined(*THIRDS, share(0, 2))["complete"] is False
    assert joined(*THIRDS, share(0, 2), share(1, 2))["rows"] == both["rows"]
    # The other certificate has parts with the numbers of those that are missing.
    with pytest.raises(UsageError, match=r"part 2/3, 3/3 of the .* is missing: 5 of 8") as told:
        check_whole(read_document(joined(*THIRDS, share(0, 3)))[0])
    assert "given of the certificate of --world 1,2 --dtype bfloat16: part 1/3" in str(told.value)


@pytest.mark.parametrize(
    "picked", [{"cases": [GOOD[1].case]}, {"quick": True}], ids=["cases", "quick"]
)
def test_a_run_without_certify_that_left_cases_out_completes_no_certificate(
    picked: dict[str, Any],
) -> None:
    selection = {"worlds": [1, 2], "complete": False, **picked}
    by_hand = report(GOOD[1::3], selection=selection)
    told = "report 2 is no part of a certificate: it was run without --certify"
    for certify in (True, False):
        with pytest.raises(UsageError, match=told):
            joined(THIRDS[0], THIRDS[2], by_hand, certify=certify)
    # Nor by way of a joined report, or in place of a row that shows nothing.
    late = replace(GOOD[1], outcome=replace(GOOD[1].outcome, status="not-run", message="late"))
    whole = report([GOOD[0], late, *GOOD[2:]], selection={"worlds": [1, 2]})
    healed = joined(whole, by_hand, certify=False)
    for parts in ((whole, by_hand), (healed, report(in_half(GOOD)))):
        with pytest.raises(UsageError, match="is no part of a certificate"):
            joined(*parts)


def test_a_part_that_is_missing_doubled_or_of_another_certificate_is_named() -> None:
    with pytest.raises(UsageError, match=r"part 2/3 of the certificate is missing: 3 of 8 rows"):
        check_whole(read_document(joined(THIRDS[0], THIRDS[2]))[0])
    again = part(*GOOD[1::3], part="2/3", started="2026-02-01T00:00:00+00:00")
    with pytest.raises(UsageError, match=r"report 3 \(part 2/3\) has rows that report 1 \(part"):
        joined(*THIRDS, again)
    quarter = part(*GOOD[:2], part="1/4")
    with pytest.raises(UsageError, match=r"report 1 \(part 1/4\) has rows that report 0 \(part"):
        joined(THIRDS[0], quarter)
    smaller = part(*GOOD[1:3], part="2/3", planned=ALL[:-1])
    with pytest.raises(UsageError, match="report 1 and report 0 are parts of two certifi") as told:
        joined(THIRDS[0], smaller)
    assert f"{GOOD[-1].case} in {GOOD[-1].setting}" in str(told.value)


def test_a_row_that_a_part_did_not_come_to_leaves_the_certificate_partial() -> None:
    late = replace(GOOD[1], outcome=replace(GOOD[1].outcome, status="not-run", message="late"))
    parts = [THIRDS[0], part(late, *GOOD[4::3], part="2/3"), THIRDS[2]]
    whole = joined(*parts)
    check_whole(read_document(whole)[0])
    assert "partial" in {one["verdict"] for one in whole["verdicts"]}
    # The row that is shown later is not there twice.
    assert joined(*parts, part(GOOD[1], part="2/3"))["counts"]["not-run"] == 0


def test_a_joined_certificate_that_states_a_shorter_plan_than_its_rows_is_not_complete(
    tmp_path: Path,
) -> None:
    document = copy.deepcopy(joined(*THIRDS))
    document["planned"][0]["cases"].pop()
    document["digest"] = digest(document)
    problems = verify(stored(tmp_path / "report.json", document), suite=SUITE)
    assert any("complete: states True, its selection says False" in one for one in problems)


def test_the_command_line_joins_verifies_and_compares_with_the_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = environment.suite()
    kept = [tmp_path / name for name in ("one", "two")]
    half = report(in_half(GOOD), suite=suite, selection={"worlds": [1, 2], "dtypes": ["bfloat16"]})
    for folder, document in zip(
        kept, (report(GOOD, suite=suite, selection={"worlds": [1, 2]}), half), strict=True
    ):
        folder.mkdir()
        stored(folder / "report.json", document)
    names = [str(folder) for folder in kept]
    out = tmp_path / "both"
    assert main(["merge", *names, "--certify", "--report", str(out)]) == 0
    assert "engine / language_model: CONFORMANT" in capsys.readouterr().out
    assert main(["verify", str(out / "report.json"), "--parts", *names]) == 0
    other = json.loads((out / "report.json").read_text())
    other["rows"][1]["margin"] = 0.01
    other["digest"] = digest(other)
    stored(out / "report.json", other)
    assert main(["verify", str(out / "report.json")]) == 0, (
        "a margin alone is not seen without the parts"
    )
    capsys.readouterr()
    assert main(["verify", str(out / "report.json"), "--parts", *names]) == 1
    assert "rows: is not what its parts give" in capsys.readouterr().out
    for name in ("parts", "sources"):
        lacking = {field: value for field, value in other.items() if field != name}
        lacking["digest"] = digest(lacking)
        stored(out / "report.json", lacking)
        assert main(["verify", str(out / "report.json"), "--parts", *names]) == 1, (
            f"a report without {name}"
        )
    altered = json.loads((kept[0] / "report.json").read_text())
    altered["seconds"] = 0.5
    stored(kept[0] / "report.json", altered)
    assert main(["merge", *names, "--report", str(out)]) == 2
    assert "altered after it was written" in capsys.readouterr().err
    assert main(["merge", str(tmp_path / "none"), "--report", str(out)]) == 2


def test_a_report_of_another_suite_is_not_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stored(tmp_path / "report.json", report(GOOD))
    assert main(["merge", str(path), "--report", str(tmp_path / "out")]) == 2
    assert "written by suite 0.1.0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_sources_tell_two_builds_of_one_version_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "__init__.py").write_text("raise AssertionError('nothing is imported')")
    (tmp_path / "alone.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    before = environment.sources("acme.plugin", "acme.engine", "alone", "nowhere")
    assert set(before) == {"acme", "alone"}
    (tmp_path / "acme" / "engine.py").write_text("y = 2")
    after = environment.sources("acme.plugin", "alone")
    assert (after["acme"] != before["acme"], after["alone"]) == (True, before["alone"])


def test_a_run_of_its_own_has_no_parts() -> None:
    run: SuiteRun = read_document(FULL)[0]
    assert not run.parts
    assert joined(FULL)["parts"][0]["digest"] == FULL["digest"]

"""Tests of the cases that a run repeats in other layouts and with other options."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine_api.capabilities import Capability
from engine_api.config import Parallelism
from engine_api.errors import ConfigError
from engine_api.plugin import Variant
from engine_conformance.cases import Target, load_cases, run_case
from engine_conformance.plan import Item, Selection, make_plan
from engine_conformance.rank_failure import FailedRank, RankError
from engine_conformance.report.view import facts
from engine_conformance.session import repeat_command, run_item
from engine_conformance.variants import CASES, CASES_OF_EXPERTS, repetitions
from engine_conformance.verdict import untested
from engine_loopback.plugin import PLUGIN
from report_samples import WORLD_2, made, row

WHOLE = Selection(name="loopback", worlds=(1, 2), plugin="engine_loopback.plugin:PLUGIN")
LAYOUTS = ["dp_replicate=2", "ulysses=2", "tp=2", "pp=2", "cp=2", "ep=2"]


@pytest.fixture(autouse=True)
def loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_api.registry import EngineRegistry
    from engine_conformance.cli import offer

    monkeypatch.setattr(sys, "path", [*sys.path])
    offer("engine_loopback.plugin:PLUGIN", tmp_path / "site")
    EngineRegistry.refresh()


def repeated(selection: Selection, root: Path) -> list[Item]:
    return [item for item in make_plan(selection, root) if item.variant]


def test_a_whole_run_repeats_cases_in_each_layout_and_with_each_declared_option(
    tmp_path: Path,
) -> None:
    items = repeated(WHOLE, tmp_path)
    assert list(dict.fromkeys(item.variant for item in items)) == [*LAYOUTS, "flat_norm=true"]
    assert {item.target.world for item in items} == {2}
    assert {item.case.id for item in items} == {*CASES, *CASES_OF_EXPERTS}
    assert set(CASES) | set(CASES_OF_EXPERTS) <= set(load_cases())
    (tensor,) = {item.target.layout for item in items if item.variant == "tp=2"}
    assert tensor == Parallelism(tp=2)
    (options,) = {str(item.target.options) for item in items if item.variant == "flat_norm=true"}
    assert options == "{'flat_norm': True}"


@pytest.mark.parametrize(
    "changes",
    [
        {"cases": ("train.*",)},
        {"quick": True},
        {"layout": Parallelism(tp=2)},
    ],
)
def test_a_run_of_some_cases_or_in_a_layout_of_its_own_repeats_nothing(
    changes: dict[str, object], tmp_path: Path
) -> None:
    assert repeated(replace(WHOLE, **changes), tmp_path) == []


def test_a_layout_runs_on_the_smallest_number_of_ranks_that_it_fits() -> None:
    only = replace(
        PLUGIN,
        capabilities=frozenset({Capability.TP}),
        variants=(
            Variant(options={"fast": True}),
            Variant(options={"format": "own"}, parallelism={"tp": 2, "pp": 2}),
        ),
    )

    def found(*worlds: int) -> list[tuple[str, int]]:
        return [(one.name, one.world) for one in repetitions(only, worlds)]

    assert found(1) == [("fast=true", 1)]
    assert found(1, 3) == [("fast=true", 3)]
    assert found(4, 2) == [("tp=2", 2), ("fast=true", 2), ("tp=2, pp=2, format=own", 4)]


def test_the_command_that_repeats_a_row_has_its_layout_and_options(tmp_path: Path) -> None:
    items = {item.variant: item for item in repeated(WHOLE, tmp_path)}
    assert "--parallelism tp=2" in repeat_command(items["tp=2"], WHOLE)
    assert "--option flat_norm=true" in repeat_command(items["flat_norm=true"], WHOLE)
    assert str(items["tp=2"].setting).endswith("world 2, float32, tp=2")


def test_a_repeated_case_does_not_show_data_parallelism() -> None:
    varied = row("train.policy", setting=replace(WORLD_2, variant="tp=2"), group="variants")
    assert untested([varied], ["dp"]) == ["dp"]
    assert untested([varied, row("train.policy", setting=WORLD_2)], ["dp"]) == []


def test_a_report_says_in_which_layouts_and_with_which_options_it_is_valid() -> None:
    plain, _ = made()
    text = dict(facts(plain, "d"))["Layouts and options"]
    assert text == (
        "data parallel with default options only, except for cases that set a layout themselves"
    )
    rows = [
        row("train.policy", setting=replace(WORLD_2, variant=name), group="variants")
        for name in ("tp=2", "pp=2")
    ]
    varied, _ = made(rows)
    text = dict(facts(varied, "d"))["Layouts and options"]
    assert text == "data parallel with default options; some cases also with tp=2; pp=2"


def _refusal(world: int, *errors: str) -> RankError:
    failures = [
        FailedRank(rank=rank, kind="raised", text=f"Traceback\n{name}: no", exception=name)
        for rank, name in enumerate(errors)
    ]
    return RankError("f", world, failures, 0.1)


NAME = f"{ConfigError.__module__}.{ConfigError.__qualname__}"


@pytest.mark.parametrize(
    ("errors", "may_refuse", "status"),
    [
        ((NAME, NAME), True, "refused"),
        ((NAME, NAME), False, "failed"),
        ((NAME,), True, "failed"),
        ((NAME, "builtins.ValueError"), True, "failed"),
    ],
)
def test_a_refusal_counts_only_where_it_may_and_on_every_rank(
    errors: tuple[str, ...], may_refuse: bool, status: str, tmp_path: Path
) -> None:
    def refuse(target: Target) -> float:
        """The model MUST train."""
        raise _refusal(target.world, *errors)

    case = replace(load_cases()["train.moe"], function=refuse)
    target = Target(backend="loopback", root=tmp_path, world=2)
    outcome = run_case(case, target, may_refuse=may_refuse)
    assert outcome.status == status
    if status == "refused":
        assert outcome.message == f"{NAME}: no"


def test_a_layout_may_refuse_experts_and_adapters_but_not_the_plain_model(
    tmp_path: Path,
) -> None:
    def refuse(target: Target) -> float:
        """The model MUST train."""
        raise _refusal(target.world, NAME, NAME)

    items = {(item.variant, item.case.id): item for item in repeated(WHOLE, tmp_path)}
    statuses = {
        case: run_item(
            replace(items["tp=2", case], case=replace(load_cases()[case], function=refuse)), WHOLE
        ).outcome.status
        for case in ("train.moe", "train.policy")
    }
    assert statuses == {"train.moe": "refused", "train.policy": "failed"}

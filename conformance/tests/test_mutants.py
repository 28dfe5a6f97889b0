"""Tests that each mutant fails the case that it names, and that the sound engine passes it.

The sound engine is the same one without the defect.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from engine_api.registry import EngineRegistry
from engine_conformance.cases import load_cases
from engine_conformance.ranks import close_pools, get_pool
from engine_loopback.plugin import CAPABILITIES
from engine_mutants import load_mutants
from engine_mutants.mutant import Mutant, install
from engine_mutants.running import control, controls, is_caught, kill
from engine_mutants.stays import STAYS, reason

ROOT = Path(__file__).parents[1]
# Pools of ranks are kept for the next case of the same size.
MUTANTS = sorted(load_mutants().values(), key=lambda one: (one.world, one.case))
CONTROLS = controls(MUTANTS, Path())


def _module(one: Mutant) -> str:
    return one.targets["language_model"].partition(":")[0]


# All of them take longer than a test should (`nox -s mutants` runs them): some run at night alone,
# but never the first of a module and group.
QUICK = [one for one in MUTANTS if not load_cases()[one.case].slow]
FIRST = list({(_module(one), one.group): one for one in reversed(QUICK)}.values())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder that all mutants share, while the registry knows them."""
    folder = tmp_path_factory.mktemp("mutants")
    install(folder / "site")
    yield folder
    close_pools()
    sys.path.remove(str(folder / "site"))
    EngineRegistry.refresh()


def _parameter(one: Mutant, *, at_night: bool) -> object:
    marks = pytest.mark.nightly if at_night and one not in FIRST else ()
    return pytest.param(one, id=one.name.removeprefix("mutant-"), marks=marks)


OTHERS: dict[str, str | None] = json.loads((ROOT / "mutants" / "others.json").read_text())


@pytest.mark.slow
@pytest.mark.distributed
# A mutant that a second case would catch as well runs at night.
@pytest.mark.parametrize(
    "one", [_parameter(one, at_night=bool(OTHERS.get(one.name))) for one in MUTANTS]
)
def test_mutant_is_caught_by_its_case(one: Mutant, root: Path) -> None:
    outcome = kill(one, root)
    assert is_caught(outcome), (
        f"{one.defect} {one.case} ended as {outcome.status}: {outcome.message}"
    )


@pytest.mark.slow
@pytest.mark.distributed
def test_what_an_engine_left_behind_in_an_earlier_case_is_seen(root: Path) -> None:
    (leaves_it,) = (one for one in MUTANTS if one.name == "mutant-default-dtype-stays")

    outcomes = [kill(leaves_it, root) for _ in range(2)]

    assert [is_caught(outcome) for outcome in outcomes] == [True, True]


@pytest.mark.slow
@pytest.mark.distributed
def test_what_an_engine_leaves_behind_is_not_in_the_ranks_of_the_next_case(root: Path) -> None:
    (leaves_it,) = (one for one in MUTANTS if one.name == "mutant-default-dtype-stays")
    pool = get_pool(leaves_it.world)
    before = pool.run("rank_functions:default_dtype")
    pids = pool.pids

    assert is_caught(kill(leaves_it, root))

    assert pool.run("rank_functions:default_dtype") == before
    assert pool.pids == pids


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", sorted(CONTROLS, key=lambda name: (CONTROLS[name][1].world, name)))
def test_engine_without_defect_passes(name: str, root: Path) -> None:
    case, target = CONTROLS[name]
    outcome = control(case, replace(target, root=root))
    assert outcome.status == "passed", outcome.message


IN_BFLOAT16: dict[str, bool] = json.loads((ROOT / "mutants" / "bfloat16.json").read_text())


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "one", [_parameter(one, at_night=True) for one in MUTANTS if IN_BFLOAT16.get(one.name)]
)
def test_mutant_is_caught_in_bfloat16_as_the_page_says(one: Mutant, root: Path) -> None:
    outcome = kill(replace(one, dtype="bfloat16"), root)
    assert is_caught(outcome), (
        f"{one.defect} {one.case} in bfloat16 ended as {outcome.status}: {outcome.message}"
    )


def test_the_page_knows_of_bfloat16_for_every_mutant_whose_case_says_something_in_it(
    root: Path,
) -> None:
    half = [replace(one, dtype="bfloat16") for one in MUTANTS if one.dtype == "float32"]
    asked = {one.name for one in half if load_cases()[one.case].why_not(one.target(root)) is None}
    assert asked == set(IN_BFLOAT16), (
        "python tools/mutants.py --bfloat16 NAME, and take out what is gone"
    )


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 40
    assert {str(capability) for capability in CAPABILITIES} <= {one.group for one in MUTANTS}


def test_names_and_cases_are_real() -> None:
    assert len({one.name for one in MUTANTS}) == len(MUTANTS)
    assert {one.case for one in MUTANTS} <= set(load_cases())
    assert all(one.defect.endswith(".") for one in MUTANTS), "a defect is one sentence"


def test_case_applies_in_the_mutants_setting(root: Path) -> None:
    reasons = {one.name: load_cases()[one.case].why_not(one.target(root)) for one in MUTANTS}
    assert not {name: reason for name, reason in reasons.items() if reason}


def test_a_case_that_catches_nothing_alone_says_why_it_stays() -> None:
    assert set(OTHERS) <= {one.name for one in MUTANTS}, (
        "a mutant is gone: take it from others.json"
    )
    # One that is not there was not looked for yet (`python tools/mutants.py --others NAME`): the
    # page says so.
    alone = {one.case for one in MUTANTS if one.name in OTHERS and OTHERS[one.name] is None}
    silent = [
        name
        for name, one in load_cases().items()
        if not one.probes and name not in alone and not reason(name)
    ]
    assert not silent
    assert all(any(fnmatchcase(name, glob) for name in load_cases()) for glob in STAYS)

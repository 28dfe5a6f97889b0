"""Every case of the conformance suite, by name: one test a case and world size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_conformance.cases import Case, SkipCase, Target, load_cases
from engine_conformance.ranks import close_pools

BACKEND, DEVICE = os.environ.get("ENGINE_BACKEND", "fsdp2"), os.environ.get("ENGINE_DEVICE", "cpu")
WORLDS = (1, 2, 4)
pytestmark = [pytest.mark.conformance, pytest.mark.distributed]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("conformance")
    close_pools()


def parameters() -> list[object]:
    """World by world, so that few ranks wait at a time."""
    pairs = [(one, world) for world in WORLDS for one in load_cases().values() if world in one.world]
    return [pytest.param(one, w, id=f"{one.id}-{w}", marks=[pytest.mark.slow] * one.slow) for one, w in pairs]


@pytest.mark.parametrize(("one", "world"), parameters())
def test_case(one: Case, world: int, root: Path) -> None:
    target = Target(backend=BACKEND, device=DEVICE, world=world, root=root)
    if reason := one.why_not(target):
        pytest.skip(reason)
    try:
        one.function(target)
    except SkipCase as skip:
        pytest.skip(str(skip))


def test_the_older_name_means_the_same_engine(root: Path) -> None:
    older = Target(backend="fsdp", device=DEVICE, root=root)
    assert older.resolution.row == Target(backend="fsdp2", device=DEVICE, root=root).resolution.row
    load_cases()["train.families"].function(older)


def test_nothing_that_is_declared_goes_untested() -> None:
    cases = load_cases().values()
    declared = Target(backend=BACKEND, device=DEVICE, root=Path()).capabilities
    assert (
        not declared - {capability for one in cases for capability in one.requires} - {"dp"}
    )  # dp: every world above 1

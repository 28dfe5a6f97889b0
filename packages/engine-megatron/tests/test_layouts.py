"""What several ranks show beyond the conformance suite: options of this engine's own, and its globals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine_conformance.fixtures import TinyModel, write_checkpoint
from engine_conformance.ranks import RankPool

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def pool(_cuda: None) -> Iterator[RankPool]:
    with RankPool(2, deadline=280.0) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def one(_cuda: None) -> Iterator[RankPool]:
    with RankPool(1, deadline=280.0) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    return str(write_checkpoint(Path(path), TinyModel(vocab_size=251, tied=True)))


def test_options_and_layouts_do_not_change_an_update(pool: RankPool, one: RankPool, folder: str) -> None:
    ((want, exact),) = one.run("layout_ranks:steps", path=folder, parallelism={}, options={})
    for parallelism, options in [
        ({"tp": 2}, {}), ({"tp": 2}, {"sequence_parallel": True}), ({"tp": 2}, {"vocabulary_multiple": 32}),
        ({"pp": 2}, {}), ({"dp_shard": 2}, {}),
    ]:  # fmt: skip
        results = pool.run("layout_ranks:steps", path=folder, parallelism=parallelism, options=options)
        for figures, weights in results:
            about = f"{parallelism} {options}"
            torch.testing.assert_close(
                figures, want[: len(figures)], atol=1e-4, rtol=1e-4, msg=lambda m, a=about: f"{a}: {m}"
            )
            assert list(weights) == list(exact)
            for name, weight in weights.items():
                torch.testing.assert_close(
                    weight, exact[name], atol=2e-4, rtol=1e-3, msg=lambda m, a=about, n=name: f"{a} {n}: {m}"
                )


def test_a_loss_that_raises_on_the_last_stage_leaves_no_stage_waiting(
    pool: RankPool, one: RankPool, folder: str
) -> None:
    ((_, norm),) = one.run("layout_ranks:a_loss_that_raises", path=folder, parallelism={})
    results = pool.run("layout_ranks:a_loss_that_raises", path=folder, parallelism={"pp": 2})
    assert [raised for raised, _ in results] == ["RankFailure", "KeyError"]
    assert all(abs(got - norm) < 1e-3 * norm for _, got in results)


def test_two_layouts_at_once_are_refused(pool: RankPool, folder: str) -> None:
    for error, finite in pool.run("layout_ranks:another_layout_at_once", path=folder):
        assert "global variables" in error
        assert finite

"""Value models: each value and gradient beside engine-fsdp's, on each layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tested_ranks import Pools, open_pools
from value_checks import check_new_head, compare_values, write_value_model

from engine_torchtitan.families import FAMILIES

LAYOUTS: list[tuple[int, str, dict[str, int], dict[str, Any]]] = [
    (2, "qwen3", {"tp": 2}, {}),
    (2, "qwen3", {"tp": 2}, {"options": {"sequence_parallel": False}}),
    (2, "llama", {"cp": 2}, {"memory": {"recompute": "full"}}),
    (2, "qwen3", {"pp": 2}, {"memory": {"max_tokens": 24}}),
    (2, "qwen3_moe", {"ep": 2}, {}),
    (2, "gpt_oss", {"pp": 2}, {}),
    (2, "deepseek_v3", {"tp": 2, "ep": 2}, {}),
    (4, "qwen3", {"pp": 2, "tp": 2}, {}),
    (4, "qwen3", {"pp": 4}, {}),
    (4, "qwen3_moe", {"pp": 2, "ep": 2}, {}),
]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with open_pools() as opened:
        yield opened


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_familys_values_and_gradients_are_those_of_engine_fsdp(
    tmp_path: Path, pools: Pools, family: str
) -> None:
    path = write_value_model(tmp_path, family)
    compare_values((pools[1], pools[1]), path, "torchtitan", {})


def test_a_head_without_a_bias_is_read_and_trained(tmp_path: Path, pools: Pools) -> None:
    path = write_value_model(tmp_path, "qwen3", token_classification_bias=False)
    compare_values((pools[1], pools[1]), path, "torchtitan", {})


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "family", "layout", "config"), LAYOUTS)
def test_values_are_the_same_over_ranks(
    tmp_path: Path,
    pools: Pools,
    ranks: int,
    family: str,
    layout: dict[str, int],
    config: dict[str, Any],
) -> None:
    path = write_value_model(tmp_path, family, num_key_value_heads=4)
    compare_values((pools[1], pools[ranks]), path, "torchtitan", layout, **config)


def test_a_language_model_gets_a_head_that_transformers_reads(tmp_path: Path) -> None:
    check_new_head("torchtitan", tmp_path)

"""Value models: each value and gradient beside engine-fsdp's, and families that have none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tested_ranks import Pools, open_pools
from tiny_models import tiny_model
from value_checks import check_adapters, check_new_head, compare_values, write_value_model

from engine_api import EngineConfig, EngineRegistry, ModelSource
from engine_api.errors import ConfigError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss")
LAYOUTS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("qwen3", {"tp": 2}, {}),
    ("qwen3", {"cp": 2}, {"memory": {"recompute": "full"}}),
    ("qwen3_moe", {"ep": 2}, {}),
    ("qwen3_moe", {"tp": 2}, {}),
    ("gpt_oss", {"ep": 2}, {"memory": {"max_tokens": 24}}),
    ("deepseek_v3", {"cp": 2, "ep": 2}, {}),
]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with open_pools() as opened:
        yield opened


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_values_and_gradients_are_those_of_engine_fsdp(
    tmp_path: Path, pools: Pools, family: str
) -> None:
    path = write_value_model(tmp_path, family)
    compare_values((pools[1], pools[1]), path, "automodel", {})


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout", "config"), LAYOUTS)
def test_values_are_the_same_over_ranks(
    tmp_path: Path,
    pools: Pools,
    family: str,
    layout: dict[str, int],
    config: dict[str, Any],
) -> None:
    path = write_value_model(tmp_path, family, num_key_value_heads=4)
    compare_values((pools[1], pools[2]), path, "automodel", layout, **config)


def test_adapters_are_in_the_values_and_in_the_saved_folder(tmp_path: Path) -> None:
    check_adapters("automodel", tmp_path)


def test_a_language_model_gets_a_head_that_transformers_reads(tmp_path: Path) -> None:
    check_new_head("automodel", tmp_path)


def test_a_family_without_value_models_is_refused_by_name(tmp_path: Path) -> None:
    tiny_model("glm4_moe").save_pretrained(tmp_path)
    config = EngineConfig(model=ModelSource(path=str(tmp_path)))
    engine = EngineRegistry.create(
        backend="automodel", model_type="value_model", device="cpu", config=config
    )
    with pytest.raises(ConfigError, match="transformers has no value_model") as caught:
        engine.initialize()
    assert caught.value.field == "model.path"
    assert "another family" in caught.value.remedy

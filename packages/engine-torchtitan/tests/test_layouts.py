"""Engines of one process with different layouts live together, and compute the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from layout_peers import run_peers
from transformers import AutoConfig

from engine_api import EngineConfig, EngineRegistry, Memory, ModelSource, Parallelism
from engine_api.errors import ConfigError
from engine_conformance.fixtures import TinyModel, write_checkpoint
from engine_torchtitan.model import _refuse_indivisible

DENSE: dict[int, list[dict[str, int]]] = {
    2: [{}, {"tp": 2}, {"cp": 2}, {"dp_replicate": 2}, {"pp": 2}],
    4: [
        {},
        {"tp": 2, "cp": 2},
        {"tp": 2, "dp_replicate": 2},
        {"cp": 2, "dp_replicate": 2},
        {"pp": 2, "tp": 2},
    ],
}
EXPERTS: dict[int, list[dict[str, int]]] = {
    2: [{}, {"tp": 2}, {"ep": 2}, {"tp": 2, "ep": 2}, {"cp": 2, "ep": 2}],
    4: [
        {},
        {"tp": 2, "ep": 4},
        {"dp_replicate": 2, "ep": 2},
        {"tp": 2, "cp": 2, "ep": 2},
        {"ep": 2},
        {"pp": 2, "ep": 2},
    ],
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "layouts", "ranks"),
    [
        ("qwen3", DENSE, 2),
        ("qwen3_moe", EXPERTS, 4),
        pytest.param("qwen3", DENSE, 4, marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", EXPERTS, 2, marks=pytest.mark.nightly),
    ],
)
def test_layouts_beside_each_other_compute_the_same(
    tmp_path: Path, family: str, layouts: dict[int, list[dict[str, int]]], ranks: int
) -> None:
    model = TinyModel(family=family, tied=False, num_heads=8, num_kv_heads=4, num_experts=8)
    folder = write_checkpoint(tmp_path / "model", model)
    run_peers("torchtitan", folder, ranks, layouts[ranks])


@pytest.mark.distributed
@pytest.mark.nightly
@pytest.mark.slow
def test_compiled_blocks_compute_the_same_in_parts_of_a_pack_and_of_the_experts(
    tmp_path: Path,
) -> None:
    model = TinyModel(family="qwen3_moe", tied=False, num_heads=8, num_kv_heads=4, num_experts=8)
    folder = write_checkpoint(tmp_path / "model", model)
    run_peers(
        "torchtitan", folder, 2, [{}, {"cp": 2, "compile": 1}, {"ep": 2}, {"ep": 2, "compile": 1}]
    )


def test_compiled_blocks_under_tensor_parallelism_are_refused() -> None:
    config = EngineConfig(
        model=ModelSource(path="any"), memory=Memory(compile=True), parallelism=Parallelism(tp=2)
    )
    with pytest.raises(ConfigError, match=r"expected false with parallelism\.tp 2") as caught:
        EngineRegistry.create(backend="torchtitan", device="cpu", config=config)
    assert caught.value.field == "memory.compile"


def refused(folder: Path, sizes: dict[str, int]) -> ConfigError:
    """Return the refusal of sizes on one rank."""
    config = EngineConfig(model=ModelSource(path=str(folder)), parallelism=Parallelism(**sizes))
    engine = EngineRegistry.create(backend="torchtitan", device="cpu", config=config)
    with pytest.raises(ConfigError) as caught:
        engine.initialize()
    return caught.value


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"tp": 2}, {"cp": 3}, {"dp_replicate": 2}])
def test_sizes_that_do_not_make_the_world_are_refused(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    error = refused(write_checkpoint(tmp_path / "model", TinyModel(family="qwen3")), sizes)
    assert error.field == "parallelism"
    assert "does not make a world of 1" in error.what


def test_experts_on_more_ranks_than_share_the_weights_are_refused(tmp_path: Path) -> None:
    error = refused(write_checkpoint(tmp_path / "model", TinyModel(family="qwen3_moe")), {"ep": 2})
    assert error.field == "parallelism.ep"
    assert "expected a divisor of dp_shard x cp x tp = 1, got 2" in error.what


@pytest.mark.parametrize(
    ("family", "sizes", "tp", "ep", "named"),
    [
        ("qwen3", {"num_heads": 3, "num_kv_heads": 3}, 2, 1, "num_attention_heads 3"),
        ("qwen3", {"num_kv_heads": 1}, 2, 1, "num_key_value_heads 1"),
        ("qwen3", {"intermediate_size": 129}, 2, 1, "intermediate_size 129"),
        ("qwen3_moe", {"num_experts": 5}, 1, 2, "num_experts 5"),
        ("qwen3_moe", {"moe_intermediate_size": 33}, 2, 1, "moe_intermediate_size 33"),
        ("qwen3", {}, 1, 2, "model without experts"),
    ],
)
def test_sizes_of_a_model_that_a_layout_does_not_divide_are_refused_by_name(
    tmp_path: Path, family: str, sizes: dict[str, int], tp: int, ep: int, named: str
) -> None:
    folder = write_checkpoint(tmp_path / "model", TinyModel(family=family, **sizes))
    hf_config = AutoConfig.from_pretrained(folder)
    with pytest.raises(ConfigError) as caught:
        _refuse_indivisible(hf_config, tp, ep)
    assert named in caught.value.what
    assert caught.value.remedy

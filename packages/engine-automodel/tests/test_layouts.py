"""Engines of one process with different layouts live together, and compute the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiling import ignore_reads_of_compile
from layout_peers import run_peers
from tiny_models import tiny_config, tiny_model
from torch._dynamo.utils import counters
from transformers import AutoConfig

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    Memory,
    ModelSource,
    Parallelism,
    sft_loss,
)
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_automodel.model import _refuse_indivisible, _refuse_sinks, _refuse_windows
from engine_automodel.parallel import _refuse_experts
from engine_conformance.fixtures import TinyModel, write_checkpoint

DENSE: dict[int, list[dict[str, int]]] = {
    2: [{}, {"tp": 2}, {"cp": 2}, {"dp_replicate": 2}],
    4: [{}, {"tp": 2, "cp": 2}, {"tp": 2, "dp_replicate": 2}, {"cp": 2, "dp_replicate": 2}],
}
EXPERTS: dict[int, list[dict[str, int]]] = {
    2: [{}, {"tp": 2}, {"ep": 2}, {"cp": 2, "ep": 2}],
    4: [{}, {"ep": 4}, {"dp_replicate": 2, "ep": 2}, {"cp": 2, "ep": 4}, {"tp": 2}, {"ep": 2}],
}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("family", "layouts"), [("qwen3", DENSE), ("qwen3_moe", EXPERTS)])
def test_layouts_beside_each_other_compute_the_same(
    tmp_path: Path, family: str, layouts: dict[int, list[dict[str, int]]], ranks: int
) -> None:
    model = TinyModel(family=family, tied=False, num_heads=8, num_kv_heads=4, num_experts=8)
    folder = write_checkpoint(tmp_path / "model", model)
    run_peers("automodel", folder, ranks, layouts[ranks])


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_layouts_of_adapters_beside_experts_compute_the_same(tmp_path: Path, ranks: int) -> None:
    model = TinyModel(family="qwen3_moe", tied=False, num_heads=8, num_kv_heads=4, num_experts=8)
    folder = write_checkpoint(tmp_path / "model", model)
    run_peers("automodel", folder, ranks, [{**one, "lora": 4} for one in EXPERTS[ranks]])


@pytest.mark.slow
@pytest.mark.distributed
def test_compiled_blocks_of_each_layout_compute_the_same(tmp_path: Path) -> None:
    model = TinyModel(family="qwen3_moe", tied=False, num_heads=8, num_kv_heads=4, num_experts=8)
    folder = write_checkpoint(tmp_path / "model", model)
    layouts: list[dict[str, int]] = [{}, {"cp": 2}, {"ep": 2}]
    run_peers("automodel", folder, 2, [{}, *({**one, "compile": 1} for one in layouts)])
    run_peers("automodel", folder, 2, [{"lora": 4}, {"lora": 4, "compile": 1}])


@pytest.mark.slow
@ignore_reads_of_compile
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_blocks_with_experts_are_compiled(tmp_path: Path, recompute: Any) -> None:
    """Experts end a graph, which inside of a recomputed call would leave the block uncompiled."""
    write_checkpoint(tmp_path, TinyModel(family="qwen3_moe", num_layers=1))
    config = EngineConfig(
        model=ModelSource(path=str(tmp_path)), memory=Memory(recompute=recompute, compile=True)
    )
    engine: Any = EngineRegistry.create(backend="automodel", device="cpu", config=config)
    engine.initialize()
    torch._dynamo.reset()
    counters.clear()
    ids = list(range(5, 12))
    batch = Batch.pack([{"input_ids": ids, "loss_weight": [0.0] + [1.0] * (len(ids) - 1)}])
    engine.train_batch(batch, sft_loss)
    assert counters["stats"]["unique_graphs"] > 1
    assert engine.resolved()["memory.compile"] is True
    engine.close()


def test_compiled_blocks_under_tensor_parallelism_are_refused() -> None:
    config = EngineConfig(
        model=ModelSource(path="any"), memory=Memory(compile=True), parallelism=Parallelism(tp=2)
    )
    with pytest.raises(ConfigError, match=r"expected false with parallelism\.tp 2") as caught:
        EngineRegistry.create(backend="automodel", device="cpu", config=config)
    assert caught.value.field == "memory.compile"


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"tp": 2}, {"cp": 3}, {"dp_replicate": 2}])
def test_sizes_that_do_not_make_the_world_are_refused(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    folder = write_checkpoint(tmp_path / "model", TinyModel(family="qwen3"))
    config = EngineConfig(model=ModelSource(path=str(folder)), parallelism=Parallelism(**sizes))
    engine = EngineRegistry.create(backend="automodel", device="cpu", config=config)
    with pytest.raises(ConfigError, match="does not make a world of 1") as caught:
        engine.initialize()
    assert caught.value.field == "parallelism"


def test_a_window_is_refused_under_context_parallelism_alone() -> None:
    model = SimpleNamespace(layer_types=["full_attention", "sliding_attention"])
    _refuse_windows(model, 1)
    with pytest.raises(UnsupportedCapability, match="sliding_window") as caught:
        _refuse_windows(model, 2)
    assert caught.value.remedy == "set parallelism.cp: 1 for this model"


def test_sinks_are_refused_under_context_parallelism_alone() -> None:
    model = tiny_model("gpt_oss")
    _refuse_sinks(model, 1)
    with pytest.raises(UnsupportedCapability, match="sinks") as caught:
        _refuse_sinks(model, 2)
    assert caught.value.remedy == "set parallelism.cp: 1 for this model"


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "gpt_oss", "glm4_moe", "glm4_moe_lite", "minimax_m2"]
)
def test_tensor_parallelism_of_a_family_without_a_plan_is_refused(family: str) -> None:
    ranks: Any = SimpleNamespace(tp=2, ep=1)
    with pytest.raises(UnsupportedCapability, match="Automodel has no plan") as caught:
        _refuse_indivisible(tiny_config(family), ranks)
    assert "parallelism.ep" in caught.value.remedy


@pytest.mark.parametrize(
    ("ep", "ranks", "tp", "named"),
    [
        (2, 1, 1, "expected a divisor of dp_shard x cp = 1, got 2"),
        (3, 4, 1, "expected a divisor of dp_shard x cp = 4, got 3"),
        (2, 2, 2, "expected 1 with parallelism.tp 2, got 2"),
    ],
)
def test_ranks_that_cannot_share_experts_are_refused(
    ep: int, ranks: int, tp: int, named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _refuse_experts(ep, ranks, tp)
    assert caught.value.field == "parallelism.ep"
    assert caught.value.what == named


@pytest.mark.parametrize(
    ("family", "sizes", "layout", "named"),
    [
        ("qwen3", {"num_heads": 3, "num_kv_heads": 3}, {"tp": 2}, "num_attention_heads 3"),
        ("qwen3", {"num_kv_heads": 1}, {"tp": 2}, "num_key_value_heads 1"),
        ("qwen3", {"intermediate_size": 129}, {"tp": 2}, "intermediate_size 129"),
        ("qwen3_moe", {"num_experts": 5}, {"ep": 2}, "num_experts 5"),
        ("qwen3", {}, {"ep": 2}, "model without experts"),
    ],
)
def test_sizes_of_a_model_that_a_layout_does_not_divide_are_refused_by_name(
    tmp_path: Path, family: str, sizes: dict[str, int], layout: dict[str, int], named: str
) -> None:
    folder = write_checkpoint(tmp_path / "model", TinyModel(family=family, **sizes))
    ranks: Any = SimpleNamespace(**({"tp": 1, "ep": 1} | layout))
    with pytest.raises(ConfigError) as caught:
        _refuse_indivisible(AutoConfig.from_pretrained(folder), ranks)
    assert named in caught.value.what
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("deepseek_v3", "n_routed_experts"),
        ("gpt_oss", "num_local_experts"),
        ("glm4_moe", "n_routed_experts"),
        ("glm4_moe_lite", "n_routed_experts"),
        ("minimax_m2", "num_local_experts"),
    ],
)
def test_experts_that_ranks_do_not_divide_are_refused_by_the_familys_field(
    family: str, field: str
) -> None:
    ranks: Any = SimpleNamespace(tp=1, ep=2)
    with pytest.raises(ConfigError, match=f"{field} 5"):
        _refuse_indivisible(tiny_config(family, **{field: 5}), ranks)

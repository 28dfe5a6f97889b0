"""Adapters: those of engine-fsdp of the same weights, and the layers that can carry none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import documents, tiny_model
from torch import Tensor

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    LoraConfig,
    Memory,
    ModelSource,
    OptimizerConfig,
    sft_loss,
)
from engine_api.errors import ConfigError
from engine_automodel.library import FAMILIES

# Largest difference of weights and of nats, for float32 sums in two orders.
NEAR = 2e-5


def create(backend: str, folder: Path, lora: LoraConfig, **fields: Any) -> Any:
    config = EngineConfig(
        model=ModelSource(path=str(folder)),
        optimizer=OptimizerConfig(name="torch.optim.SGD", lr=0.1, clip_norm=None),
        lora=lora,
        **fields,
    )
    return EngineRegistry.create(backend=backend, device="cpu", config=config)


def make_batch() -> Batch:
    return Batch.pack(
        [
            {"input_ids": ids.tolist(), "loss_weight": [0.0] + [1.0] * (len(ids) - 1)}
            for ids in documents()
        ]
    )


def export(engine: Any, adapter: str) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in engine.get_per_tensor_param(adapter=adapter)}


def train(backend: str, folder: Path, lora: LoraConfig, **fields: Any) -> dict[str, Any]:
    """Return the exports and log-probs of an engine after three steps."""
    engine = create(backend, folder, lora, **fields)
    engine.initialize()
    for _ in range(3):
        engine.train_batch(make_batch(), sft_loss)
    found = {kind: export(engine, kind) for kind in ("only", "merged", "base")}
    found["outputs"] = {
        str(on): engine.infer_batch(make_batch(), adapter=on).log_probs for on in (True, False)
    }
    engine.close()
    return found


def assert_near(found: dict[str, Any], want: dict[str, Any]) -> None:
    for kind, tensors in want.items():
        assert set(found[kind]) == set(tensors), kind
        for name, tensor in tensors.items():
            apart = float((found[kind][name] - tensor).abs().max())
            assert apart < NEAR, (kind, name, apart)


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "o_proj")], ids=["all", "two"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_familys_adapters_train_and_merge_as_those_of_engine_fsdp(
    tmp_path: Path, family: str, targets: Any
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    lora = LoraConfig(rank=4, alpha=6.5, target_modules=targets)
    found, want = (train(backend, tmp_path, lora) for backend in ("automodel", "fsdp2"))
    assert_near(found, want)
    moved = [name for name, one in found["only"].items() if bool(one.any())]
    assert moved == list(found["only"])


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning:peft")
@pytest.mark.parametrize("backend", ["automodel", "fsdp2"])
def test_the_matrices_of_experts_carry_no_adapter(tmp_path: Path, backend: str) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    for targets in (("q_proj", "gate_proj"), ("q_proj", "gate_proj", "up_proj", "down_proj")):
        lora = LoraConfig(rank=4, target_modules=targets)
        with pytest.raises(ConfigError) as caught:
            create(backend, tmp_path, lora).initialize()
        assert caught.value.field == "lora.target_modules"


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recomputed_blocks_have_the_same_adapters(tmp_path: Path, dropout: float) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    lora = LoraConfig(rank=4, target_modules="all-linear", dropout=dropout)
    found, want = (
        train("automodel", tmp_path, lora, memory=Memory(recompute=recompute))
        for recompute in ("full", "none")
    )
    for kind in want:
        assert all(torch.equal(found[kind][name], one) for name, one in want[kind].items()), kind


def test_random_weights_below_an_adapter_are_those_without_one(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    found: list[dict[str, Tensor]] = []
    for lora in (LoraConfig(rank=4), None):
        config = EngineConfig(model=ModelSource(path=str(tmp_path), init="random"), lora=lora)
        engine = EngineRegistry.create(backend="automodel", device="cpu", config=config)
        engine.initialize()
        found.append({name: one.clone() for name, one in engine.get_per_tensor_param()})
        engine.close()
    assert list(found[0]) == list(found[1])
    assert all(torch.equal(found[0][name], one) for name, one in found[1].items())


@pytest.mark.parametrize("module", ["experts", "mlp.gate", "q_norm", "lm_head", "embed_tokens"])
def test_a_layer_that_can_carry_no_adapter_is_refused_by_name(tmp_path: Path, module: str) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    lora = LoraConfig(rank=4, target_modules=("q_proj", module))
    with pytest.raises(ConfigError, match=module.rpartition(".")[2]) as caught:
        create("automodel", tmp_path, lora).initialize()
    assert caught.value.field == "lora.target_modules"

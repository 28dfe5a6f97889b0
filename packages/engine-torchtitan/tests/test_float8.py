"""FP8 in the products of the blocks: what is refused by name, and which layers compute in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import engine_torch.float8
from engine_api import EngineConfig, EngineRegistry, ModelSource, Parallelism, Precision
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_conformance.fixtures import TinyModel, write_checkpoint
from engine_torch.float8_layers import refuse_divided
from engine_torchtitan import float8
from engine_torchtitan.library import Linear
from engine_torchtitan.tree import build_tree

LAYERS = {"attention.qkv_linear.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2"}


class RoundedLinear(Linear):
    """A stand-in for torchtitan's linear layer in FP8."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """The fields of torchtitan's own."""

        _torchao_config: object = None


@pytest.fixture
def with_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "_load", lambda recipe, emulate: (RoundedLinear, recipe))


def make_tree(tmp_path: Path, **sizes: Any) -> Any:
    folder = write_checkpoint(tmp_path / "model", TinyModel(**{"family": "qwen3"} | sizes))
    return build_tree(AutoConfig.from_pretrained(folder), "language_model")


def test_float8_under_tensor_parallelism_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_divided(Parallelism(tp=2))
    assert caught.value.field == "precision.compute"
    assert caught.value.what == "expected bfloat16 with parallelism.tp 2, got float8"


@pytest.mark.usefixtures("with_torchao")
def test_the_linear_layers_of_every_block_compute_in_float8_and_the_head_does_not(
    tmp_path: Path,
) -> None:
    tree = make_tree(tmp_path)
    float8.quantize_blocks(tree, "rowwise", emulate=False)
    for block in tree.layers:
        found = {name: one for name, one, _, _ in block.traverse(Linear.Config)}
        assert set(found) >= LAYERS
        assert {type(one) for one in found.values()} == {RoundedLinear.Config}
        assert {one._torchao_config for one in found.values()} == {"rowwise"}
    assert type(tree.lm_head) is Linear.Config


@pytest.mark.usefixtures("with_torchao")
def test_the_model_has_the_same_parameters_in_float8(tmp_path: Path) -> None:
    plain, tree = make_tree(tmp_path), make_tree(tmp_path)
    float8.quantize_blocks(tree, "rowwise", emulate=False)
    with torch.device("meta"):
        want = {name: one.shape for name, one in plain.build().named_parameters()}
        got = {name: one.shape for name, one in tree.build().named_parameters()}
    assert got == want


@pytest.mark.usefixtures("with_torchao")
def test_sides_that_float8_does_not_take_are_refused_by_layer(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, intermediate_size=120)
    with pytest.raises(ConfigError, match=r"layers\.0\.feed_forward\.w1 of \d+ x 120, got float8"):
        float8.quantize_blocks(tree, "rowwise", emulate=False)


@pytest.mark.usefixtures("with_torchao")
def test_a_model_with_experts_is_refused_in_float8(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, family="qwen3_moe")
    with pytest.raises(ConfigError, match="for a model with experts, got float8"):
        float8.quantize_blocks(tree, "rowwise", emulate=False)


def test_without_the_tested_torchao_float8_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_torch.float8, "find_torchao_problem", lambda: "not there")
    config = EngineConfig(model=ModelSource(path="any"), precision=Precision(compute="float8"))
    with pytest.raises(UnsupportedCapability, match=r"not there; torchao 0\.17\.0") as caught:
        EngineRegistry.create(backend="torchtitan", device="cpu", config=config)
    assert "engine-torchtitan[core,float8]" in caught.value.remedy

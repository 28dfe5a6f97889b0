"""FP8 in the products of the blocks: what is refused by name, and which layers compute in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engine_api import EngineConfig, ModelSource, Parallelism, Precision
from engine_api.errors import ConfigError
from engine_conformance.fixtures import TinyModel, write_checkpoint
from engine_torchtitan import float8
from engine_torchtitan.library import Linear
from engine_torchtitan.options import TorchTitanOptions
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
    return build_tree(AutoConfig.from_pretrained(folder))


def refuse(
    precision: Precision, device: str = "cuda", parallelism: Parallelism | None = None
) -> ConfigError:
    config = EngineConfig(
        model=ModelSource(path="any"),
        precision=precision,
        parallelism=parallelism or Parallelism(),
    )
    with pytest.raises(ConfigError) as caught:
        float8.check_float8(config, device)
    return caught.value


@pytest.mark.parametrize("name", ["master", "reduce"])
def test_float8_is_no_precision_of_weights_or_of_their_gradients(name: str) -> None:
    error = refuse(Precision(**{name: "float8"}))
    assert error.field == f"precision.{name}"
    assert error.what == "expected another dtype, got float8"


def test_float8_under_tensor_parallelism_is_refused() -> None:
    error = refuse(Precision(compute="float8"), parallelism=Parallelism(tp=2))
    assert error.what == "expected bfloat16 with parallelism.tp 2, got float8"


def test_a_device_without_products_of_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "(cpu)" in refuse(Precision(compute="float8"), "cpu").what
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "compute capability 8.9" in refuse(Precision(compute="float8")).why


def test_a_device_with_products_of_float8_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    config = EngineConfig(model=ModelSource(path="any"), precision=Precision(compute="float8"))
    float8.check_float8(config, "cuda")


@pytest.mark.usefixtures("with_torchao")
def test_the_linear_layers_of_every_block_compute_in_float8_and_the_head_does_not(
    tmp_path: Path,
) -> None:
    tree = make_tree(tmp_path)
    float8.quantize_blocks(tree, "rowwise")
    for block in tree.layers:
        found = {name: one for name, one, _, _ in block.traverse(Linear.Config)}
        assert set(found) >= LAYERS
        assert {type(one) for one in found.values()} == {RoundedLinear.Config}
        assert {one._torchao_config for one in found.values()} == {"rowwise"}
    assert type(tree.lm_head) is Linear.Config


@pytest.mark.usefixtures("with_torchao")
def test_the_model_has_the_same_parameters_in_float8(tmp_path: Path) -> None:
    plain, tree = make_tree(tmp_path), make_tree(tmp_path)
    float8.quantize_blocks(tree, "rowwise")
    with torch.device("meta"):
        want = {name: one.shape for name, one in plain.build().named_parameters()}
        got = {name: one.shape for name, one in tree.build().named_parameters()}
    assert got == want


@pytest.mark.usefixtures("with_torchao")
def test_sides_that_float8_does_not_take_are_refused_by_layer(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, intermediate_size=120)
    with pytest.raises(ConfigError, match=r"layers\.0\.feed_forward\.w1 of \d+ x 120, got float8"):
        float8.quantize_blocks(tree, "rowwise")


@pytest.mark.usefixtures("with_torchao")
def test_a_model_with_experts_is_refused_in_float8(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, family="qwen3_moe")
    with pytest.raises(ConfigError, match="for a model with experts, got float8"):
        float8.quantize_blocks(tree, "rowwise")


def test_without_the_tested_torchao_float8_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float8.importlib.metadata, "version", lambda name: "0.9.0")
    with pytest.raises(ConfigError, match=r"float8 needs torchao 0\.17\.0, got 0\.9\.0") as caught:
        float8.quantize_blocks(make_tree(tmp_path), "rowwise")
    assert "engine-torchtitan[core,float8]" in caught.value.remedy


@pytest.mark.parametrize(("multiple", "rounded"), [(1, 16), (16, 16), (24, 48), (128, 128)])
def test_a_ranks_tokens_are_padded_to_what_float8_takes(multiple: int, rounded: int) -> None:
    assert float8.round_up(multiple) == rounded


class Compiled(torch.nn.Module):
    """A block that keeps the arguments of its compilation."""

    def compile(self, **given: Any) -> None:
        """Keep the arguments."""
        self.given = given


@pytest.mark.parametrize(
    ("recipe", "options"),
    [("rowwise", {"emulate_precision_casts": True}), ("tensorwise", {})],
)
def test_scales_by_row_are_compiled_with_their_rounding(
    recipe: str, options: dict[str, bool]
) -> None:
    block = Compiled()
    float8.compile_blocks([block], recipe)
    assert block.given == {"options": options}


def test_an_unknown_recipe_is_refused_with_the_near_ones() -> None:
    with pytest.raises(ConfigError, match="got 'rowise'") as caught:
        TorchTitanOptions(float8_recipe="rowise")
    assert "rowwise" in caught.value.remedy

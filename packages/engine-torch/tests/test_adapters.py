"""Layers that ``all-linear`` adapts."""

from __future__ import annotations

import pytest
from tiny_models import tiny_model

from engine_api.config import LoraConfig
from engine_api.errors import ConfigError
from engine_torch import lora

ALL = LoraConfig(rank=2, target_modules="all-linear")


@pytest.mark.slow
def test_the_linear_layers_of_a_mixture_are_adapted_and_its_experts_are_not() -> None:
    model = tiny_model("qwen3_moe")
    lora.inject(model, ALL)
    adapted = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}
    layers = {name.rpartition(".")[2] for name in adapted}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("family", ["mamba2", "falcon_h1"])
def test_layers_whose_weight_a_kernel_takes_are_refused(family: str) -> None:
    """A kernel of Mamba takes ``out_proj.weight``, so that its adapter would not train."""
    with pytest.raises(ConfigError, match="out_proj"):
        lora.inject(tiny_model(family), ALL)

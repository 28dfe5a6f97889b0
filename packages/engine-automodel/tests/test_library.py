"""The import of Automodel and the making of its models leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch
from tiny_models import tiny_model

from engine_automodel import library
from engine_automodel.modules import Experts, adapt
from engine_torch import attention

IMPORT = """
import logging, os, sys, warnings
import torch, transformers

environment = dict(os.environ)
filters = list(warnings.filters)
handlers = list(logging.getLogger().handlers)
level = logging.getLogger().level

import engine_automodel.engine

assert dict(os.environ) == environment
assert warnings.filters == filters
assert logging.getLogger().handlers == handlers
assert logging.getLogger().level == level
assert not torch.distributed.is_initialized()
assert "nemo_automodel.recipes" not in sys.modules
assert "nemo_automodel.components.checkpoint.checkpointing" not in sys.modules
"""
# Packages that Automodel asks for, or imports where they are, and that this engine does not need.
UNUSED = ("datasets", "flashoptim", "megatron_fsdp", "quack", "torchao", "torchdata", "wandb")
WITHOUT = f"""
import sys
sys.modules |= dict.fromkeys({UNUSED!r})
{IMPORT}
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [IMPORT, WITHOUT], ids=["alone", "without what it does not need"])
def test_its_import_prints_nothing_and_changes_nothing_else(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize("family", sorted(library.FAMILIES))
def test_a_model_is_made_without_a_word_and_its_configuration_stays(
    capsys: pytest.CaptureFixture[str], family: str
) -> None:
    attention.register()
    config = tiny_model(family).config
    before = config.to_dict()
    asked = torch.cuda.current_device
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm = library.make_decoder(
            config, attention=attention.NAME, dtype=torch.float32, experts="loop"
        )
    assert {parameter.dtype for parameter in lm.parameters()} == {torch.float32}
    assert capsys.readouterr() == ("", "")
    assert config.to_dict() == before
    assert torch.cuda.current_device is asked


def test_the_router_of_a_model_adds_no_loss_of_its_own() -> None:
    config = tiny_model("qwen3_moe", router_aux_loss_coef=0.5).config
    lm = library.make_decoder(config, attention=attention.NAME, dtype=torch.float32, experts="loop")
    gates = [module for name, module in lm.named_modules() if name.endswith("mlp.gate")]
    assert gates
    assert {gate.aux_loss_coeff for gate in gates} == {0.0}


@pytest.mark.parametrize("experts", ["loop", "grouped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_another_order_of_dimensions_are_automodels(
    dtype: torch.dtype, experts: str
) -> None:
    config = tiny_model("qwen3_moe").config
    theirs, ours = (
        library.make_decoder(config, attention=attention.NAME, dtype=dtype, experts=experts)
        for _ in range(2)
    )
    adapt(ours, tiny_model("qwen3_moe"), "cpu")
    (first, *_) = [m for m in theirs.modules() if isinstance(m, library.GroupedExperts)]
    (second, *_) = [m for m in ours.modules() if isinstance(m, Experts)]
    # Automodel's own activation is compiled.
    first.expert_activation_grouped = second.expert_activation_grouped
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for one in first.parameters():
            one.copy_(torch.randn(one.shape, generator=generator))
        second.gate_up_proj.copy_(first.gate_and_up_projs.transpose(1, 2))
        second.down_proj.copy_(first.down_projs.transpose(1, 2))
    tokens = torch.randn(7, config.hidden_size, generator=generator).to(dtype)
    weights = torch.rand(7, 2, generator=generator).to(dtype)
    chosen = torch.tensor([[0, 3]] * 4 + [[2, 3]] * 3)
    mask = torch.ones(7, dtype=torch.bool)
    with torch.no_grad():
        want = first(tokens, mask, weights, chosen)
        apart = (second(tokens, mask, weights, chosen) - want).abs().max()
    # A product with a transposed matrix adds in another order.
    assert float(apart) <= 8 * torch.finfo(dtype).eps * float(want.abs().max())


def test_the_router_of_a_model_counts_no_tokens_for_its_bias() -> None:
    for family in ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2"):
        lm = library.make_decoder(
            tiny_model(family).config,
            attention=attention.NAME,
            dtype=torch.bfloat16,
            experts="loop",
        )
        gates = [module for name, module in lm.named_modules() if name.endswith("mlp.gate")]
        assert gates
        assert {gate.bias_update_factor for gate in gates} == {0.0}
        assert {gate.e_score_correction_bias.dtype for gate in gates} == {torch.float32}


def test_every_family_that_is_said_to_have_a_plan_of_tensor_parallelism_has_one() -> None:
    for family in filter(library.has_plan, library.FAMILIES):
        lm = library.make_decoder(
            tiny_model(family).config,
            attention=attention.NAME,
            dtype=torch.float32,
            experts="loop",
        )
        plan = library.find_plan(lm)
        assert {"lm_head", "model.embed_tokens", "model.layers.*.self_attn.o_proj"} <= set(plan)

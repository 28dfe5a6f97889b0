"""Automodel as a library of models and plans of parallelism: its import, its names, its models.

Only this module imports Automodel. Its recipes, checkpoints and data are never imported, nor is
anything called that sets up process groups or patches another library.
"""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from torch import nn

# The package adds a filter of pydantic's warnings for the whole process.
with warnings.catch_warnings():
    from nemo_automodel.components.distributed.optimized_tp_plans import PARALLELIZE_FUNCTIONS
    from nemo_automodel.components.distributed.tp_replicas import synchronize_tp_replica_gradients
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v3.layers import MLA
    from nemo_automodel.components.models.deepseek_v3.model import DeepseekV3ForCausalLM
    from nemo_automodel.components.models.deepseek_v3.rope_utils import (
        apply_rotary_emb_qk as rotate_pairs,
    )
    from nemo_automodel.components.models.glm4_moe.layers import Glm4MoeAttention
    from nemo_automodel.components.models.glm4_moe.model import Glm4MoeForCausalLM
    from nemo_automodel.components.models.glm4_moe_lite.model import Glm4MoeLiteForCausalLM
    from nemo_automodel.components.models.gpt_oss.layers import GptOssAttention
    from nemo_automodel.components.models.gpt_oss.model import GptOssForCausalLM
    from nemo_automodel.components.models.gpt_oss.rope_utils import apply_rotary_emb_qk
    from nemo_automodel.components.models.llama.model import LlamaForCausalLM
    from nemo_automodel.components.models.minimax_m2.layers import MiniMaxM2Attention
    from nemo_automodel.components.models.minimax_m2.model import MiniMaxM2ForCausalLM
    from nemo_automodel.components.models.qwen2.model import Qwen2ForCausalLM
    from nemo_automodel.components.models.qwen3.model import Qwen3ForCausalLM
    from nemo_automodel.components.models.qwen3_moe.layers import Qwen3MoeAttention
    from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM
    from nemo_automodel.components.moe.experts import GroupedExperts
    from nemo_automodel.components.moe.parallelizer import apply_ep

__all__ = [
    "FAMILIES",
    "MLA",
    "Glm4MoeAttention",
    "GptOssAttention",
    "GroupedExperts",
    "MiniMaxM2Attention",
    "Qwen3MoeAttention",
    "apply_ep",
    "apply_rotary_emb_qk",
    "find_plan",
    "has_experts",
    "has_plan",
    "make_decoder",
    "rotate_pairs",
    "synchronize_tp_replica_gradients",
]

log = logging.getLogger("engine_automodel")

FAMILIES: Mapping[str, Any] = {
    "llama": LlamaForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
    "deepseek_v3": DeepseekV3ForCausalLM,
    "gpt_oss": GptOssForCausalLM,
    "glm4_moe": Glm4MoeForCausalLM,
    "glm4_moe_lite": Glm4MoeLiteForCausalLM,
    "minimax_m2": MiniMaxM2ForCausalLM,
}
"""Automodel's classes that the engine builds, by ``model_type`` in ``config.json``."""

_DENSE = ("llama", "qwen2", "qwen3")
# Automodel would count tokens by expert for an update of the router's bias, and would let a
# selection of groups choose experts of other groups where scores with their bias are negative.
_SAVED_BIAS: Mapping[str, Any] = {
    "gate_bias_update_factor": 0.0,
    "force_e_score_correction_bias": True,
    "score_func": "sigmoid_with_bias",
}
_ROUTERS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": _SAVED_BIAS,
    "glm4_moe": _SAVED_BIAS,
    "glm4_moe_lite": _SAVED_BIAS,
    # The router's weights have the dtype of the others, as FSDP asks for.
    "minimax_m2": {**_SAVED_BIAS, "gate_dtype": None},
}


def has_experts(model_type: str) -> bool:
    """Return whether Automodel's class of a family is one of experts.

    These take no attention function of transformers, and are no ``PreTrainedModel``.
    """
    return model_type not in _DENSE


def has_plan(model_type: str) -> bool:
    """Return whether ``find_plan`` has a plan of tensor parallelism for a family."""
    return model_type in (*_DENSE, "qwen3_moe")


def make_decoder(hf_config: Any, *, attention: str, dtype: torch.dtype, experts: str) -> Any:
    """Make Automodel's model of a configuration, on torch's default device.

    Args:
        hf_config: transformers' configuration of a family in ``FAMILIES``, which is left unchanged.
        attention: name of the attention in transformers' ``AttentionInterface``.
        dtype: dtype of the parameters.
        experts: way to compute experts, ``loop`` or ``grouped`` (``AutomodelOptions.experts``).
    """
    config = copy.deepcopy(hf_config)
    config.dtype = dtype
    config._attn_implementation = attention  # noqa: SLF001 - transformers has no public name
    # Automodel's router adds the gradient of this loss to that of every loss.
    config.router_aux_loss_coef = 0.0
    routers = _ROUTERS.get(config.model_type)
    given: dict[str, Any] = {} if routers is None else {"moe_overrides": dict(routers)}
    if hasattr(config, "qk_nope_head_dim"):
        # transformers' classes add these widths, whatever a field of this name says.
        config.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    if config.model_type == "minimax_m2":
        # transformers' class always has these norms, and its configuration has no such field.
        config.use_qk_norm = True
    printed = io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(printed), _without_cuda():
        # It announces the end of its dense classes, which the tested version still has.
        warnings.simplefilter("ignore", FutureWarning)
        backend = _choose_backend(experts, config.model_type)
        lm = FAMILIES[config.model_type](config, backend=backend, **given)
    for line in printed.getvalue().splitlines():
        log.debug("Automodel printed: %s", line)
    return lm


def _choose_backend(experts: str, model_type: str) -> BackendConfig:
    """Return Automodel's choice of kernels for the parts of a model: those of plain PyTorch.

    Its defaults depend on the packages that are installed.
    """
    ways: dict[str, Any] = {"loop": "torch", "grouped": "torch_mm"}
    return BackendConfig(
        # The attention of experts is replaced, and that of gpt_oss can be made in this way alone.
        attn="flex" if model_type == "gpt_oss" else "sdpa",
        linear="torch",
        # Automodel's own norm is compiled, which takes a compiler on a CPU.
        rms_norm="torch",
        rope="torch",
        rope_fusion=False,
        experts=ways[experts],
        dispatcher="torch",
        enable_hf_state_dict_adapter=False,
    )


@contextmanager
def _without_cuda() -> Iterator[None]:
    """Let Automodel ask for the number of the current GPU inside the block where there is none.

    Its mixtures of experts do so for the device of their rotary positions, which are replaced.
    """
    if torch.cuda.is_available():
        yield
        return
    asked = torch.cuda.current_device
    torch.cuda.current_device = lambda: 0
    try:
        yield
    finally:
        torch.cuda.current_device = asked


def find_plan(lm: nn.Module) -> dict[str, Any]:
    """Return Automodel's plan of tensor parallelism for a model, by the names of modules.

    It has none for a mixture of experts. Attention and dense layers of Qwen3-MoE are then divided
    as those of the dense family, and each rank has all experts.
    """
    cls: Any = Qwen3ForCausalLM if isinstance(lm, Qwen3MoeForCausalLM) else type(lm)
    return PARALLELIZE_FUNCTIONS[f"{cls.__module__}.{cls.__qualname__}"](lm, False)

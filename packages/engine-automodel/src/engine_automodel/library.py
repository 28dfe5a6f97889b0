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
    from nemo_automodel.components.models.gpt_oss.rope_utils import apply_rotary_emb_qk
    from nemo_automodel.components.models.llama.model import LlamaForCausalLM
    from nemo_automodel.components.models.qwen2.model import Qwen2ForCausalLM
    from nemo_automodel.components.models.qwen3.model import Qwen3ForCausalLM
    from nemo_automodel.components.models.qwen3_moe.layers import Qwen3MoeAttention
    from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM
    from nemo_automodel.components.moe.experts import GroupedExperts
    from nemo_automodel.components.moe.parallelizer import apply_ep

__all__ = [
    "FAMILIES",
    "GroupedExperts",
    "Qwen3MoeAttention",
    "apply_ep",
    "apply_rotary_emb_qk",
    "find_plan",
    "has_experts",
    "make_decoder",
    "synchronize_tp_replica_gradients",
]

log = logging.getLogger("engine_automodel")

FAMILIES: Mapping[str, Any] = {
    "llama": LlamaForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
}
"""Automodel's classes that the engine builds, by ``model_type`` in ``config.json``."""


def has_experts(model_type: str) -> bool:
    """Return whether Automodel's class of a family is one of experts.

    These take no attention function of transformers, and are no ``PreTrainedModel``.
    """
    return FAMILIES[model_type] is Qwen3MoeForCausalLM


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
    printed = io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(printed), _without_cuda():
        # It announces the end of its dense classes, which the tested version still has.
        warnings.simplefilter("ignore", FutureWarning)
        lm = FAMILIES[config.model_type](config, backend=_choose_backend(experts))
    for line in printed.getvalue().splitlines():
        log.debug("Automodel printed: %s", line)
    return lm


def _choose_backend(experts: str) -> BackendConfig:
    """Return Automodel's choice of kernels for the parts of a model: those of plain PyTorch.

    Its defaults depend on the packages that are installed.
    """
    ways: dict[str, Any] = {"loop": "torch", "grouped": "torch_mm"}
    return BackendConfig(
        attn="sdpa",
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

    It has none for a mixture of experts. Attention and dense layers are then divided as those of
    the dense family, and each rank has all experts.
    """
    cls: Any = Qwen3ForCausalLM if isinstance(lm, Qwen3MoeForCausalLM) else type(lm)
    return PARALLELIZE_FUNCTIONS[f"{cls.__module__}.{cls.__qualname__}"](lm, False)

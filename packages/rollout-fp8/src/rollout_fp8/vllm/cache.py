"""Cache of keys and values: its size, and the refusals of one in FP8."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from engine_api.config import ModelSource
from engine_api.errors import ConfigError, RolloutError
from rollout_fp8.kernels.capability import require_fp8
from rollout_fp8.model import config_of

# Tokens; vLLM's blocks are of this size or divide it.
BLOCK = 128
WHERE = "rollout 'vllm'"
# Backends of attention that read scales from the layer's buffers, or from the host at each call.
# FlashInfer keeps products of them from its first call on, and in CUDA graphs (0.26.0). Triton's
# kernel reads the scale of queries, too (0.26.0 and 0.32.0). Older versions, which are not in the
# table of tested ones, assert that it is 1, and fail.
_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
# Flags of x86 CPUs with kernels for it.
_FLAGS = ("amx_tile", "avx512f")
_OFF = "rollout.options.kv_cache_dtype=auto"


def check_device(device: torch.device) -> None:
    """Raise ``RolloutError`` for a device without an FP8 cache."""
    require_fp8(
        device,
        "this device has no FP8 cache",
        kernels="kernels of e4m3",
        where=WHERE,
        remedy=_OFF,
        flags=_FLAGS,
        cpu="vLLM's attention with an FP8 cache needs AVX-512 or AMX on a CPU",
    )


def check_model(config: Any, *, has_vision: bool) -> None:
    """Raise ``ConfigError`` for a model that cannot have an FP8 cache with scales of its own.

    ``config`` is vLLM's ``ModelConfig``.
    """
    reasons = {
        "it has no attention, and so no keys and values": config.is_attention_free,
        "latent attention caches no keys and values": config.use_mla,
        "its states of linear attention stay in the rollout's dtype, and no run has compared its "
        "attention with an FP8 cache": config.is_hybrid or config.has_inner_state,
        "no run has compared an FP8 cache of models that vLLM has no class of its own for": (
            config.using_transformers_backend()
        ),
        "scales are computed from tokens of text, and no run has compared those of images": (
            has_vision
        ),
    }
    for why, refused in reasons.items():
        if refused:
            raise ConfigError(
                "rollout.options.kv_cache_dtype",
                f"expected auto for {', '.join(config.architectures)}, got fp8",
                why=why,
                remedy=_OFF,
            )


def refusals(layers: Mapping[str, Any]) -> list[str]:
    """Return the reasons why the scales of layers of vLLM's cannot be set."""
    if not layers:
        return ["the model has no layer with a cache of keys and values"]
    found: list[str] = []
    for name, layer in layers.items():
        backend = layer.attn_backend.get_name()
        if backend not in _BACKENDS:
            found.append(
                f"{name} is computed by {backend}, which may keep old scales; known are "
                f"{', '.join(_BACKENDS)}"
            )
        elif layer.kv_sharing_target_layer_name is not None:
            found.append(f"{name} reads the cache of {layer.kv_sharing_target_layer_name}")
    return found


def require_served(found: list[str]) -> None:
    """Raise ``RolloutError`` for the first of the workers' ``refusals``."""
    if found:
        raise RolloutError(
            "the scales of the FP8 cache cannot be set", where=WHERE, why=found[0], remedy=_OFF
        )


def bytes_for(
    source: ModelSource, sequences: int, *, positions: int | None, dtype: str, parallel: int
) -> int:
    """Return the bytes on each GPU for ``sequences`` of ``positions`` tokens at once.

    ``positions`` None: those of the model's context.

    A token has a key and a value in every layer, of ``num_key_value_heads × head_dim`` numbers,
    divided over ``parallel`` GPUs.

    Raises:
        ConfigError: the model has latent attention, whose cache holds no keys and values.
    """
    config = config_of(source).get_text_config()
    if getattr(config, "kv_lora_rank", None):
        raise ConfigError(
            "rollout.options.kv_cache_for_batch",
            "true, for a model with latent attention",
            why="its cache holds no keys and values",
            remedy="give rollout.options.kv_cache_bytes, or neither",
        )
    heads = config.num_attention_heads
    own_heads = math.ceil((getattr(config, "num_key_value_heads", None) or heads) / parallel)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    token = 2 * config.num_hidden_layers * own_heads * size * getattr(torch, dtype).itemsize
    # vLLM keeps one block empty.
    blocks = sequences * math.ceil((positions or config.max_position_embeddings) / BLOCK) + 1
    return blocks * BLOCK * token

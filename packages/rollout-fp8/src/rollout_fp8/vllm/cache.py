"""Size of a cache of keys and values."""

from __future__ import annotations

import math

import torch

from engine_api.config import ModelSource
from engine_api.errors import ConfigError
from rollout_fp8.model import config_of

# Tokens; vLLM's blocks are of this size or divide it.
BLOCK = 128


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

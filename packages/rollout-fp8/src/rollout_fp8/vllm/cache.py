"""How large a cache of keys and values has to be."""

from __future__ import annotations

import math

import torch

from engine_api.config import ModelSource
from engine_api.errors import ConfigError
from rollout_fp8.model import config_of

BLOCK = 128  # tokens; vLLM's blocks are of this size or divide it


def bytes_for(
    source: ModelSource, sequences: int, *, positions: int | None, dtype: str, parallel: int
) -> int:
    """Bytes on each GPU for so many ``sequences`` of ``positions`` tokens (None: of the model's context) at once.

    A token has a key and a value in every layer, of ``num_key_value_heads × head_dim`` numbers,
    divided over ``parallel`` GPUs.

    Raises ``ConfigError`` for latent attention, whose cache holds something else.
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
    blocks = (
        sequences * math.ceil((positions or config.max_position_embeddings) / BLOCK) + 1
    )  # vLLM keeps one empty
    return blocks * BLOCK * token

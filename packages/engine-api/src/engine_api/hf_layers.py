"""Kinds of layers in a transformers model, as its ``config.json`` names them.

The keys are those of all families together; transformers is not imported.
"""

from __future__ import annotations

from typing import Any

__all__ = ["EXPERT_KEYS", "carries_state", "count_experts", "has_experts"]

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of a model's configuration with the number of its experts, of which a family has one."""

# Kinds of layers, and the beginnings of keys, of models whose layers carry a state.
_STATE_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "mamba2"}
_STATE_KEYS = ("mamba_", "ssm_", "conv_", "linear_", "lru_", "time_step_")


def count_experts(text: Any) -> int:
    """Return the number of experts in a layer, and 0 for a dense model.

    Args:
        text: transformers' configuration of the language model. DBRX has the number in a part of
            it, ``ffn_config``.
    """
    parts = (text, getattr(text, "ffn_config", None))
    counts = (getattr(part, key, None) for part in parts for key in EXPERT_KEYS)
    return next((count for count in counts if isinstance(count, int) and count), 0)


def has_experts(text: Any) -> bool:
    """Return whether a text configuration is that of a mixture of experts."""
    return count_experts(text) > 1


def carries_state(text: Any) -> bool:
    """Return whether a text configuration has layers that carry a state from token to token."""
    kinds = {str(kind) for kind in getattr(text, "layer_types", None) or ()}
    return bool(kinds & _STATE_LAYERS) or any(key.startswith(_STATE_KEYS) for key in text.to_dict())

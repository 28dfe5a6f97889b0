"""Decoding attention without repeated keys and values.

It is registered through transformers' ``AttentionInterface``. With a padding mask transformers' own
sdpa copies the keys and values of all past tokens once for each query head of a group, for each new
token. A single new token needs no causal mask, so that the query heads of a group can be given as
query positions instead: the numbers are the same, and nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from engine_api.errors import RolloutError

NAME = "engine_trainer_decode"

# Arguments that some families pass to their attention, and that this one does not compute.
_UNSERVED = ("s_aux", "softcap", "position_bias")


def decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention in transformers' calling convention.

    Args:
        query: ``[rows, heads, new, head_dim]``; key, value: ``[rows, kv_heads, past + new,
            head_dim]``.
        attention_mask: ``[rows, 1, new, past + new]`` bool, or None.

    Returns:
        ``[rows, new, heads, head_dim]``, and None for the attention weights.

    Raises ``RolloutError`` for a model family whose attention has more terms (sinks, soft caps,
    biases).
    """
    extra = [name for name in _UNSERVED if kwargs.get(name) is not None]
    if extra:
        raise RolloutError(
            f"the model's attention uses {', '.join(extra)}",
            where="rollout 'local'",
            remedy="use another rollout for this model family",
        )
    # With indexed attention each new token sees these positions alone.
    chosen = kwargs.pop("indices", None)
    if chosen is not None:
        seen = torch.zeros(*chosen.shape[:2], key.shape[2], dtype=torch.bool, device=key.device)
        seen = seen.scatter(-1, chosen.long(), True)[:, None]
        # Where fewer than it selects are there, it selects later ones too, which stay hidden.
        seen &= torch.ones(seen.shape[2:], dtype=torch.bool, device=key.device).tril(
            key.shape[2] - query.shape[2]
        )
        attention_mask = seen if attention_mask is None else attention_mask & seen
    rows, heads, new, size = query.shape
    if new > 1 or heads == key.shape[1]:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    grouped = query.reshape(rows, key.shape[1], -1, size)
    out = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return out.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(NAME, decode_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)

"""CANN's fused attention over packed documents, as a kernel of engine-torch's attention function.

``torch_npu.npu_fusion_attention`` in the layout TND ([tokens, heads, width]) takes the ends of the
documents, and no token attends to another document. It supports grouped heads, and has a gradient.
The source is its documentation in torch_npu/_op_plugin_docs.py.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from engine_npu.device import FUSED, load
from engine_torch.attention import Packing, register_kernel

__all__ = ["fused_attention", "register"]

# Values of sparse_mode: the causal triangle at the lower right corner, and a band of it.
_CAUSAL = 3
_BAND = 4

# Side of the mask that both modes need, for documents of any length.
_MASK = 2048

# Largest number of documents in one call.
_DOCUMENTS = 1024


@cache
def _mask(device: torch.device) -> Tensor:
    """Return the mask, which is true (masked) above the diagonal."""
    return torch.ones(_MASK, _MASK, dtype=torch.bool, device=device).triu(1)


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Compute causal attention inside each document, by CANN's fused operator.

    Args:
        query: ``[1, H, T, d]``.
        key: ``[1, KV, T, d]``, where KV divides H.
        value: ``[1, KV, T, d]``.
        packing: the documents.
        scale: factor of the scores (None: ``d ** -0.5``).
        window: number of tokens that a token attends to, itself included (None: no window).

    Returns:
        ``[1, H, T, d]``.
    """
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    # The bounds are on the CPU, so this does not wait for the device.
    ends: list[int] = packing.bounds.tolist()
    parts: list[Tensor] = []
    for first in range(0, len(ends) - 1, _DOCUMENTS):
        bounds = ends[first : first + _DOCUMENTS + 1]
        tokens = slice(bounds[0], bounds[-1])
        own_ends = [end - bounds[0] for end in bounds[1:]]
        parts.append(_call_fused(q[tokens], k[tokens], v[tokens], own_ends, scale, window))
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]
    return whole.transpose(0, 1)[None]


def _call_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: list[int],
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Call the fused operator on ``[T, H, d]`` queries of at most ``_DOCUMENTS`` documents."""
    torch_npu = load()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if window is None:
        out = torch_npu.npu_fusion_attention(
            query,
            key,
            value,
            query.shape[1],
            "TND",
            atten_mask=_mask(query.device),
            scale=scale,
            actual_seq_qlen=ends,
            actual_seq_kvlen=ends,
            sparse_mode=_CAUSAL,
        )
    else:
        # A token attends to itself and to the window - 1 tokens before it.
        out = torch_npu.npu_fusion_attention(
            query,
            key,
            value,
            query.shape[1],
            "TND",
            atten_mask=_mask(query.device),
            scale=scale,
            pre_tockens=window - 1,
            next_tockens=0,
            actual_seq_qlen=ends,
            actual_seq_kvlen=ends,
            sparse_mode=_BAND,
        )
    result: Tensor = out[0]
    return result


def register() -> None:
    """Register the kernel under its name in ``model.attention``."""
    register_kernel(FUSED, fused_attention)

"""Packed documents on CANN's fused attention, as a kernel of engine-fsdp's ``AttentionInterface`` function.

``torch_npu.npu_fusion_attention`` in the layout TND ([tokens, heads, width]) takes the ends of the documents, and no token
meets another document's. It has grouped heads, and a gradient of its own. (Documentation: torch_npu/_op_plugin_docs.py.)
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from engine_fsdp.attention import Packing, register_kernel
from engine_npu.device import FUSED, load

__all__ = ["fused_attention", "register"]

_CAUSAL, _BAND = 3, 4  # sparse_mode: the causal triangle at the lower right corner; a band of it
_MASK = 2048  # side of the mask that both want, whatever the lengths
_DOCUMENTS = 1024  # of one call, at most


@cache
def _mask(device: torch.device) -> Tensor:
    """True is masked: above the diagonal."""
    return torch.ones(_MASK, _MASK, dtype=torch.bool, device=device).triu(1)


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """``[1, H, T, d]``; key, value ``[1, KV, T, d]``, KV dividing H → ``[1, H, T, d]``, causal inside each document."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    ends: list[int] = packing.bounds.tolist()  # on the CPU: the device is not waited for
    parts: list[Tensor] = []
    for first in range(0, len(ends) - 1, _DOCUMENTS):
        bounds = ends[first : first + _DOCUMENTS + 1]
        tokens = slice(bounds[0], bounds[-1])
        parts.append(
            _call(
                q[tokens],
                k[tokens],
                v[tokens],
                [end - bounds[0] for end in bounds[1:]],
                scale,
                window,
            )
        )
    return (
        torch.cat(parts).transpose(0, 1)[None] if len(parts) > 1 else parts[0].transpose(0, 1)[None]
    )


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: list[int],
    scale: float | None,
    window: int | None,
) -> Tensor:
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
    else:  # a token and the window - 1 before it
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
    """Let ``model.attention`` name the kernel."""
    register_kernel(FUSED, fused_attention)

"""Attention of every mechanism in float64, one document at a time, and random inputs for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    *,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention ``[1, H, T, e]``, with a column in the softmax for each head's sink."""
    groups = q.shape[1] // k.shape[1]
    out: list[Tensor] = []
    for query, key, value in zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True):
        scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2)
        scores = scores / math.sqrt(q.shape[-1])
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        position = torch.arange(query.shape[2], device=q.device)
        distance = position[:, None] - position[None, :]
        hidden = (distance < 0) | (distance >= (window or query.shape[2]))
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            column = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = scores.softmax(-1)[..., : query.shape[2]]
        out.append(weights @ value.repeat_interleave(groups, 1))
    return torch.cat(out, dim=2)


def random_inputs(
    tokens: int,
    *,
    heads: int,
    kv_heads: int,
    width: int,
    value_width: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> list[Tensor]:
    """Return queries, keys and values that want gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (1, heads, tokens, width),
        (1, kv_heads, tokens, width),
        (1, kv_heads, tokens, value_width),
    ]
    return [
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in shapes
    ]


def random_sinks(heads: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Return a score for each head, as large as those of some tokens."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(heads, generator=generator).to(device, dtype).requires_grad_()

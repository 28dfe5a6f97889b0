"""Packed causal attention in plain PyTorch, with caps of scores and attention sinks.

It serves what the fused kernels leave out, on every device and in every dtype: scores that are
capped (``cap · tanh(score / cap)``, Gemma 2) and sinks (one learned score per head that takes part
in the softmax and has no value, gpt-oss). Scores exist for one block of queries of one document at
a time, in float32 or more, and the backward pass computes them again.

The whole is one custom operator, so that torch.compile sees no lengths and compiles a block once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["plain_packed"]

# Number of queries whose scores exist at the same time.
_BLOCK = 512


def _blocks(bounds: Tensor, window: int) -> Iterator[tuple[slice, slice, int]]:
    """Yield each block of queries, the keys that it reaches, and its first query's key index."""
    for begin, end in pairwise(bounds.tolist()):
        for first in range(begin, end, _BLOCK):
            last = min(first + _BLOCK, end)
            reach = max(begin, first - window + 1) if window else begin
            yield slice(first, last), slice(reach, last), first - reach


def _heads_first(x: Tensor, part: slice, groups: int) -> Tensor:
    """Return rows of ``[T, H, d]`` as ``[H / groups, groups, rows, d]``, in float32 or more."""
    rows = x[part].transpose(0, 1).unflatten(0, (-1, groups))
    return rows if rows.dtype == torch.float64 else rows.float()


def _tokens_first(x: Tensor) -> Tensor:
    """Return ``[KV, groups, rows, d]`` as ``[rows, KV * groups, d]``."""
    return x.flatten(0, 1).transpose(0, 1)


def _scores(
    q: Tensor, k: Tensor, scale: float, cap: float, window: int, offset: int
) -> tuple[Tensor, Tensor]:
    """Return the scores of a block, masked, and those before the mask."""
    scores = (q @ k.transpose(-1, -2)) * scale
    if cap:
        scores = torch.tanh(scores / cap) * cap
    query = torch.arange(q.shape[-2], device=q.device)[:, None] + offset
    distance = query - torch.arange(k.shape[-2], device=q.device)[None, :]
    hidden = distance < 0
    if window:
        hidden |= distance >= window
    return scores.masked_fill(hidden, -torch.inf), scores


@torch.library.custom_op("engine_torch::plain_packed", mutates_args=())
def plain_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bounds: Tensor,
    scale: float,
    cap: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within documents.

    Args:
        q: queries ``[T, H, d]``.
        k: keys ``[T, KV, d]``.
        v: values ``[T, KV, e]``, where e may differ from d.
        sinks: score of each head's sink ``[H]``, or None.
        bounds: first token of each document and the end of the last, ``[D+1]`` int64 on the CPU.
        scale: factor of the scores.
        cap: bound of the scaled scores; 0 for none.
        window: number of tokens that a token attends to, itself included; 0 for all.

    Returns:
        The result ``[T, H, e]``, and the log-sum-exp ``[T, H]`` with the sink, for the backward
        pass.
    """
    groups = q.shape[1] // k.shape[1]
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    sums = q.new_empty(q.shape[:2], dtype=wide)
    sink = None if sinks is None else sinks.to(wide).unflatten(0, (-1, groups))[..., None]
    for rows, reach, offset in _blocks(bounds, window):
        query = _heads_first(q, rows, groups)
        key, value = (_heads_first(x, reach, 1) for x in (k, v))
        scores, _ = _scores(query, key, scale, cap, window, offset)
        total = scores.logsumexp(-1)
        if sink is not None:
            total = torch.logaddexp(total, sink)
        out[rows] = _tokens_first((scores - total[..., None]).exp() @ value).to(out.dtype)
        sums[rows] = _tokens_first(total[..., None])[..., 0]
    return out, sums


@plain_packed.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bounds: Tensor,
    scale: float,
    cap: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    del k, sinks, bounds, scale, cap, window
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[:2], dtype=wide)


@torch.library.custom_op("engine_torch::plain_packed_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    bounds: Tensor,
    scale: float,
    cap: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of queries, keys and values from that of the result."""
    groups = q.shape[1] // k.shape[1]
    d_query = torch.empty_like(q, memory_format=torch.contiguous_format)
    # Blocks of queries add to the same keys, which is done in float32 or more.
    d_key, d_value = (torch.zeros(x.shape, dtype=sums.dtype, device=x.device) for x in (k, v))
    for rows, reach, offset in _blocks(bounds, window):
        query, d_out, result = (_heads_first(x, rows, groups) for x in (q, grad, out))
        key, value = (_heads_first(x, reach, 1) for x in (k, v))
        total = _heads_first(sums[..., None], rows, groups)
        masked, scores = _scores(query, key, scale, cap, window, offset)
        p = (masked - total).exp()
        d_scores = p * (d_out @ value.transpose(-1, -2) - (d_out * result).sum(-1, keepdim=True))
        if cap:
            d_scores = d_scores * (1 - (scores / cap).square())
        d_scores = d_scores * scale
        d_query[rows] = _tokens_first(d_scores @ key).to(q.dtype)
        d_key[reach] += (d_scores.transpose(-1, -2) @ query).sum(1).transpose(0, 1)
        d_value[reach] += (p.transpose(-1, -2) @ d_out).sum(1).transpose(0, 1)
    return d_query, d_key.to(k.dtype), d_value.to(v.dtype)


@_backward_op.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    bounds: Tensor,
    scale: float,
    cap: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    del grad, out, sums, bounds, scale, cap, window
    contiguous = torch.contiguous_format
    return tuple(torch.empty_like(x, memory_format=contiguous) for x in (q, k, v))  # type: ignore[return-value]


def gradient_of_sinks(sinks: Tensor, grad: Tensor, out: Tensor, sums: Tensor) -> Tensor:
    """Return the gradient ``[H]`` of the sinks' scores.

    A sink takes ``exp(s − lse)`` of each query's attention, and gives no value for it.

    Args:
        sinks: score of each head's sink ``[H]``.
        grad: gradient of the result ``[T, H, e]``.
        out: the result ``[T, H, e]``, with the sinks.
        sums: the log-sum-exp ``[T, H]``, with the sinks.
    """
    share = (sinks.to(sums.dtype) - sums).exp()
    taken = (grad.to(sums.dtype) * out.to(sums.dtype)).sum(-1)
    return -(share * taken).sum(0).to(sinks.dtype)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, bounds, ctx.scale, ctx.cap, ctx.window = inputs
    ctx.save_for_backward(q, k, v, sinks, bounds, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, sinks, bounds, out, sums = ctx.saved_tensors
    gradients = _backward_op(
        grad.contiguous(), q, k, v, out, sums, bounds, ctx.scale, ctx.cap, ctx.window
    )
    d_sinks = None if sinks is None else gradient_of_sinks(sinks, grad, out, sums)
    return (*gradients, d_sinks, None, None, None, None)


plain_packed.register_autograd(_backward, setup_context=_save_for_backward)

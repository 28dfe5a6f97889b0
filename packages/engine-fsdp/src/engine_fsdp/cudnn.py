"""Packed causal attention by cuDNN, document by document; on Hopper about 1.8 times as fast as FlashAttention 2.

cuDNN's own ragged layout must not be used: in torch 2.11 its backward is wrong (pytorch PR #186142; seen on an H200:
gradients up to 1e29). Documents of one length run as a batch, others one after another, each padded to a multiple of
128 so that few lengths need a plan of their own (a new one takes about 60 ms). Causal attention never looks at the
padding, and its gradient is zero.

One custom operator, so that torch.compile sees no lengths and compiles a block once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_STEP = 128
# There is no public name for one pass of cuDNN attention; F.scaled_dot_product_attention calls these.
_forward = torch.ops.aten._scaled_dot_product_cudnn_attention  # noqa: SLF001
_gradient = torch.ops.aten._scaled_dot_product_cudnn_attention_backward  # noqa: SLF001


def _groups(bounds: Tensor) -> Iterator[tuple[int, int, int]]:
    """(first token, documents, tokens a document) of what runs as one batch."""
    ends: list[int] = bounds.tolist()
    lengths = [b - a for a, b in pairwise(ends)]
    if len(set(lengths)) == 1:
        yield 0, len(lengths), lengths[0]
        return
    for start, length in zip(ends, lengths, strict=False):
        yield start, 1, length


def _rows(x: Tensor, start: int, count: int, length: int) -> Tensor:
    """``[T, H, d]`` → ``[count, H, length padded, d]``; a view where nothing has to be padded."""
    part = x[start : start + count * length].unflatten(0, (count, length)).transpose(1, 2)
    padding = -length % _STEP
    return F.pad(part, (0, 0, 0, padding)) if padding else part


def _back(x: Tensor, length: int) -> Tensor:
    """``[count, H, length padded, …]`` → ``[tokens, H, …]``."""
    return x[:, :, :length].transpose(1, 2).flatten(0, 1)


def _joined(parts: list[Tensor]) -> Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()


@torch.library.custom_op("engine_fsdp::cudnn_packed", mutates_args=())
def cudnn_packed(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention within documents.

    Args:
        q: ``[T, H, d]``; k, v: ``[T, KV, d]``, fp16 or bf16 on CUDA.
        bounds: ``[D+1]`` int64 on the CPU.

    Returns:
        ``[T, H, d]``, and the log-sum-exp ``[T, H]`` float32 for the backward pass.
    """
    outs, sums = [], []
    for start, count, length in _groups(bounds):
        query, key, value = (_rows(x, start, count, length) for x in (q, k, v))
        result = _forward(query, key, value, None, True, 0.0, True, False, scale=scale)
        outs.append(_back(result[0], length))
        sums.append(_back(result[1].reshape(count, q.shape[1], -1), length))
    return _joined(outs), _joined(sums)


@cudnn_packed.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    del k, v, bounds, scale
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(
        q.shape[:2], dtype=torch.float32
    )


@torch.library.custom_op("engine_fsdp::cudnn_packed_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    bounds: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    zero = torch.zeros((), dtype=torch.int64, device=q.device)  # no dropout: the seed is not read
    grads: tuple[list[Tensor], ...] = ([], [], [])
    for start, count, length in _groups(bounds):
        parts = [_rows(x, start, count, length) for x in (grad, q, k, v, out)]
        logsumexp = _rows(sums[..., None], start, count, length).contiguous()
        padded = parts[1].shape[2]
        result = _gradient(
            *parts, logsumexp, zero, zero, None, None, None, padded, padded, 0.0, True, scale=scale
        )
        for collected, part in zip(grads, result, strict=False):
            collected.append(_back(part, length))
    d_query, d_key, d_value = (_joined(parts) for parts in grads)
    return d_query, d_key, d_value


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
) -> tuple[Tensor, Tensor, Tensor]:
    del grad, out, sums, bounds, scale
    contiguous = torch.contiguous_format
    return tuple(torch.empty_like(x, memory_format=contiguous) for x in (q, k, v))  # type: ignore[return-value]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, bounds, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, bounds, out, sums = ctx.saved_tensors
    return (*_backward_op(grad.contiguous(), q, k, v, out, sums, bounds, ctx.scale), None, None)


cudnn_packed.register_autograd(_backward, setup_context=_setup)

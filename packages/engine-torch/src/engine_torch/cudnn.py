"""Packed causal attention by cuDNN, document by document.

On Hopper it is about 1.8 times as fast as FlashAttention 2.

cuDNN's own ragged layout must not be used, because its backward is wrong in torch 2.11 (pytorch PR
#186142; gradients up to 1e29 were seen on an H200). Documents of equal length run as a batch,
others one after another. Each is padded to a multiple of 128, so that few lengths need a plan of
their own (a new plan takes about 60 ms). Causal attention never reads the padding, and the
padding's gradient is zero.

The whole is one custom operator, so that torch.compile sees no lengths and compiles a block once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Documents are padded to a multiple of this many tokens.
_STEP = 128

# There is no public name for one pass of cuDNN attention. F.scaled_dot_product_attention calls
# these two.
_forward = torch.ops.aten._scaled_dot_product_cudnn_attention  # noqa: SLF001
_gradient = torch.ops.aten._scaled_dot_product_cudnn_attention_backward  # noqa: SLF001


def _groups(bounds: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (first token, number of documents, tokens per document) of each batch."""
    ends: list[int] = bounds.tolist()
    lengths = [b - a for a, b in pairwise(ends)]
    if len(set(lengths)) == 1:
        yield 0, len(lengths), lengths[0]
        return
    for start, length in zip(ends, lengths, strict=False):
        yield start, 1, length


def _rows(x: Tensor, start: int, count: int, length: int) -> Tensor:
    """Return a batch's rows of ``[T, H, d]`` as ``[count, H, padded length, d]``.

    The result is a view where nothing has to be padded.
    """
    part = x if count * length == len(x) else x[start : start + count * length]
    return _pad(part.view(count, length, *x.shape[1:]).transpose(1, 2))


def _pad(rows: Tensor) -> Tensor:
    """Return ``[count, H, length, …]`` with the length that cuDNN is given."""
    padding = -rows.shape[2] % _STEP
    return F.pad(rows, (0, 0, 0, padding)) if padding else rows


def _unpad(x: Tensor, length: int) -> Tensor:
    """Return ``[count, H, padded length, …]`` as ``[count * length, H, …]``."""
    rows = x if x.shape[2] == length else x[:, :, :length]
    return rows.transpose(1, 2).flatten(0, 1)


def _concatenate(parts: list[Tensor]) -> Tensor:
    """Return the parts as one contiguous tensor, without a copy for a single contiguous part."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.contiguous()


@torch.library.custom_op("engine_torch::cudnn_packed", mutates_args=())
def cudnn_packed(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within documents.

    Args:
        q: queries ``[T, H, d]``, fp16 or bf16 on CUDA.
        k: keys ``[T, KV, d]``, the same dtype.
        v: values ``[T, KV, d]``, the same dtype.
        bounds: first token of each document and the end of the last, ``[D+1]`` int64 on the CPU.
        scale: factor of the scores.

    Returns:
        The result ``[T, H, d]``, and the log-sum-exp ``[T * H]`` float32 for the backward pass,
        batch by batch as ``[count, H, length]``.
    """
    outs: list[Tensor] = []
    sums: list[Tensor] = []
    for start, count, length in _groups(bounds):
        query, key, value = (_rows(x, start, count, length) for x in (q, k, v))
        result = _forward(query, key, value, None, True, 0.0, True, False, scale=scale)
        outs.append(_unpad(result[0], length))
        sums.append(result[1].reshape(count, q.shape[1], -1)[:, :, :length].flatten())
    return _concatenate(outs), _concatenate(sums)


@cudnn_packed.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    del k, v, bounds, scale
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    sums = q.new_empty(q.shape[0] * q.shape[1], dtype=torch.float32)
    return out, sums


@torch.library.custom_op("engine_torch::cudnn_packed_backward", mutates_args=())
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
    """Compute the gradients of queries, keys and values from that of the result."""
    heads = q.shape[1]
    # The seed and offset of dropout, which the operator does not read at rate 0.
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    grads: tuple[list[Tensor], ...] = ([], [], [])
    for start, count, length in _groups(bounds):
        parts = [_rows(x, start, count, length) for x in (grad, q, k, v, out)]
        rows = sums[start * heads : (start + count * length) * heads]
        logsumexp = _pad(rows.view(count, heads, length, 1))
        padded = logsumexp.shape[2]
        result = _gradient(
            *parts,
            logsumexp,
            unused,
            unused,
            None,
            None,
            None,
            padded,
            padded,
            0.0,
            True,
            scale=scale,
        )
        for collected, part in zip(grads, result, strict=False):
            collected.append(_unpad(part, length))
    d_query, d_key, d_value = (_concatenate(parts) for parts in grads)
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


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, bounds, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, bounds, out, sums = ctx.saved_tensors
    gradients = _backward_op(grad.contiguous(), q, k, v, out, sums, bounds, ctx.scale)
    return (*gradients, None, None)


cudnn_packed.register_autograd(_backward, setup_context=_save_for_backward)

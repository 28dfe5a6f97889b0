"""FlashAttention 2 over packed documents with attention sinks, by PyTorch's own operators.

A sink is one learned score ``s`` per head that takes part in the softmax and has no value. With the
kernel's result ``out`` and log-sum-exp ``lse`` the result is ``out · exp(lse − lse')``, where
``lse' = logaddexp(lse, s)``. The gradient is the kernel's own, given the result and ``lse'`` in
place of ``out`` and ``lse``. ``torch.nn.attention.varlen`` ignores a gradient of ``lse``, so the
operators beneath it are called here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine_torch.plain import gradient_of_sinks

__all__ = ["varlen_with_sinks"]

# There is no public name for one pass of FlashAttention that returns lse and takes it back.
_forward = torch.ops.aten._flash_attention_forward  # noqa: SLF001
_gradient = torch.ops.aten._flash_attention_backward  # noqa: SLF001


def _window(window: int) -> dict[str, int]:
    """Return the operators' arguments for a window (0: none)."""
    if not window:
        return {"window_size_left": -1, "window_size_right": 0}
    return {"window_size_left": window - 1, "window_size_right": 0}


@torch.library.custom_op("engine_torch::varlen_with_sinks", mutates_args=())
def varlen_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within documents.

    Args:
        q: queries ``[T, H, d]``, fp16 or bf16 on CUDA.
        k: keys ``[T, KV, d]``, the same dtype.
        v: values ``[T, KV, d]``, the same dtype.
        sinks: score of each head's sink ``[H]``.
        cu_seqlens: boundaries of the documents ``[D+1]`` int32.
        longest: tokens of the longest document.
        scale: factor of the scores.
        window: number of tokens that a token attends to, itself included; 0 for all.

    Returns:
        The result ``[T, H, d]``, and the log-sum-exp ``[T, H]`` float32 with the sink.
    """
    ends = (cu_seqlens, cu_seqlens, longest, longest)
    result = _forward(
        q, k, v, *ends, 0.0, not window, return_debug_mask=False, scale=scale, **_window(window)
    )
    out, sums = result[0], result[1].transpose(0, 1)
    total = torch.logaddexp(sums, sinks.float())
    # The kernel's result has the strides of q.
    scaled = (out * (sums - total).exp()[..., None]).to(out.dtype).contiguous()
    return scaled, total.contiguous()


@varlen_with_sinks.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    del k, v, sinks, cu_seqlens, longest, scale, window
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("engine_torch::varlen_with_sinks_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of queries, keys and values from that of the result."""
    ends = (cu_seqlens, cu_seqlens, longest, longest)
    # The seed and offset of dropout, which the operator does not read at rate 0.
    seed = torch.zeros((2,), dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    lse = sums.transpose(0, 1).contiguous()
    gradients = _gradient(
        grad,
        q,
        k,
        v,
        out,
        lse,
        *ends,
        0.0,
        not window,
        seed,
        unused,
        scale=scale,
        **_window(window),
    )
    # The kernel's gradients have the strides of q, k and v.
    d_query, d_key, d_value = (gradient.contiguous() for gradient in gradients)
    return d_query, d_key, d_value


@_backward_op.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    del grad, out, sums, cu_seqlens, longest, scale, window
    contiguous = torch.contiguous_format
    return tuple(torch.empty_like(x, memory_format=contiguous) for x in (q, k, v))  # type: ignore[return-value]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, cu_seqlens, ctx.longest, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, sinks, cu_seqlens, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, sinks, cu_seqlens, out, sums = ctx.saved_tensors
    gradients = _backward_op(
        grad.contiguous(), q, k, v, out, sums, cu_seqlens, ctx.longest, ctx.scale, ctx.window
    )
    d_sinks = gradient_of_sinks(sinks, grad, out, sums)
    return (*gradients, d_sinks, None, None, None, None)


varlen_with_sinks.register_autograd(_backward, setup_context=_save_for_backward)

"""Log-probs and entropy from hidden states, in chunks: ``[T, vocab]`` logits never exist at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _ChunkedLogProb(torch.autograd.Function):
    """``log softmax(h W^T / τ)[target]`` and its entropy, with the logits of one chunk at a time.

    Forward keeps only the log-normalizer of each token; backward computes the chunk's logits again (unless there
    is one chunk alone: its logits may exist anyway, and are kept). With
    p = softmax(z), z = h W^T / τ, upstream gradients a (log-prob) and b (entropy):
    dz = a (onehot − p) − b p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, chunk: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        size = hidden.shape[0]
        log_probs, normalizer, entropy = (torch.empty(size, dtype=torch.float32, device=hidden.device) for _ in range(3))
        logits = hidden.new_empty(0)
        for start in range(0, size, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, scale)
            normalizer[part] = logits.logsumexp(-1)
            log_probs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - normalizer[part]
            if with_entropy:
                entropy[part] = _entropy(logits, normalizer[part])
        kept = logits if size <= chunk and any(ctx.needs_input_grad[:2]) else None
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy, kept)
        ctx.scale, ctx.chunk, ctx.with_entropy = scale, chunk, with_entropy
        return log_probs, entropy if with_entropy else log_probs.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropy, kept = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        # Accumulated over chunks in float32: bfloat16 sums would lose the small chunks.
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if need_weight else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = _logits(hidden[part], weight, ctx.scale) if kept is None else kept
            d_logits = _d_logits(logits, targets[part], normalizer[part], grads[0][part])
            if ctx.with_entropy:
                d_logits -= _d_entropy(logits, normalizer[part], entropy[part], grads[1][part])
            d_logits = d_logits.mul_(ctx.scale).to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[part] = d_logits @ weight
            if d_weight is not None:
                d_weight += d_logits.T @ hidden[part]
        return d_hidden, d_weight.to(weight.dtype) if d_weight is not None else None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, scale: float) -> Tensor:
    logits = (hidden @ weight.T).float()
    return logits if scale == 1.0 else logits.mul_(scale)


def _entropy(logits: Tensor, normalizer: Tensor) -> Tensor:
    log_p = logits - normalizer[:, None]
    return -(log_p.exp() * log_p).sum(-1)


def _d_logits(logits: Tensor, targets: Tensor, normalizer: Tensor, grad: Tensor) -> Tensor:
    out = (logits - normalizer[:, None]).exp_().mul_(-grad[:, None])
    return out.scatter_add_(-1, targets[:, None], grad[:, None])


def _d_entropy(logits: Tensor, normalizer: Tensor, entropy: Tensor, grad: Tensor) -> Tensor:
    log_p = logits - normalizer[:, None]
    return log_p.exp().mul_(log_p.add_(entropy[:, None])).mul_(grad[:, None])


def chunked_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float, chunk: int, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of ``targets`` and the entropy of their distributions.

    Args:
        hidden: ``[T, d]``; weight: ``[V, d]``, the same dtype; targets: ``[T]`` int64.
        temperature: logits are divided by it.
        chunk: tokens whose logits exist at the same time.

    Returns:
        ``[T]`` float32 each, differentiable in ``hidden`` and ``weight``; None where not asked for.
    """
    out: tuple[Tensor, Tensor] = _ChunkedLogProb.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, 1.0 / temperature, chunk, entropy
    )
    return out[0], out[1] if entropy else None

"""Log-probs and entropy over a vocabulary that is split over tensor-parallel ranks, the logits of a chunk at a time."""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """This rank's rows of the head: tokens ``first`` to ``first + size``; what follows in the weight is padding."""

    first: int
    size: int
    group: Any  # None: the whole vocabulary is here


class _LogProb(torch.autograd.Function):
    """``log softmax(h W^T / τ)[target]`` and the entropy of that distribution.

    With p = softmax(z), z = h W^T / τ, and upstream gradients a (log-prob) and b (entropy):
    dz = a (onehot − p) − b p (log p + H). The logits of a chunk are computed again in backward. The gradient of ``h``
    is this rank's part of a sum over the ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: float,
        chunk: int,
        vocabulary: Vocabulary,
    ) -> tuple[Tensor, Tensor]:
        size = hidden.shape[0]
        log_probs, entropy, normalizer = (
            torch.empty(size, dtype=torch.float32, device=hidden.device) for _ in range(3)
        )
        for start in range(0, size, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, scale, vocabulary)
            normalizer[part], expected = _normalize(logits, vocabulary.group)
            entropy[part] = normalizer[part] - expected
            log_probs[part] = _chosen(logits, targets[part], vocabulary) - normalizer[part]
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.scale, ctx.chunk, ctx.vocabulary = scale, chunk, vocabulary
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        # Added up over chunks in float32: bfloat16 sums would lose the small ones.
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        size = ctx.vocabulary.size
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p = (
                _logits(hidden[part], weight, ctx.scale, ctx.vocabulary) - normalizer[part, None]
            )
            p, a, b = log_p.exp(), grads[0][part, None], grads[1][part, None]
            d_logits = -p * (a + b * (log_p + entropy[part, None]))
            index, here = _own(targets[part], ctx.vocabulary)
            d_logits.scatter_add_(1, index[:, None], a * here[:, None])
            d_logits = (d_logits * ctx.scale).to(weight.dtype)
            torch.mm(d_logits, weight[:size], out=d_hidden[part])
            d_weight[:size] += d_logits.T @ hidden[part]
        return d_hidden, d_weight.to(weight.dtype), None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, scale: float, vocabulary: Vocabulary) -> Tensor:
    """``[n, size]`` float32."""
    return (hidden @ weight[: vocabulary.size].T).float() * scale


def _normalize(logits: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """``[n]`` each: log-sum-exp over the whole vocabulary, and the expected logit."""
    highest = logits.amax(-1)
    if group is not None:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    p = (logits - highest[:, None]).exp()
    sums = torch.stack((p.sum(-1), (p * logits).sum(-1)))
    if group is not None:
        dist.all_reduce(sums, group=group)
    return highest + sums[0].log(), sums[1] / sums[0]


def _own(targets: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """``[n]`` each: the target's place in this rank's rows (0 where it is not there), and whether it is there."""
    index = targets - vocabulary.first
    here = (index >= 0) & (index < vocabulary.size)
    return index.masked_fill(~here, 0), here


def _chosen(logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
    """``[n]``: the targets' logits."""
    index, here = _own(targets, vocabulary)
    chosen = logits.gather(1, index[:, None])[:, 0].masked_fill(~here, 0.0)
    if vocabulary.group is not None:
        dist.all_reduce(chosen, group=vocabulary.group)
    return chosen


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk: int,
    vocabulary: Vocabulary,
) -> tuple[Tensor, Tensor]:
    """Log-probs of ``targets`` and entropies, ``[T]`` float32 each, the same bits on every tensor-parallel rank.

    Args:
        hidden: ``[T, d]``, whose gradient is to be summed over the ranks; weight: this rank's rows ``[n, d]``.
        targets: ``[T]`` int64, numbered in the whole vocabulary.
        chunk: tokens whose logits exist at the same time.
    """
    result: tuple[Tensor, Tensor] = _LogProb.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, 1.0 / temperature, chunk, vocabulary
    )
    return result

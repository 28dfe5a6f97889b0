"""Log-probs and entropy over a vocabulary that is split over tensor-parallel ranks.

The logits of one chunk of tokens exist at a time.
"""

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
    """This rank's rows of the head, those of the tokens ``first`` to ``first + size``.

    Rows of the weight beyond ``size`` are padding.
    """

    first: int
    size: int
    group: Any
    """Process group of the tensor-parallel ranks. None means that the whole vocabulary is here."""


class _LogProb(torch.autograd.Function):
    """``log softmax(h W^T / τ)[target]`` and the entropy of that distribution.

    With p = softmax(z), z = h W^T / τ, and upstream gradients a (log-prob) and b (entropy):
    dz = a (onehot − p) − b p (log p + H). The logits of a chunk are computed again in backward. The
    gradient of ``h`` is this rank's part of a sum over the ranks.
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
        ctx.scale = scale
        ctx.chunk = chunk
        ctx.vocabulary = vocabulary
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight: Tensor | None = None
        if ctx.needs_input_grad[1]:
            # Gradients of chunks are added up in float32: sums in bfloat16 would lose small terms.
            d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        size = ctx.vocabulary.size
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = _logits(hidden[part], weight, ctx.scale, ctx.vocabulary)
            log_p = logits - normalizer[part, None]
            p = log_p.exp()
            a = grads[0][part, None]
            b = grads[1][part, None]
            d_logits = -p * (a + b * (log_p + entropy[part, None]))
            index, here = _own(targets[part], ctx.vocabulary)
            d_logits.scatter_add_(1, index[:, None], a * here[:, None])
            d_logits = (d_logits * ctx.scale).to(weight.dtype)
            torch.mm(d_logits, weight[:size], out=d_hidden[part])
            if d_weight is not None:
                d_weight[:size] += d_logits.T @ hidden[part]
        d_rounded = None if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden, d_rounded, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, scale: float, vocabulary: Vocabulary) -> Tensor:
    """Return the scaled logits of this rank's part of the vocabulary, ``[n, size]`` float32."""
    return (hidden @ weight[: vocabulary.size].T).float() * scale


def _normalize(logits: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp over the whole vocabulary and the expected logit, ``[n]`` each."""
    highest = logits.amax(-1)
    if group is not None:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    p = (logits - highest[:, None]).exp()
    sums = torch.stack((p.sum(-1), (p * logits).sum(-1)))
    if group is not None:
        dist.all_reduce(sums, group=group)
    return highest + sums[0].log(), sums[1] / sums[0]


def _own(targets: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Return each target's index in this rank's rows, and whether it is there, ``[n]`` each.

    The index of a target that is not there is 0.
    """
    index = targets - vocabulary.first
    here = (index >= 0) & (index < vocabulary.size)
    return index.masked_fill(~here, 0), here


def _chosen(logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return the targets' logits, ``[n]``."""
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
    """Return the log-probs of ``targets`` and the entropies, ``[T]`` float32 each.

    They are the same bits on every tensor-parallel rank.

    Args:
        hidden: ``[T, d]``; the caller sums its gradient over the ranks.
        weight: this rank's rows of the head, ``[n, d]``.
        targets: ``[T]`` int64, numbered in the whole vocabulary.
        temperature: divides the logits.
        chunk: number of tokens whose logits exist at the same time.
        vocabulary: the tokens that the rows are for.
    """
    result: tuple[Tensor, Tensor] = _LogProb.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, 1.0 / temperature, chunk, vocabulary
    )
    return result

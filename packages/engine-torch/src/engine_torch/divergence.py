"""The divergence of a student's distributions to a teacher's, computed chunk by chunk.

The logits of both are formed for one chunk of tokens at a time, in the forward pass and again in
the backward pass. Between the two only the hidden states are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine_api.distillation import OutputHead, Teaching
from engine_torch.head import HeadGradients, VocabularyShard, logits_of, scores_of, slope_of

__all__ = ["Taught", "chunked_divergence"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Taught:
    """The teacher's part of a micro-batch, a row for each of n targets.

    Attributes:
        teaching: what the loss asks for.
        head: the teacher's whole head, None with ``teaching.top``.
        states: ``[n, d]`` the teacher's hidden states, None with ``teaching.top``.
        ids: ``[n, k]`` int64 with ``teaching.top``, -1 where there is none.
        log_probs: ``[n, k + 1]`` float32 with ``teaching.top``, the last one that of all other
            tokens together.
    """

    teaching: Teaching
    head: OutputHead | None = None
    states: Tensor | None = None
    ids: Tensor | None = None
    log_probs: Tensor | None = None

    def slice(self, part: slice) -> Taught:
        """Return the rows of a chunk."""
        rows = {name: getattr(self, name) for name in ("states", "ids", "log_probs")}
        cut = {name: None if value is None else value[part] for name, value in rows.items()}
        return replace(self, **cut)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Scores:
    """The scores of a student and a teacher over the token ids of this rank that count.

    Attributes:
        first: token id of the first column.
        count: number of columns, which may be 0 where another rank has all that count.
        shard: the ranks that divide the vocabulary, or None.
        scale, cap: those of the student's scores (``engine_torch.head.scores_of``).
        temperature: divisor of the teacher's logits.
    """

    first: int
    count: int
    shard: VocabularyShard | None
    scale: float
    cap: float | None
    temperature: float

    def measure(self, logits: Tensor, taught: Taught, gradient: bool) -> tuple[Tensor, Tensor]:
        """Return the divergence ``[n]``, and its gradient by the plain logits ``[n, count]``.

        Without ``gradient`` the second result is the same as the first.
        """
        z = scores_of(logits[:, : self.count], self.scale, self.cap)
        log_p = z - self._log_sum(z)[:, None]
        if taught.teaching.top:
            value, d_scores = self._measure_top(log_p, taught, gradient)
        else:
            value, d_scores = self._measure_all(log_p, taught, gradient)
        return value, d_scores.mul_(slope_of(z, self.scale, self.cap)) if gradient else value

    def _measure_all(self, log_p: Tensor, taught: Taught, gradient: bool) -> tuple[Tensor, Tensor]:
        terms, slope = _terms(taught.teaching, log_p, self._teacher(taught))
        value = self._sum(terms.sum(-1))
        if not gradient:
            return value, value
        return value, slope - log_p.exp_().mul_(self._sum(slope.sum(-1))[:, None])

    def _teacher(self, taught: Taught) -> Tensor:
        """Return the teacher's log-probs ``[n, count]``, in float32."""
        head = taught.head
        assert head is not None
        assert taught.states is not None
        rows = slice(self.first, self.first + self.count)
        bias = None if head.bias is None else head.bias[rows]
        plain = logits_of(taught.states.to(head.weight.dtype), head.weight[rows], bias)
        cap = None if head.cap is None else head.cap / self.temperature
        z = scores_of(plain, head.scale / self.temperature, cap)
        return z - self._log_sum(z)[:, None]

    def _measure_top(self, log_p: Tensor, taught: Taught, gradient: bool) -> tuple[Tensor, Tensor]:
        """Return divergence and gradient over the classes of ``Teaching.top``.

        A token of the last class has the share p / P of that class's p f'.
        """
        assert taught.ids is not None
        assert taught.log_probs is not None
        own = taught.ids - self.first
        is_here = (taught.ids >= 0) & (own >= 0) & (own < self.count)
        # One column more, for tokens that are not here.
        own = torch.where(is_here, own, self.count)
        named = torch.zeros(len(own), self.count + 1, dtype=torch.bool, device=own.device)
        named = named.scatter_(-1, own, True)[:, : self.count]
        chosen = self._sum(_padded(log_p).gather(-1, own))
        rest = self._log_sum(log_p.masked_fill(named, -math.inf))
        classes = torch.cat([chosen, rest[:, None]], -1)
        exists = torch.cat([taught.ids >= 0, rest.isfinite()[:, None]], -1)
        terms, slope = _terms(taught.teaching, classes, taught.log_probs)
        value = terms.masked_fill(~exists, 0.0).sum(-1)
        if not gradient:
            return value, value
        slope = slope.masked_fill(~exists, 0.0)
        d_scores = (log_p - rest[:, None]).exp_().mul_(slope[:, -1:]).masked_fill_(named, 0.0)
        d_scores = _padded(d_scores).scatter_add_(-1, own, slope[:, :-1])[:, : self.count]
        return value, d_scores - log_p.exp_().mul_(slope.sum(-1, keepdim=True))

    def _log_sum(self, scores: Tensor) -> Tensor:
        """Return log Σ exp of scores over the columns of all ranks, ``[n]``."""
        own = scores.logsumexp(-1)
        return own if self.shard is None else self.shard.gather(own).logsumexp(0)

    def _sum(self, values: Tensor) -> Tensor:
        """Return the sum of values over all ranks."""
        return values if self.shard is None else self.shard.gather(values).sum(0)


def _padded(columns: Tensor) -> Tensor:
    """Return columns with one more of zeros behind them."""
    return pad(columns, (0, 1))


class _ChunkedDivergence(torch.autograd.Function):
    """The divergence of each row, one chunk at a time.

    With f the divergence as a function of p, and z the student's scores, the gradient is
    df/dz = p f' - p Σ p f'.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        taught: Taught,
        chunk: int,
        scores: _Scores,
    ) -> Tensor:
        result = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for start in range(0, len(result), chunk):
            part = slice(start, start + chunk)
            logits = logits_of(hidden[part], weight, bias)
            result[part], _ = scores.measure(logits, taught.slice(part), False)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.taught = taught
        ctx.chunk = chunk
        ctx.scores = scores
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        found = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = logits_of(hidden[part], weight, bias)
            _, own = ctx.scores.measure(logits, ctx.taught.slice(part), True)
            # Padding of the vocabulary has no gradient.
            d_logits = logits.zero_()
            d_logits[:, : own.shape[1]] = own.mul_(grads[0][part, None])
            found.add(part, d_logits)
        return *found.result(), *(None,) * 3


def _terms(teaching: Teaching, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Return each term of f, and of p f' up to a constant in f', which cancels in the gradient."""
    if teaching.divergence == "reverse_kl":
        # f' = log(p / q) + 1.
        value = log_p.exp().mul_(log_p - log_q)
        return value, value
    q = log_q.exp()
    if teaching.divergence == "forward_kl":
        return q * (log_q - log_p), -q
    beta = teaching.beta
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log(1 - beta))
    # f' = (1 - β) log(p / m): what is left of the derivative by m is a constant.
    slope = log_p.exp().mul_(log_p - log_m).mul_(1 - beta)
    return q.mul_(beta).mul_(log_q - log_m).add_(slope), slope


def chunked_divergence(
    hidden: Tensor,
    weight: Tensor,
    taught: Taught,
    *,
    temperature: float,
    chunk: int,
    bias: Tensor | None = None,
    scale: float = 1.0,
    cap: float | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Compute the divergence of each row's distribution to the teacher's.

    Args:
        hidden: the student's hidden states ``[n, d]``.
        weight: its output embedding ``[V, d]``, the same dtype.
        taught: the teacher's rows.
        temperature: divisor of the logits of both; with ``taught.teaching.top``, of the student's.
        chunk: number of tokens whose logits exist at the same time, for each of the two models.
        bias, scale, cap, shard: see ``engine_torch.head.chunked_log_probs``. With a shard each rank
            takes its rows of the teacher's head, too.

    Returns:
        ``[n]`` nats in float32, differentiable once in ``hidden``, ``weight`` and ``bias``. Logits
        are rounded to the dtype of their hidden states, and all that follows is float32.
    """
    first = 0 if shard is None else shard.first
    scores = _Scores(
        first=first,
        count=max(0, min(weight.shape[0], taught.teaching.vocabulary - first)),
        shard=shard,
        scale=scale / temperature,
        cap=None if cap is None else cap / temperature,
        temperature=temperature,
    )
    result: Tensor = _ChunkedDivergence.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, taught, chunk, scores
    )
    return result

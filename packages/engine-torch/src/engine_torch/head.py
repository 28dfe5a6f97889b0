"""Log-probs and entropy from hidden states, computed without ``[T, vocab]`` logits at once.

On a GPU the elementwise parts are compiled. As separate kernels they would read and write the
chunk's logits a dozen times, which costs more than the matrix products (docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine_api.devices import device_of
from engine_api.process_groups import all_gather

__all__ = [
    "HeadGradients",
    "VocabularyShard",
    "chunked_log_probs",
    "logits_of",
    "scores_of",
    "slope_of",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyShard:
    """The rows of the output embedding that this rank holds, where ranks divide the vocabulary."""

    group: Any
    """Process group of the ranks that hold the whole output embedding together."""

    first: int
    """Token id of the first row that this rank holds, which has at least one."""

    def gather(self, values: Tensor) -> Tensor:
        """Return the values ``[ranks, …]`` of all ranks, in the same order on each of them."""
        ranks = dist.get_world_size(self.group)
        received = values.new_empty(ranks * values.numel())
        all_gather(received, values.contiguous().view(-1), self.group)
        return received.view(ranks, *values.shape)


class HeadGradients:
    """The gradients of hidden states, output embedding and bias, from those of chunks of logits.

    Args:
        hidden: hidden states ``[T, d]``.
        weight: output embedding ``[V, d]``, the same dtype.
        bias: bias of the logits ``[V]``, the same dtype, or None.
        needed: for each of the three, whether its gradient is computed.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> None:
        of_hidden, of_weight, of_bias = needed
        self._hidden = hidden
        self._weight = weight
        self._d_hidden = torch.empty_like(hidden) if of_hidden else None
        # Summed over chunks in float32, because sums in bfloat16 would lose small addends.
        self._d_weight = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        self._d_bias: Tensor | None = None
        if of_bias and bias is not None:
            self._d_bias = torch.zeros_like(bias, dtype=torch.float32)

    def add(self, part: slice, d_logits: Tensor) -> None:
        """Add those of one chunk, the gradient of whose logits ``[t, V]`` is in their dtype."""
        if self._d_hidden is not None:
            torch.mm(d_logits, self._weight, out=self._d_hidden[part])
        if self._d_weight is not None:
            _accumulate(self._d_weight, d_logits, self._hidden[part])
        if self._d_bias is not None:
            self._d_bias += d_logits.sum(0, dtype=torch.float32)

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the three in the dtype of the computation, each None where it is not needed."""
        d_weight, d_bias = (
            None if total is None else total.to(self._weight.dtype)
            for total in (self._d_weight, self._d_bias)
        )
        return self._d_hidden, d_weight, d_bias


class _ChunkLogits:
    """The plain logits of one chunk after another, which take the same memory.

    A pass without gradients has chunks of half the size. The products of every pass have that
    size, so that a token is rounded alike in each of them, and a ratio on policy is exactly 1.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int, *, trains: bool
    ) -> None:
        self._hidden = hidden
        self._weight = weight
        self._bias = bias
        self._rows = chunk if chunk % 2 else chunk // 2
        self.chunk = chunk if trains else self._rows
        """Number of tokens of a chunk of this pass."""
        tokens = hidden.shape[0]
        self.parts = [slice(start, start + self.chunk) for start in range(0, tokens, self.chunk)]
        """The tokens of each chunk."""
        self._memory: Tensor | None = None

    def compute(self, part: slice) -> Tensor:
        """Return the logits ``[t, V]`` of a chunk, which overwrite those of the one before."""
        hidden = self._hidden[part]
        if self._memory is None:
            # No chunk is larger than the first.
            self._memory = hidden.new_empty(hidden.shape[0], self._weight.shape[0])
        logits = self._memory[: hidden.shape[0]]
        for rows, out in zip(hidden.split(self._rows), logits.split(self._rows), strict=True):
            logits_of(rows, self._weight, self._bias, out=out)
        return logits


class _ChunkedLogProb(torch.autograd.Function):
    """The log-probs ``log softmax(z)[target]`` and the entropy, one chunk at a time.

    Scores are z = s (h W^T + b) / τ with the head's scale s and bias b at temperature τ. With a cap
    c they are z = c tanh(s (h W^T + b) / c) / τ.

    Forward keeps only the log-normalizer of each token, and backward recomputes the chunk's logits.
    With a single chunk, whose logits fit in memory anyway, they are kept instead.

    The gradient is dz = a (onehot − p) − e p (log p + H), with p = softmax(z), entropy H, and
    upstream gradients a (of the log-prob) and e (of the entropy). That of the logits is dz times
    the slope s / τ, and with a cap also times 1 − tanh².
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: float,
        cap: float | None,
        chunk: int,
        with_entropy: bool,
        shard: VocabularyShard | None,
        trains: bool,
    ) -> tuple[Tensor, Tensor]:
        size = hidden.shape[0]
        log_probs, normalizer = (
            torch.empty(size, dtype=torch.float32, device=hidden.device) for _ in range(2)
        )
        entropy = torch.zeros_like(log_probs)
        chunks = _ChunkLogits(hidden, weight, bias, chunk, trains=trains)
        logits = hidden.new_empty(0)
        for part in chunks.parts:
            logits = chunks.compute(part)
            log_probs[part], normalizer[part] = _score(logits, targets[part], scale, cap, shard)
            if with_entropy:
                entropy[part] = _entropy_of_all(logits, normalizer[part], scale, cap, shard)
        kept = logits if size <= chunk and trains else None
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy, kept)
        ctx.scale = scale
        ctx.cap = cap
        ctx.chunk = chunk
        ctx.with_entropy = with_entropy
        return log_probs, entropy if with_entropy else log_probs.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy, kept = ctx.saved_tensors
        gradient = _fused(_gradient, hidden)
        found = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        chunks = _ChunkLogits(hidden, weight, bias, ctx.chunk, trains=True)
        for part in chunks.parts:
            logits = chunks.compute(part) if kept is None else kept
            entropy_grad = grads[1][part] if ctx.with_entropy else None
            d_logits = gradient(
                logits,
                targets[part],
                normalizer[part],
                entropy[part],
                grads[0][part],
                entropy_grad,
                ctx.scale,
                ctx.cap,
            )
            found.add(part, d_logits)
        return *found.result(), *(None,) * 7


class _KnownLogProb(torch.autograd.Function):
    """The log-probs of ``_ChunkedLogProb``, for an upstream gradient known up to a factor.

    The gradients are formed in the forward pass, so that a chunk's logits are computed once instead
    of twice. This saves a quarter of the head's matrix products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        coefficients: Tensor,
        scale: float,
        cap: float | None,
        chunk: int,
        with_entropy: bool,
        shard: VocabularyShard | None,
    ) -> tuple[Tensor, Tensor]:
        size = hidden.shape[0]
        gradient = _fused(_gradient, hidden)
        log_probs, entropy = (
            torch.zeros(size, dtype=torch.float32, device=hidden.device) for _ in range(2)
        )
        found = HeadGradients(hidden, weight, bias, (True, True, bias is not None))
        chunks = _ChunkLogits(hidden, weight, bias, chunk, trains=True)
        for part in chunks.parts:
            logits = chunks.compute(part)
            log_probs[part], normalizer = _score(logits, targets[part], scale, cap, shard)
            if with_entropy:
                entropy[part] = _entropy_of_all(logits, normalizer, scale, cap, shard)
            d_logits = gradient(
                logits,
                targets[part],
                normalizer,
                entropy[part],
                coefficients[part],
                None,
                scale,
                cap,
            )
            found.add(part, d_logits)
        ctx.save_for_backward(coefficients, *found.result())
        # A loss with known coefficients promises not to train on the entropy.
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        known, d_hidden, d_weight, d_bias = ctx.saved_tensors
        factor = (grads[0] @ known) / (known @ known).clamp(min=torch.finfo(torch.float32).tiny)
        # A loss that broke its promise must not train. NaN makes the engine skip the step and
        # report it.
        kept = (grads[0] - factor * known).abs().max() <= 1e-3 * grads[0].abs().max()
        factor = torch.where(kept, factor, torch.nan)
        d_bias = None if d_bias is None else d_bias.mul_(factor)
        return d_hidden.mul_(factor), d_weight.mul_(factor), d_bias, *(None,) * 7


def _score(
    logits: Tensor, targets: Tensor, scale: float, cap: float | None, shard: VocabularyShard | None
) -> tuple[Tensor, Tensor]:
    """Return the target's log-prob and the log-normalizer of each row, ``[T]`` float32.

    With a shard ``logits`` and ``targets`` count from its first row.
    """
    if shard is None:
        result: tuple[Tensor, Tensor] = _fused(_log_prob, logits)(logits, targets, scale, cap)
        return result
    own: tuple[Tensor, Tensor] = _fused(_log_prob_of_shard, logits)(logits, targets, scale, cap)
    scores, normalizers = shard.gather(torch.stack(own)).unbind(1)
    normalizer = normalizers.logsumexp(0)
    return scores.sum(0) - normalizer, normalizer


def _entropy_of_all(
    logits: Tensor,
    normalizer: Tensor,
    scale: float,
    cap: float | None,
    shard: VocabularyShard | None,
) -> Tensor:
    """Return the entropy of each row over the whole vocabulary, ``[T]`` float32."""
    own: Tensor = _fused(_entropy, logits)(logits, normalizer, scale, cap)
    return own if shard is None else shard.gather(own).sum(0)


def _log_prob_of_shard(
    logits: Tensor, targets: Tensor, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Return each row's target score, 0 where another rank has it, and its log-normalizer here."""
    z = scores_of(logits, scale, cap)
    is_here = (targets >= 0) & (targets < z.shape[1])
    score = z.gather(-1, targets.clamp(0, z.shape[1] - 1)[:, None]).squeeze(-1)
    return score.masked_fill(~is_here, 0.0), z.logsumexp(-1)


def logits_of(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor | None = None
) -> Tensor:
    """Return the plain logits h W^T + b of a chunk, in the memory of ``out`` where it is given."""
    if bias is None:
        return torch.mm(hidden, weight.T, out=out)
    return torch.addmm(bias, hidden, weight.T, out=out)


def scores_of(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    """Return the scores z of plain logits, in float32.

    Args:
        logits: h W^T + b.
        scale: the head's scale divided by the temperature.
        cap: the head's cap divided by the temperature, or None.
    """
    if cap is not None:
        return (logits.float() * (scale / cap)).tanh() * cap
    return logits.float() if scale == 1.0 else logits.float() * scale


def slope_of(z: Tensor, scale: float, cap: float | None) -> Tensor | float:
    """Return the derivative of the scores ``z`` by the plain logits."""
    return scale if cap is None else (1 - (z / cap).square()) * scale


def _log_prob(
    logits: Tensor, targets: Tensor, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Return the target's log-prob and the log-normalizer of each row, ``[T]`` float32.

    The entropy has a function of its own. Fused with it, log-probs would round differently in a
    loss with an entropy bonus than in inference, and an on-policy ratio would not be exactly 1.
    """
    z = scores_of(logits, scale, cap)
    normalizer = z.logsumexp(-1)
    return z.gather(-1, targets[:, None]).squeeze(-1) - normalizer, normalizer


def _entropy(logits: Tensor, normalizer: Tensor, scale: float, cap: float | None) -> Tensor:
    """Return the entropy of each row in nats, ``[T]`` float32."""
    log_p = scores_of(logits, scale, cap) - normalizer[:, None]
    return -(log_p.exp() * log_p).sum(-1)


def _gradient(
    logits: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    grad: Tensor,
    entropy_grad: Tensor | None,
    scale: float,
    cap: float | None,
) -> Tensor:
    """Overwrite the chunk's logits with their gradient, in their dtype, and return them."""
    z = scores_of(logits, scale, cap)
    log_p = z - normalizer[:, None]
    p = log_p.exp()
    out = -grad[:, None] * p
    if entropy_grad is not None:
        out = out - entropy_grad[:, None] * p * (log_p + entropy[:, None])
    hit = torch.arange(logits.shape[1], device=logits.device)[None, :] == targets[:, None]
    return logits.copy_((out + hit * grad[:, None]) * slope_of(z, scale, cap))


def _gradient_eager(
    logits: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    grad: Tensor,
    entropy_grad: Tensor | None,
    scale: float,
    cap: float | None,
) -> Tensor:
    """Return the gradient of ``_gradient`` in few passes over memory, without compilation.

    A target outside of the logits, which another rank has, adds nothing.
    """
    z = scores_of(logits, scale, cap)
    p = z - normalizer[:, None]
    if cap is not None:
        return _capped_gradient(z, p, targets, entropy, grad, entropy_grad, scale, cap).to(
            logits.dtype
        )
    if entropy_grad is None:
        p.exp_().mul_(-grad[:, None] * scale)
    else:
        weight = (p + entropy[:, None]).mul_(entropy_grad[:, None]).add_(grad[:, None])
        p.exp_().mul_(weight).mul_(-scale)
    return _add_hits(p, targets, grad * scale).to(logits.dtype)


def _capped_gradient(
    z: Tensor,
    log_p: Tensor,
    targets: Tensor,
    entropy: Tensor,
    grad: Tensor,
    entropy_grad: Tensor | None,
    scale: float,
    cap: float,
) -> Tensor:
    """Return the gradient of the logits of a head with a cap, in float32.

    ``log_p`` and ``z`` are overwritten.
    """
    weight: Tensor = grad[:, None]
    if entropy_grad is not None:
        weight = (log_p + entropy[:, None]).mul_(entropy_grad[:, None]).add_(grad[:, None])
    p = log_p.exp_().mul_(weight).neg_()
    _add_hits(p, targets, grad)
    return p.mul_(z.div_(cap).square_().neg_().add_(1).mul_(scale))


def _add_hits(p: Tensor, targets: Tensor, grad: Tensor) -> Tensor:
    """Add each row's gradient at its target, unless another rank has it, and return ``p``."""
    last = p.shape[1] - 1
    hit = grad.masked_fill((targets < 0) | (targets > last), 0.0)
    return p.scatter_add_(-1, targets.clamp(0, last)[:, None], hit[:, None])


def _accumulate(total: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """Add a chunk's gradient of the weight to ``total``, in float32 where the device can."""
    if d_logits.dtype == torch.float32:
        total.addmm_(d_logits.T, hidden)
    elif device_of(d_logits.device.type).float32_products:
        torch.addmm(total, d_logits.T, hidden, out_dtype=torch.float32, out=total)
    else:
        total += d_logits.T @ hidden


def _fused(function: Callable[..., Any], like: Tensor) -> Callable[..., Any]:
    """Return the implementation of an elementwise function that is fastest on a tensor's device."""
    if device_of(like.device.type).compiles_elementwise:
        return _compiled(function)
    return _gradient_eager if function is _gradient else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled for any number of tokens."""
    compiled: Callable[..., Any] = torch.compile(function)
    met: set[tuple[Any, ...]] = set()

    def call(logits: Tensor, *arguments: Any) -> Any:
        plain = (a if not isinstance(a, Tensor) else True for a in arguments)
        kind = (logits.dtype, logits.shape[1], *plain)
        if kind not in met:
            # One kernel serves all numbers of tokens from the start. Were the first number compiled
            # alone, the same tokens could round differently later in the run. (torch documents this
            # call, underscore and all.)
            met.add(kind)
            for tensor in (a for a in (logits, *arguments) if isinstance(a, Tensor)):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)  # noqa: SLF001
        return compiled(logits, *arguments)

    return call


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk: int,
    entropy: bool,
    coefficients: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    cap: float | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the log-probs of ``targets``, and the entropy of their distributions where requested.

    Args:
        hidden: hidden states ``[T, d]``.
        weight: output embedding ``[V, d]``, the same dtype.
        targets: token ids ``[T]`` int64.
        temperature: divisor of the logits.
        chunk: number of tokens whose logits exist at the same time.
        entropy: true to compute the entropy too.
        coefficients: the upstream gradient of the log-probs up to a factor, ``[T]`` float32, or
            None where it is not known. If given, the result must be used for that gradient only.
        bias: bias of the logits ``[V]``, the same dtype, or None. With a shard, of its rows.
        scale: factor of the logits, bias included.
        cap: bound of the scaled logits (``cap · tanh(logits / cap)``), or None.
        shard: the rows of the vocabulary that ``weight`` has, the other ones of which are on other
            ranks of its group; None where ``weight`` has all. Each rank of the group gives the same
            hidden states and targets. The gradient of ``hidden`` is then this rank's addend, which
            the caller adds over the group.

    Returns:
        Log-probs ``[T]`` and entropy ``[T]`` or None, in nats and float32, differentiable once in
        ``hidden``, ``weight`` and ``bias``. Logits are rounded to the dtype of ``hidden``, and all
        that follows is float32.
    """
    if shard is not None:
        targets = targets - shard.first
    inputs = [one for one in (hidden, weight, bias) if one is not None]
    trains = torch.is_grad_enabled() and any(one.requires_grad for one in inputs)
    scale = scale / temperature
    cap = None if cap is None else cap / temperature
    learns_all = trains and hidden.requires_grad and weight.requires_grad
    if coefficients is not None and learns_all and hidden.shape[0] > chunk:
        known: tuple[Tensor, Tensor] = _KnownLogProb.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, coefficients, scale, cap, chunk, entropy, shard
        )
        return known[0], known[1] if entropy else None
    out: tuple[Tensor, Tensor] = _ChunkedLogProb.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, scale, cap, chunk, entropy, shard, trains
    )
    return out[0], out[1] if entropy else None

"""Surrogates of a policy loss per token: PPO, GSPO, CISPO, SAPO, GMPO and DPPO.

A surrogate is a loss (to be minimized), ``[T]``, whose gradient goes through the log-probs.
``counted [T]`` says which tokens carry loss. A log-ratio is clamped to ±``MAX_LOG_RATIO`` before
its exponential.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine_trainer.algorithms.packed import document_of, sum_by_document

MAX_LOG_RATIO = 20.0
"""exp(20) = 4.9e8: a larger ratio says only "far away", and float32 would overflow at 88."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Surrogate:
    """A loss per token, and the ratio that it was made of.

    Attributes:
        value: ``[T]`` with a gradient.
        ratio: ``[T]``.
        clips: name → ``[T]`` bool, where a clip removes the gradient of a token (or of its
            sequence).
    """

    value: torch.Tensor
    ratio: torch.Tensor
    clips: Mapping[str, torch.Tensor]


def exp_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return ``exp(log_ratio)``, clamped as the module says."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def mean_log_ratio(
    log_ratio: torch.Tensor, counted: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """Return the mean log-ratio of a document's counted tokens, at each of its tokens: ``[T]``.

    It is 0 where none counts. Its exponential is GSPO's ratio of a sequence (arXiv:2507.18071, eq.
    7). Documents are whole in a micro-batch, so that the mean is of the whole sequence.
    """
    sums = sum_by_document(log_ratio.where(counted, 0.0), cu_seqlens)
    counts = sum_by_document(counted.to(log_ratio.dtype), cu_seqlens)
    return (sums / counts.clamp(min=1.0))[document_of(cu_seqlens, log_ratio)]


def clipped(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    *,
    low: float,
    high: float,
    dual: float | None = None,
) -> Surrogate:
    """Return ``max(-A r, -A clip(r, low, high))`` (PPO, arXiv:1707.06347, eq. 7).

    With ``dual``, at most ``-A dual`` where A < 0 (arXiv:1912.09729, eq. 5).
    """
    free = -advantages * ratio
    held = -advantages * ratio.clamp(low, high)
    # At a bound both are equal and the gradient is that of ``free``: since torch 2.14 a clamp has
    # none there.
    value = free.where(free >= held, held)
    # Where the clip removes a token's gradient, not wherever the ratio is outside.
    clips = {
        "clipped_low": (ratio < low) & (advantages < 0),
        "clipped_high": (ratio > high) & (advantages > 0),
    }
    if dual is not None:
        ceiling = -advantages * dual
        clips["clipped_dual"] = (advantages < 0) & (value > ceiling)
        value = value.where(advantages >= 0, value.minimum(ceiling))
    return Surrogate(value=value, ratio=ratio.detach(), clips=clips)


def gspo(
    log_probs: torch.Tensor,
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    counted: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    low: float,
    high: float,
    level: str,
) -> Surrogate:
    """Return the surrogate of group sequence policy optimization.

    Zheng et al. 2025, arXiv:2507.18071. ``level`` ``sequence`` (eq. 5): the ratio ``s = exp(mean
    log-ratio)`` of the whole sequence, the same value at each of its tokens. ``token`` (GSPO-token,
    eq. 13): ``sg(s) · p_t / sg(p_t)``, with the same value and a gradient through token t alone,
    for advantages that differ within a sequence; where they do not, value and gradient of the sum
    over a sequence are the same as those of ``sequence``.
    """
    mean = mean_log_ratio(log_ratio, counted, cu_seqlens)
    if level == "token":
        mean = mean.detach() + log_probs - log_probs.detach()
    return clipped(exp_ratio(mean), advantages, low=low, high=high)


def cispo(
    log_probs: torch.Tensor,
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    *,
    low: float,
    high: float,
) -> Surrogate:
    """Return ``-sg(clip(r, low, high)) A log p`` (clipped IS-weight policy optimization).

    arXiv:2506.13585, eq. 4 and 5. No token's gradient is dropped, its weight is bounded instead.
    The paper bounds from above alone: ``low = 0``.
    """
    ratio = exp_ratio(log_ratio.detach())
    value = -ratio.clamp(low, high) * advantages * log_probs
    clips = {"clipped_low": ratio < low, "clipped_high": ratio > high}
    return Surrogate(value=value, ratio=ratio, clips=clips)


def sapo(
    log_ratio: torch.Tensor, advantages: torch.Tensor, *, tau_pos: float, tau_neg: float
) -> Surrogate:
    """Return ``-(4 / τ) σ(τ (r - 1)) A`` (soft adaptive policy optimization).

    arXiv:2511.20347. The gate's slope is 1 at r = 1 and falls to both sides, the faster the larger
    the temperature τ, which is ``tau_pos`` where A > 0 and ``tau_neg`` elsewhere.
    """
    ratio = exp_ratio(log_ratio)
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    value = -(4 / tau) * (tau * (ratio - 1)).sigmoid() * advantages
    return Surrogate(value=value, ratio=ratio.detach(), clips={})


def gmpo(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    counted: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    low: float,
    high: float,
) -> Surrogate:
    """Return ``-A (Π_t clip(r_t))^(1/n)``, the same at each token of a document.

    Geometric-mean policy optimization, arXiv:2507.20673. The clip is in the logarithm and, as
    PPO's, on the side to which the advantage pulls alone: log r is at most ``high`` where A > 0,
    and at least ``-low`` where A < 0.
    """
    above = (log_ratio > high) & (advantages > 0)
    below = (log_ratio < -low) & (advantages < 0)
    held = log_ratio.masked_fill(above, high).masked_fill(below, -low)
    ratio = exp_ratio(mean_log_ratio(held, counted, cu_seqlens))
    return Surrogate(
        value=-advantages * ratio,
        ratio=ratio.detach(),
        clips={"clipped_low": below, "clipped_high": above},
    )


def dppo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    divergence: str,
    delta: float,
    cap: float,
) -> Surrogate:
    """Return ``-M A r``, where M masks tokens beyond a divergence (DPPO, arXiv:2602.04879).

    M is 0 where the update would go on to leave the trust region: where D(old, new) > ``delta`` and
    either A > 0 and r > 1, or A < 0 and r < 1. D is that of the two outcomes "this token" and "any
    other" (the paper's binary approximation): with μ the old and π the new probability |μ - π|
    (``tv``), or μ log(μ / π) + (1 - μ) log((1 - μ) / (1 - π)) (``kl``). Unlike a clip of the ratio
    it lets an unlikely token move, and holds back a likely one.

    As in the authors' code, the gradient is that of the log-prob times M A min(r, ``cap``).
    """
    log_ratio = log_probs.detach() - old_log_probs
    ratio = exp_ratio(log_ratio)
    new, old = log_probs.detach().exp(), old_log_probs.exp()
    if divergence == "tv":
        distance = (new - old).abs()
    else:
        # log(1 - p) of a certain token is held at that of the number before 1.
        least = -(1 - torch.finfo(new.dtype).eps / 2)
        others = (-old).clamp(min=least).log1p() - (-new).clamp(min=least).log1p()
        distance = -old * log_ratio + (1 - old) * others
    outside = distance > delta
    above = outside & (ratio > 1) & (advantages > 0)
    below = outside & (ratio < 1) & (advantages < 0)
    factor = (ratio.clamp(max=cap) * advantages).masked_fill(above | below, 0.0)
    value = -factor * (1 + log_probs - log_probs.detach())
    return Surrogate(value=value, ratio=ratio, clips={"clipped_low": below, "clipped_high": above})


def keeps_sequence(
    log_probs: torch.Tensor,
    sampler: torch.Tensor,
    advantages: torch.Tensor,
    counted: torch.Tensor,
    cu_seqlens: torch.Tensor,
    threshold: float,
) -> torch.Tensor:
    """Return DeepSeek-V3.2's off-policy sequence mask M: ``[T]`` bool (arXiv:2512.02556, eq. 9).

    False where A < 0 and the mean of log(sampler / policy) over the completion's tokens is above
    ``threshold``: of mistakes that the policy would hardly make itself nothing is learned.
    """
    mean = -mean_log_ratio(log_probs.detach() - sampler, counted, cu_seqlens)
    return (advantages >= 0) | (mean <= threshold)

"""Losses as the contract defines them: sums over tokens of weight times term, over one denominator.

Every function takes float64 per-token tensors ``[T]`` and returns a scalar, ``sum_t
loss_weight[t] * term[t] / denominator``. Tokens of weight zero do not enter the sum at
all, so that a term that is not finite there cannot spoil it. All logarithms are
natural.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from engine_api.distillation import Teaching

__all__ = [
    "divergence_of",
    "kl_loss",
    "kl_terms",
    "ppo_loss",
    "ppo_terms",
    "sft_loss",
    "value_loss",
    "weighted_sum",
]

KLKind = Literal["k1", "k2", "k3"]


def weighted_sum(terms: Tensor, loss_weight: Any, denominator: float) -> Tensor:
    """Return ``sum(loss_weight * terms) / denominator`` over the tokens of non-zero weight.

    Raises:
        ValueError: if the denominator is not positive.
    """
    if not denominator > 0:
        raise ValueError(f"denominator {denominator} must be positive")
    weight = _float64(loss_weight)
    counted = weight != 0
    return (weight[counted] * terms[counted]).sum() / denominator


def sft_loss(log_probs: Tensor, *, loss_weight: Any, denominator: float) -> Tensor:
    """Return the negative log-likelihood, ``term = -log_probs``."""
    return weighted_sum(-log_probs, loss_weight, denominator)


def ppo_terms(
    log_probs: Tensor,
    old_log_probs: Any,
    advantages: Any,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """Return PPO's clipped surrogate, negated (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    The ratio is clipped to ``[1 - clip_low, 1 + clip_high]``; unequal bounds are DAPO's
    clip-higher (arXiv:2503.14476, eq. 8). ``dual_clip`` c > 1 bounds the loss of a
    negative advantage A by ``-c * A`` (Ye et al. 2020, arXiv:1912.09729, eq. 5).
    """
    advantage = _float64(advantages)
    ratio = (log_probs - _float64(old_log_probs)).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    terms = torch.maximum(-advantage * ratio, -advantage * clipped)
    if dual_clip is None:
        return terms
    return torch.where(advantage < 0, torch.minimum(terms, -dual_clip * advantage), terms)


def ppo_loss(
    log_probs: Tensor,
    *,
    old_log_probs: Any,
    advantages: Any,
    loss_weight: Any,
    denominator: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """Return the weighted sum of `ppo_terms`."""
    terms = ppo_terms(
        log_probs,
        old_log_probs,
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    return weighted_sum(terms, loss_weight, denominator)


def value_loss(
    values: Tensor,
    *,
    old_values: Any,
    returns: Any,
    loss_weight: Any,
    denominator: float,
    clip: float | None = 0.2,
) -> Tensor:
    """Return the value loss, clipped unless ``clip`` is None.

    ``term = max((v - R)^2, (clip(v, old ± clip) - R)^2) / 2``; without the clip, ``(v -
    R)^2 / 2``.
    """
    target = _float64(returns)
    old = _float64(old_values)
    error = (values - target).square()
    if clip is not None:
        near = torch.minimum(torch.maximum(values, old - clip), old + clip)
        error = torch.maximum(error, (near - target).square())
    return weighted_sum(0.5 * error, loss_weight, denominator)


def kl_terms(log_probs: Tensor, ref_log_probs: Any, kind: KLKind) -> Tensor:
    """Return one-sample estimates of KL(policy || reference).

    Schulman 2020, "Approximating KL Divergence".

    With ``d = log_probs - ref_log_probs``: k1 is ``d``, k2 ``d^2 / 2``, k3 ``exp(-d) -
    1 + d``.
    """
    d = log_probs - _float64(ref_log_probs)
    if kind == "k1":
        return d
    return d.square() / 2 if kind == "k2" else torch.expm1(-d) + d


def kl_loss(
    log_probs: Tensor,
    *,
    ref_log_probs: Any,
    loss_weight: Any,
    denominator: float,
    kind: KLKind = "k3",
) -> Tensor:
    """Return the weighted sum of `kl_terms`, differentiable in ``log_probs``."""
    return weighted_sum(kl_terms(log_probs, ref_log_probs, kind), loss_weight, denominator)


def divergence_of(
    log_p: Tensor, log_q: Tensor, teaching: Teaching, *, ids: Tensor | None = None
) -> Tensor:
    """Return the divergence ``[T]`` of a student's rows of log-probs to a teacher's, float64.

    With p the student's and q the teacher's probabilities, reverse KL is Σ p log(p / q),
    forward KL Σ q log(q / p), and the generalized JSD (arXiv:2306.13649, eq. 1) β KL(q ‖ m) +
    (1 - β) KL(p ‖ m) with m = β q + (1 - β) p.

    Args:
        log_p, log_q: ``[T, classes]``.
        teaching: which divergence, and β.
        ids: ``[T, classes - 1]``; a class with the id -1 does not exist. None: all do.
    """
    p, q = log_p.exp(), log_q.exp()
    if teaching.divergence == "reverse_kl":
        terms = p * (log_p - log_q)
    elif teaching.divergence == "forward_kl":
        terms = q * (log_q - log_p)
    else:
        beta = teaching.beta
        log_m = (beta * q + (1 - beta) * p).log()
        terms = beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)
    if ids is not None:
        absent = torch.cat([ids < 0, torch.zeros_like(ids[:, :1], dtype=torch.bool)], -1)
        terms = terms.masked_fill(absent, 0.0)
    return terms.sum(-1)


def _float64(array: Any) -> Tensor:
    return torch.as_tensor(array).to(device="cpu", dtype=torch.float64)

"""Rollout correction, with importance weights and rejection for a rollout's completions.

A rollout (other kernels, FP8) samples from q while the engine's same weights give p. Let r_t = p_t
/ q_t of a token: a policy gradient over q's samples is one under p when each term is multiplied by
a ratio. There are ratios at three levels:

    token       r_t
    sequence    Π r_t over the counted tokens of a document
    geometric   (Π r_t)^(1/n), the exponential of the mean log-ratio

Weights (``truncate``, ``icepop``) and rejection (``is_kept``) are separate, and both may be on. All
of it is a function of log-probs that carry no gradient. A log-ratio is clamped (``exp_ratio``; a
sequence's after its sum), so that nothing overflows.

Sources: Ionides 2008, "Truncated Importance Sampling" (J. Comput. Graph. Stat. 17); Yao et al.
2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (token TIS); Liu et
al. 2025, "When Speed Kills Stability" (sequence weights, sequence and geometric rejection); Ling
Team 2025, arXiv:2510.18855 (IcePop).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine_api.losses import where_counted
from engine_trainer.algorithms.packed import document_of, sum_by_document
from engine_trainer.algorithms.surrogates import exp_ratio

if TYPE_CHECKING:
    from engine_trainer.config import CorrectionSection


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratios:
    """p / q of packed documents at every level.

    All tensors are float64.

    Attributes:
        log: ``[T]`` log p - log q, not clamped; 0 where a token does not count.
        token: ``[T]``; 1 where a token does not count.
        sequence, geometric: ``[D]``; 1 for a document without a counted token.
        counts: ``[D]``, counted tokens.
        counted: ``[T]`` bool.
        document: ``[T]`` int64, which document a token is of.
    """

    log: torch.Tensor
    token: torch.Tensor
    sequence: torch.Tensor
    geometric: torch.Tensor
    counts: torch.Tensor
    counted: torch.Tensor
    document: torch.Tensor

    def per_document(self, values: torch.Tensor) -> torch.Tensor:
        """Sum ``values`` ``[T]`` over each document's counted tokens: ``[D]`` float64."""
        sums = torch.zeros_like(self.counts)
        return sums.index_add_(0, self.document, where_counted(values.double(), self.counted))

    def units(self, level: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ratios of a level and which of them count.

        Both are ``[T]`` for tokens, ``[D]`` for sequences.
        """
        if level == "token":
            return self.token, self.counted
        return (self.sequence if level == "sequence" else self.geometric), self.counts > 0

    def spread(self, values: torch.Tensor, level: str) -> torch.Tensor:
        """Return the values of ``units(level)`` per token: ``[T]``."""
        return values if level == "token" else values[self.document]


def ratios(
    engine: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor
) -> Ratios:
    """Return the engine's probabilities over the rollout's, at every level.

    Args:
        engine, rollout: ``[T]`` log-probs, of the engine and as the rollout gave them; finite where
            a token counts.
        mask: ``[T]``, above 0 where a token counts.
        cu_seqlens: ``[D+1]`` document boundaries.
    """
    counted = mask > 0
    document = document_of(cu_seqlens, mask)
    log = where_counted(engine.detach().double() - rollout.detach().double(), mask)
    counts = sum_by_document(counted.double(), cu_seqlens)
    sums = sum_by_document(log, cu_seqlens)
    return Ratios(
        log=log,
        token=exp_ratio(log),
        sequence=exp_ratio(sums),
        geometric=exp_ratio(sums / counts.clamp(min=1.0)),
        counts=counts,
        counted=counted,
        document=document,
    )


def truncate(ratio: torch.Tensor, cap: float) -> torch.Tensor:
    """Return ``min(r, cap)`` of tokens or sequences (truncated importance sampling)."""
    return ratio.clamp(max=cap)


def icepop(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return r within ``[low, high]`` and 0 outside (IcePop, arXiv:2510.18855)."""
    return ratio * is_kept(ratio, low, high)


def is_kept(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return a mask of the units that rejection keeps.

    Both bounds belong to the band.
    """
    return (ratio >= low) & (ratio <= high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrected:
    """The correction of a loss.

    Attributes:
        weights: ``[T]`` float32, factor of the policy term; 1 without weights.
        kept: ``[T]`` bool, False where a token was rejected and carries no loss at all.
        sums: for ``correction_figures``; they add over ranks.
    """

    weights: torch.Tensor
    kept: torch.Tensor
    sums: dict[str, torch.Tensor]


def correct(given: Ratios, section: CorrectionSection) -> Corrected:
    """Return weights and rejection as ``section`` says, without a gradient."""
    weights, weight_sums = _weigh(given, section)
    kept, reject_sums = _reject(given, section)
    return Corrected(weights=weights.float(), kept=kept, sums=weight_sums | reject_sums)


def correction_figures(sums: Mapping[str, float], section: CorrectionSection) -> dict[str, float]:
    """Return ``correction/…`` from sums over all ranks.

    It is empty where nothing counts.

    A fraction is of the units (tokens or sequences) of its level. With weights: ``weight_mean``,
    ``ess`` (effective sample size over the number of units, Kish: (Σw)² / (n Σw²), 0 to 1), and
    ``clipped`` (fraction above the cap), or for IcePop ``masked_low`` and ``masked_high``. With
    rejection: ``rejected_low``, ``rejected_high`` and ``rejected_tokens`` (the fraction of tokens
    that lost their loss).
    """
    figures: dict[str, float] = {}
    if section.weighted and (units := sums["correction_units"]):
        figures["weight_mean"] = sums["correction_weight"] / units
        figures["ess"] = effective_size(
            sums["correction_weight"], sums["correction_weight_square"], units
        )
        high = "masked_high" if section.weight == "icepop" else "clipped"
        figures[high] = sums["correction_high"] / units
        if section.weight == "icepop":
            figures["masked_low"] = sums["correction_low"] / units
    if section.reject != "none" and (units := sums["correction_judged"]):
        figures["rejected_low"] = sums["correction_rejected_low"] / units
        figures["rejected_high"] = sums["correction_rejected_high"] / units
        figures["rejected_tokens"] = sums["correction_rejected_tokens"] / sums["correction_tokens"]
    return {f"correction/{name}": value for name, value in figures.items()}


def effective_size(weight: float, square: float, count: float) -> float:
    """Return Kish's effective sample size as a fraction, ``(Σw)² / (n Σw²)``.

    It is 0 when every weight is 0.
    """
    return weight**2 / (count * square) if square else 0.0


def _weigh(
    given: Ratios, section: CorrectionSection
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    if not section.weighted:
        return torch.ones_like(given.token), {}
    level = "sequence" if section.weight == "sequence" else "token"
    ratio, counted = given.units(level)
    if section.weight == "icepop":
        low = section.low
        high = section.high
        weight = icepop(ratio, low, high)
    else:
        low = 0.0
        high = section.cap
        weight = truncate(ratio, section.cap)
    units = weight * counted
    return given.spread(weight, level), {
        "correction_units": counted.sum(),
        "correction_weight": units.sum(),
        "correction_weight_square": units.square().sum(),
        "correction_low": ((ratio < low) & counted).sum(),
        "correction_high": ((ratio > high) & counted).sum(),
    }


def _reject(
    given: Ratios, section: CorrectionSection
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    if section.reject == "none":
        return torch.ones_like(given.counted), {}
    ratio, counted = given.units(section.reject)
    low, high = section.bounds
    kept = given.spread(is_kept(ratio, low, high), section.reject)
    return kept, {
        "correction_judged": counted.sum(),
        "correction_tokens": given.counted.sum(),
        "correction_rejected_low": ((ratio < low) & counted).sum(),
        "correction_rejected_high": ((ratio > high) & counted).sum(),
        "correction_rejected_tokens": (~kept & given.counted).sum(),
    }

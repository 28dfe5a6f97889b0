"""The built-in policy losses, in the form that every policy loss has.

Each is a function of ``PolicyTokens`` and options, and returns ``Σ_t weight_t · S_t`` with metrics
that are sums over tokens, too. ``engine_trainer.algorithms.surrogates`` has the terms S.
"""

from __future__ import annotations

import torch

from engine_api.errors import ConfigError
from engine_api.results import LossOutput
from engine_trainer.algorithms.inputs import PolicyTokens
from engine_trainer.algorithms.surrogates import (
    Surrogate,
    cispo,
    clipped,
    dppo,
    exp_ratio,
    gmpo,
    gspo,
    sapo,
)


def ppo(
    tokens: PolicyTokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossOutput:
    """Return PPO's clipped loss (arXiv:1707.06347, eq. 7; see ``surrogates.clipped``)."""
    return weighted_sum(
        tokens,
        clipped(
            exp_ratio(tokens.log_ratio),
            tokens.advantages,
            low=1 - clip_low,
            high=1 + clip_high,
            dual=dual_clip,
        ),
    )


def gspo_sequence(
    tokens: PolicyTokens, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> LossOutput:
    """Return GSPO's loss (arXiv:2507.18071, eq. 5; see ``surrogates.gspo``)."""
    return weighted_sum(tokens, _gspo(tokens, clip_low, clip_high, "sequence"))


def gspo_token(
    tokens: PolicyTokens, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> LossOutput:
    """Return the loss of GSPO-token (arXiv:2507.18071, eq. 13; see ``surrogates.gspo``)."""
    return weighted_sum(tokens, _gspo(tokens, clip_low, clip_high, "token"))


def cispo_loss(
    tokens: PolicyTokens, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> LossOutput:
    """Return CISPO's loss (arXiv:2506.13585, eq. 4; see ``surrogates.cispo``)."""
    return weighted_sum(
        tokens,
        cispo(
            tokens.log_probs,
            tokens.log_ratio,
            tokens.advantages,
            low=1 - clip_low,
            high=1 + clip_high,
        ),
    )


def sapo_loss(tokens: PolicyTokens, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> LossOutput:
    """Return SAPO's loss with the paper's temperatures (arXiv:2511.20347; ``surrogates.sapo``)."""
    _check_above_0(tau_pos=tau_pos, tau_neg=tau_neg)
    return weighted_sum(
        tokens, sapo(tokens.log_ratio, tokens.advantages, tau_pos=tau_pos, tau_neg=tau_neg)
    )


def gmpo_loss(
    tokens: PolicyTokens, *, log_clip_low: float = 0.4, log_clip_high: float = 0.4
) -> LossOutput:
    """Return GMPO's loss with the paper's clip (arXiv:2507.20673; see ``surrogates.gmpo``)."""
    _check_above_0(log_clip_low=log_clip_low, log_clip_high=log_clip_high)
    return weighted_sum(
        tokens,
        gmpo(
            tokens.log_ratio,
            tokens.advantages,
            tokens.mask,
            tokens.cu_seqlens,
            low=log_clip_low,
            high=log_clip_high,
        ),
    )


def dppo_tv(tokens: PolicyTokens, *, delta: float = 0.15, cap: float = 20.0) -> LossOutput:
    """Return DPPO's loss with the total variation (arXiv:2602.04879; see ``surrogates.dppo``)."""
    return weighted_sum(tokens, _dppo(tokens, "tv", delta, cap))


def dppo_kl(tokens: PolicyTokens, *, delta: float = 0.05, cap: float = 20.0) -> LossOutput:
    """Return DPPO's loss with the KL divergence (arXiv:2602.04879; see ``surrogates.dppo``)."""
    return weighted_sum(tokens, _dppo(tokens, "kl", delta, cap))


def weighted_sum(tokens: PolicyTokens, surrogate: Surrogate) -> LossOutput:
    """Return the weighted sum of a surrogate, with its clips and its ratio as metrics."""
    metrics: dict[str, torch.Tensor | float] = {
        name: (where & tokens.mask).sum() for name, where in surrogate.clips.items()
    }
    metrics["ratio"] = (surrogate.ratio * tokens.mask).sum()
    return LossOutput(loss=(tokens.weight * surrogate.value).sum(), metrics=metrics)


def _gspo(tokens: PolicyTokens, clip_low: float, clip_high: float, level: str) -> Surrogate:
    return gspo(
        tokens.log_probs,
        tokens.log_ratio,
        tokens.advantages,
        tokens.mask,
        tokens.cu_seqlens,
        low=1 - clip_low,
        high=1 + clip_high,
        level=level,
    )


def _dppo(tokens: PolicyTokens, divergence: str, delta: float, cap: float) -> Surrogate:
    _check_above_0(delta=delta, cap=cap)
    return dppo(
        tokens.log_probs,
        tokens.old_log_probs,
        tokens.advantages,
        divergence=divergence,
        delta=delta,
        cap=cap,
    )


def _check_above_0(**options: float) -> None:
    for name, value in options.items():
        if not value > 0:
            raise ConfigError(
                f"algorithm.loss_options.{name}",
                f"expected a number above 0, got {value}",
                remedy="give a number above 0",
            )

"""The built-in policy losses, in the form that every policy loss has.

Each is a function of ``PolicyTokens`` and options, and returns ``Σ_t weight_t · S_t`` with metrics
that are sums over tokens, too. ``engine_trainer.algorithms.surrogates`` has the terms S.
"""

from __future__ import annotations

import torch

from engine_api.results import LossOutput
from engine_trainer.algorithms.inputs import PolicyTokens
from engine_trainer.algorithms.surrogates import Surrogate, cispo, clipped, exp_ratio, gspo


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

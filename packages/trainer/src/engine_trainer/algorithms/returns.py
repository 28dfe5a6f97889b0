"""Per-token advantages, from rewards along a completion to returns, GAE and whitening.

All are functions of packed documents. ``mask [T]`` is above 0 on the tokens that the policy chose;
other tokens (the prompt, a tool's output) are no actions and are passed over, so that the token
after an action is the next one that counts. By the contract's alignment ``values[t]`` is about the
state before token t, that is V(s_t) of the action t. The value after a document's last action is 0,
whether the completion ended by itself or was cut. All results are float64 and 0 where a token does
not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine_api.codec import register
from engine_trainer.algorithms.packed import document_of

VARIANCE_FLOOR = 1e-8
"""Added to the variance, as in verl's masked_whiten."""


def token_rewards(
    scores: torch.Tensor,
    mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    kl: torch.Tensor | None = None,
    coefficient: float = 0.0,
) -> torch.Tensor:
    """Return the score at each completion's last token, and the KL penalty at every token.

    As in Ziegler et al. 2019 (arXiv:1909.08593, section 2.1) and InstructGPT (arXiv:2203.02155, eq.
    2).

    Args:
        scores: ``[D]``, the reward of each whole completion; that of a document without a counted
            token is lost.
        mask: ``[T]``.
        cu_seqlens: ``[D+1]``.
        kl: ``[T]`` nats, of the policy to the reference; see ``kl_divergence``.
        coefficient: factor of ``kl``.

    Returns:
        ``[T]`` float64.
    """
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    at, document = _counted(mask, cu_seqlens)
    if kl is not None:
        rewards[at] = -coefficient * kl[at].double()
    last = torch.ones(len(at), dtype=torch.bool)
    last[:-1] = document[1:] != document[:-1]
    rewards[at[last]] += scores.double()[document[last]]
    return rewards


def returns_to_go(
    rewards: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor, gamma: float = 1.0
) -> torch.Tensor:
    """Return G_t = Σ_k γ^k r_{t+k} over the actions from t to the end of the document: ``[T]``.

    With ``token_rewards`` and γ = 1 it is the advantage of REINFORCE++ before its normalization
    (arXiv:2501.03262): the reward less the KL from t on.
    """
    at, document = _counted(mask, cu_seqlens)
    return _spread(_discount(rewards[at].double(), document, gamma), at, mask)


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return generalized advantage estimates and the critic's targets.

    Schulman et al. 2016, arXiv:1506.02438, eq. 16: ``δ_t = r_t + γ V(s_{t+1}) - V(s_t)`` and ``A_t
    = Σ_k (γλ)^k δ_{t+k}``.

    Args:
        rewards: ``[T]``, see ``token_rewards``.
        values: ``[T]``, V(s_t).
        mask: ``[T]``.
        cu_seqlens: ``[D+1]``.
        gamma: discount, 0 to 1.
        lam: λ, 0 (one-step) to 1 (returns less V).

    Returns:
        Advantages and the critic's targets ``A + V``, both ``[T]``.
    """
    at, document = _counted(mask, cu_seqlens)
    value = values[at].double()
    following = torch.zeros_like(value)
    following[:-1] = torch.where(document[1:] == document[:-1], value[1:], 0.0)
    delta = rewards[at].double() + gamma * following - value
    advantages = _discount(delta, document, gamma * lam)
    return _spread(advantages, at, mask), _spread(advantages + value, at, mask)


@register
@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """The count, mean and squared deviations of numbers.

    Parts on several ranks merge to those of the whole (Chan et al. 1979).
    """

    count: int
    mean: float
    deviations: float
    """Σ (x - mean)²."""

    @staticmethod
    def of(values: torch.Tensor, mask: torch.Tensor) -> Moments:
        """Return the moments of the counted ones of ``values`` ``[T]``."""
        counted = values[mask > 0].double()
        if not len(counted):
            return Moments(count=0, mean=0.0, deviations=0.0)
        mean = counted.mean()
        return Moments(
            count=len(counted), mean=float(mean), deviations=float((counted - mean).square().sum())
        )

    @staticmethod
    def merge(parts: Sequence[Moments]) -> Moments:
        """Return the moments of all parts together.

        They are the same on every rank that has the same parts.
        """
        count = sum(p.count for p in parts)
        if not count:
            return Moments(count=0, mean=0.0, deviations=0.0)
        mean = math.fsum(p.count * p.mean for p in parts) / count
        deviations = math.fsum(p.deviations + p.count * (p.mean - mean) ** 2 for p in parts)
        return Moments(count=count, mean=mean, deviations=deviations)

    @property
    def variance(self) -> float:
        """The variance with Bessel's correction.

        It is 0 for fewer than two numbers.
        """
        return self.deviations / (self.count - 1) if self.count > 1 else 0.0


def whiten(values: torch.Tensor, mask: torch.Tensor, moments: Moments) -> torch.Tensor:
    """Return ``(x - mean) / sqrt(variance + 1e-8)`` of the counted tokens.

    REINFORCE++'s normalization over the global batch (arXiv:2501.03262), and what PPO does with its
    advantages in practice.

    Args:
        values: ``[T]``.
        mask: ``[T]``.
        moments: of the whole batch, merged over all data-parallel ranks.

    Returns:
        ``[T]`` float64.
    """
    scaled = (values.double() - moments.mean) / math.sqrt(moments.variance + VARIANCE_FLOOR)
    return torch.where(mask > 0, scaled, 0.0)


def _counted(mask: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions ``[N]`` of the tokens that count, and the document of each."""
    at = (mask > 0).nonzero()[:, 0]
    return at, document_of(cu_seqlens)[at]


def _discount(values: torch.Tensor, document: torch.Tensor, factor: float) -> torch.Tensor:
    """Return ``y_t = x_t + factor · y_{t+1}`` within each document.

    It is computed by doubling: after a round of ``reach`` r, y_t sums 2r terms.
    """
    longest = int(torch.bincount(document).max()) if len(document) else 0
    reach = 1
    while reach < longest:
        same = document[reach:] == document[:-reach]
        # Chosen, not multiplied by 0, so that numbers that are not finite stay in their document.
        values = torch.cat(
            [
                values[:-reach] + torch.where(same, factor**reach * values[reach:], 0.0),
                values[-reach:],
            ]
        )
        reach *= 2
    return values


def _spread(values: torch.Tensor, at: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(mask.shape, dtype=torch.float64)
    whole[at] = values
    return whole

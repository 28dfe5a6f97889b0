"""Policy losses as sums over tokens, with metrics that are sums too.

Fields of the batch, all ``[T]``: ``loss_weight`` (0 on prompts; see
``engine_api.losses.token_weights``), ``advantages``, ``old_log_probs`` (of the policy that the
ratio is taken against), when there is a KL term ``ref_log_probs``, and with a rollout correction
``correction`` (see ``engine_trainer.algorithms.correction``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from engine_api.batch import Batch
from engine_api.config import near_matches
from engine_api.errors import ConfigError
from engine_api.losses import Aggregation
from engine_api.results import LossOutput, TokenOutputs

if TYPE_CHECKING:
    import torch

Estimator = Literal["k1", "k2", "k3"]
ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3")

# exp(20) = 4.9e8: past it a ratio says only "far away", and float32 would overflow at 88.
MAX_LOG_RATIO = 20.0


def kl_divergence(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """KL(policy ‖ reference) a token, estimated from one sample of the policy (Schulman 2020, "Approximating KL").

    With ``d = log_probs - ref_log_probs``: ``k1 = d`` (unbiased, may be negative), ``k2 = d² / 2`` (biased, its
    gradient is that of the KL on policy), ``k3 = exp(-d) - 1 + d`` (unbiased, never negative). As a loss
    term, ``k1`` has an expected gradient of zero on policy: it is there to be measured rather than minimised.

    Args:
        log_probs, ref_log_probs: ``[T]`` floating; the difference is clamped to ±``MAX_LOG_RATIO``.

    Returns:
        ``[T]`` nats.
    """
    d = (log_probs - ref_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return d
    return d.square() / 2 if estimator == "k2" else (-d).exp() - 1 + d


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """PPO's clipped objective (arXiv:1707.06347, eq. 7) a token, with what DAPO and GRPO add.

    With ``r = exp(log_probs - old_log_probs)``, advantage A, weight w and correction c, the sum over tokens of::

        w · ( c · max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) + kl_coef · KL - entropy_coef · H )

    and for A < 0 the first term is at most ``-A dual_clip`` (arXiv:1912.09729, eq. 5).

    Attributes:
        clip_low, clip_high: DAPO's clip-higher is ``clip_high > clip_low`` (arXiv:2503.14476, eq. 8).
        dual_clip: above 1, or None.
        kl_coef: weight of the KL to ``ref_log_probs``; 0: the field is not read.
        kl_estimator: see ``kl_divergence``; GRPO's is ``k3`` (arXiv:2402.03300, eq. 4).
        entropy_coef: weight of the entropy bonus.
        entropy: compute the entropy as a metric although its weight is 0.
        on_policy: the weights are still those that made the old log-probs, so that r is 1 and its gradient is that
            of the log-probs: ``old_log_probs`` is not read, and need not have been computed.
        corrected: c is the field ``correction``; else it is 1.

    Metrics (sums over tokens with weight): ``tokens``, ``weight``, ``policy_loss`` (weighted), ``ratio``,
    ``clipped_low``, ``clipped_high``, ``clipped_dual`` (counts), ``old_kl`` (k3 of old to new policy) and, where
    computed, ``ref_kl``, ``entropy``.

    Raises:
        ConfigError: for a value outside its range.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: Estimator = "k3"
    entropy_coef: float = 0.0
    entropy: bool = False
    on_policy: bool = False
    corrected: bool = False

    def __post_init__(self) -> None:
        _check(0 <= self.clip_low <= 1, "clip_low", self.clip_low, "give a number in [0, 1]")
        _check(self.clip_high >= 0, "clip_high", self.clip_high, "give a number >= 0")
        _check(self.dual_clip is None or self.dual_clip > 1, "dual_clip", self.dual_clip, "give a number > 1, or null")
        _check(self.kl_coef >= 0, "kl_coef", self.kl_coef, "give a number >= 0")
        _check(self.kl_estimator in ESTIMATORS, "kl_estimator", self.kl_estimator,
               near_matches(str(self.kl_estimator), ESTIMATORS))  # fmt: skip

    @property
    def needs(self) -> tuple[str, ...]:
        """What the engine must compute."""
        return ("log_probs", "entropy") if self.entropy or self.entropy_coef else ("log_probs",)

    @property
    def only_advantages(self) -> bool:
        """Whether a token without an advantage has no gradient, so that it need not be trained on."""
        return self.kl_coef == 0 and self.entropy_coef == 0

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        """The sum over ``batch``; see the class."""
        assert outputs.log_probs is not None
        weight, advantages = batch.loss_weight, batch["advantages"]
        old = outputs.log_probs.detach() if self.on_policy else batch["old_log_probs"]
        log_ratio = (outputs.log_probs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        policy, metrics = self._policy(log_ratio, advantages, weight > 0)
        loss = (self._policy_weight(batch) * policy).sum()
        metrics |= {"tokens": (weight > 0).sum(), "weight": weight.sum(), "policy_loss": loss.detach()}
        loss = loss + self._kl(outputs.log_probs, batch, metrics) + self._entropy(outputs.entropy, weight, metrics)
        return LossOutput(loss=loss, metrics=metrics)

    def coefficients(self, batch: Batch) -> torch.Tensor | None:
        """``[T]``: ``-w c A``, the derivative by each log-prob on policy, where r is 1; else None (it depends on r)."""
        known = self.on_policy and self.only_advantages
        return -self._policy_weight(batch) * batch["advantages"] if known else None

    def _policy_weight(self, batch: Batch) -> torch.Tensor:
        return batch.loss_weight * batch["correction"] if self.corrected else batch.loss_weight

    def _policy(
        self, log_ratio: torch.Tensor, advantages: torch.Tensor, counted: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ratio = log_ratio.exp()
        low, high = 1 - self.clip_low, 1 + self.clip_high
        value = (-advantages * ratio).maximum(-advantages * ratio.clamp(low, high))
        # Counted where the clip holds the token back, not wherever the ratio is outside.
        clipped = {
            "clipped_low": (ratio < low) & (advantages < 0),
            "clipped_high": (ratio > high) & (advantages > 0),
        }
        if self.dual_clip is not None:
            ceiling = -advantages * self.dual_clip
            clipped["clipped_dual"] = (advantages < 0) & (value > ceiling)
            value = value.where(advantages >= 0, value.minimum(ceiling))
        metrics = {name: (where & counted).sum() for name, where in clipped.items()}
        metrics["ratio"] = (ratio.detach() * counted).sum()
        metrics["old_kl"] = ((ratio - 1 - log_ratio).detach() * counted).sum()
        return value, metrics

    def _kl(self, log_probs: torch.Tensor, batch: Batch, metrics: dict[str, torch.Tensor]) -> torch.Tensor | float:
        if self.kl_coef == 0:
            return 0.0
        kl = kl_divergence(log_probs, batch["ref_log_probs"], self.kl_estimator)
        metrics["ref_kl"] = (kl.detach() * (batch.loss_weight > 0)).sum()
        return self.kl_coef * (batch.loss_weight * kl).sum()

    def _entropy(
        self, entropy: torch.Tensor | None, weight: torch.Tensor, metrics: dict[str, torch.Tensor]
    ) -> torch.Tensor | float:
        if entropy is None:
            return 0.0
        metrics["entropy"] = (entropy.detach() * (weight > 0)).sum()
        return -self.entropy_coef * (weight * entropy).sum() if self.entropy_coef else 0.0


def denominator(mode: Aggregation, token_counts: Sequence[int]) -> float:
    """What a sum with ``token_weights(…, mode)`` is divided by, over the whole optimizer batch of all ranks.

    Args:
        mode: ``token-mean``: the number of tokens (the sum of the weights; DAPO's token-level loss);
            ``seq-mean-token-sum``, ``seq-mean-token-mean``: the number of sequences.
        token_counts: one a sequence, the tokens that count; a sequence without any is no sequence here.

    Returns:
        A number >= 0; 0 when nothing counts at all.
    """
    if mode == "token-mean":
        return float(sum(token_counts))
    return float(sum(count > 0 for count in token_counts))


def _check(ok: bool, name: str, value: object, remedy: str) -> None:
    if not ok:
        raise ConfigError(f"algorithm.{name}", f"{value!r} is out of range", remedy=remedy)

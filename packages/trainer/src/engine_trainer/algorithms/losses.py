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
from engine_trainer.algorithms.packed import document_of, sum_by_document
from engine_trainer.algorithms.surrogates import MAX_LOG_RATIO, Surrogate, cispo, clipped, exp_ratio, gspo

if TYPE_CHECKING:
    import torch

Estimator = Literal["k1", "k2", "k3"]
ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3")
Kind = Literal["ppo", "gspo", "gspo_token", "cispo"]
KINDS: tuple[Kind, ...] = ("ppo", "gspo", "gspo_token", "cispo")


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
    """A policy gradient with clipped or bounded ratios, and what DAPO and GRPO add.

    With ``r`` the ratio of ``log_probs`` to ``old_log_probs``, advantage A, weight w and correction c, the sum over tokens of::

        w · ( c · S(r, A) + kl_coef · KL - entropy_coef · H )

    where S is the surrogate of ``kind`` (``engine_trainer.algorithms.surrogates``).

    Attributes:
        kind: ``ppo``, S = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) (arXiv:1707.06347, eq. 7); ``gspo`` and
            ``gspo_token``, with the ratio of the sequence (arXiv:2507.18071); ``cispo``, with r as a bounded weight
            (arXiv:2506.13585).
        clip_low, clip_high: DAPO's clip-higher is ``clip_high > clip_low`` (arXiv:2503.14476, eq. 8).
        dual_clip: for ``ppo``, above 1: where A < 0, S is at most ``-A dual_clip`` (arXiv:1912.09729, eq. 5); or None.
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

    kind: Kind = "ppo"
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
        _check(self.kind in KINDS, "loss", self.kind, near_matches(str(self.kind), KINDS))
        _check(0 <= self.clip_low <= 1, "clip_low", self.clip_low, "give a number in [0, 1]")
        _check(self.clip_high >= 0, "clip_high", self.clip_high, "give a number >= 0")
        _check(self.dual_clip is None or self.dual_clip > 1, "dual_clip", self.dual_clip, "give a number > 1, or null")
        _check(self.dual_clip is None or self.kind == "ppo", "dual_clip", self.dual_clip, "null: it belongs to ppo")
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
        weight, counted = batch.loss_weight, batch.loss_weight > 0
        log_ratio = outputs.log_probs - (outputs.log_probs.detach() if self.on_policy else batch["old_log_probs"])
        surrogate = self._surrogate(outputs.log_probs, log_ratio, batch)
        loss = (self._policy_weight(batch) * surrogate.value).sum()
        metrics = {name: (where & counted).sum() for name, where in surrogate.held.items()}
        metrics |= {"tokens": counted.sum(), "weight": weight.sum(), "policy_loss": loss.detach(),
                    "ratio": (surrogate.ratio * counted).sum(), "old_kl": _old_kl(log_ratio.detach(), counted)}  # fmt: skip
        loss = loss + self._kl(outputs.log_probs, batch, metrics) + self._entropy(outputs.entropy, weight, metrics)
        return LossOutput(loss=loss, metrics=metrics)

    def coefficients(self, batch: Batch) -> torch.Tensor | None:
        """``[T]``: the derivative by each log-prob on policy, where r is 1; else None (it depends on r).

        ``-w c A``, and for ``gspo`` its mean over the sequence: each of a sequence's tokens has the same part in its ratio.
        """
        if not (self.on_policy and self.only_advantages):
            return None
        own = -self._policy_weight(batch) * batch["advantages"]
        if self.kind != "gspo":
            return own
        counted = (batch.loss_weight > 0).to(own.dtype)
        mean = sum_by_document(own, batch.cu_seqlens) / sum_by_document(counted, batch.cu_seqlens).clamp(min=1.0)
        return mean[document_of(batch.cu_seqlens, own.device)] * counted

    def _policy_weight(self, batch: Batch) -> torch.Tensor:
        return batch.loss_weight * batch["correction"] if self.corrected else batch.loss_weight

    def _surrogate(self, log_probs: torch.Tensor, log_ratio: torch.Tensor, batch: Batch) -> Surrogate:
        advantages, low, high = batch["advantages"], 1 - self.clip_low, 1 + self.clip_high
        if self.kind == "ppo":
            return clipped(exp_ratio(log_ratio), advantages, low=low, high=high, dual=self.dual_clip)
        if self.kind == "cispo":
            return cispo(log_probs, log_ratio, advantages, low=low, high=high)
        return gspo(log_probs, log_ratio, advantages, batch.loss_weight > 0, batch.cu_seqlens, low=low, high=high,
                    level="token" if self.kind == "gspo_token" else "sequence")  # fmt: skip

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


def _old_kl(log_ratio: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return ((log_ratio.exp() - 1 - log_ratio) * counted).sum()


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

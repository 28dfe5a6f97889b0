"""Objectives of reinforcement learning for an engine (sums, float32) and the oracle (float64).

Log-probs are the policy's now; the batch carries ``old_log_probs`` of the policy that
sampled and ``ref_log_probs`` of the reference. Every term is summed over tokens with
its ``loss_weight``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine_api.batch import Batch
from engine_api.results import LossOutput, TokenOutputs
from engine_conformance.fixtures import PackedDocuments
from engine_conformance.oracle import OracleModel
from engine_conformance.oracle.losses import KLKind, kl_terms, ppo_terms, value_loss, weighted_sum

__all__ = [
    "GRPO",
    "PPO",
    "Policy",
    "clipped_value",
    "nearest_value_bound",
    "oracle_clipped_value",
    "ratio_is_one",
    "value_is_old",
]

VALUE_CLIP = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A clipped surrogate with a KL to the reference in the loss and an entropy bonus.

    Attributes:
        clip: epsilon of PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7).
        kl: weight of the KL to the reference.
        estimator: k2 or k3 of Schulman 2020, "Approximating KL Divergence"; GRPO's is k3
            (arXiv:2402.03300, eq. 4). It is bare, without an importance ratio: an engine is held to
            the loss that it is given, whatever that descends to.
        entropy: weight of the entropy bonus (arXiv:1707.06347, eq. 9).
    """

    clip: float
    kl: float
    estimator: KLKind
    entropy: float

    @property
    def needs(self) -> tuple[str, ...]:
        """The outputs that the engine must compute."""
        return ("log_probs", "entropy") if self.entropy else ("log_probs",)

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        """Return the sum, with sums of clipped tokens, weight and weighted KL as metrics."""
        assert outputs.log_probs is not None
        weight = batch.loss_weight
        advantage = batch["advantages"]
        ratio = (outputs.log_probs - batch["old_log_probs"]).exp()
        bounded = ratio.clamp(1 - self.clip, 1 + self.clip)
        divergence = self._kl(outputs.log_probs - batch["ref_log_probs"])
        terms = torch.maximum(-advantage * ratio, -advantage * bounded) + self.kl * divergence
        if self.entropy:
            assert outputs.entropy is not None
            terms = terms - self.entropy * outputs.entropy
        clipped = (ratio != bounded) & (weight > 0)
        kl = (weight * divergence).sum().detach()
        metrics = {"clipped": clipped.sum(), "weight": weight.sum(), "kl": kl}
        return LossOutput(loss=(weight * terms).sum(), metrics=metrics)

    def _kl(self, d: Tensor) -> Tensor:
        return d.square() / 2 if self.estimator == "k2" else torch.expm1(-d) + d

    def oracle(self, oracle: OracleModel, batch: PackedDocuments, denominator: float) -> Tensor:
        """Return the same loss in float64, divided by the denominator."""
        outputs = oracle.token_outputs(batch.input_ids, batch.cu_seqlens)
        terms = ppo_terms(
            outputs.log_probs,
            batch.old_log_probs,
            batch.advantages,
            clip_low=self.clip,
            clip_high=self.clip,
        )
        terms = terms + self.kl * kl_terms(outputs.log_probs, batch.ref_log_probs, self.estimator)
        return weighted_sum(terms - self.entropy * outputs.entropy, batch.loss_weight, denominator)

    def oracle_metrics(
        self, oracle: OracleModel, batch: PackedDocuments
    ) -> tuple[int, float, float]:
        """Return the oracle's metrics, and how near to a bound a ratio comes.

        The metrics are the number of clipped tokens and the weighted sum of KLs.
        """
        log_probs = oracle.token_outputs(batch.input_ids, batch.cu_seqlens).log_probs.detach()
        counted = torch.as_tensor(batch.loss_weight) > 0
        ratio = (log_probs - torch.as_tensor(batch.old_log_probs).double()).exp()[counted]
        kl = weighted_sum(
            kl_terms(log_probs, batch.ref_log_probs, self.estimator), batch.loss_weight, 1.0
        )
        beyond = (ratio - 1).abs() - self.clip
        return int((beyond > 0).sum()), float(kl), float(beyond.abs().min())


PPO = Policy(clip=0.1, kl=0.1, estimator="k2", entropy=0.05)
# Shao et al. 2024, arXiv:2402.03300, eq. 3: beta 0.04, no entropy bonus; advantages and weights are
# the batch's.
GRPO = Policy(clip=0.1, kl=0.04, estimator="k3", entropy=0.0)


def clipped_value(outputs: TokenOutputs, batch: Batch) -> LossOutput:
    """Return PPO's value loss, clipped about the old values.

    It is the one of implementations (Engstrom et al. 2020, arXiv:2005.12729).
    """
    assert outputs.values is not None
    old = batch["old_values"]
    returns = batch["returns"]
    near = torch.minimum(torch.maximum(outputs.values, old - VALUE_CLIP), old + VALUE_CLIP)
    terms = 0.5 * torch.maximum((outputs.values - returns).square(), (near - returns).square())
    clipped = (near != outputs.values) & (batch.loss_weight > 0)
    return LossOutput(loss=(batch.loss_weight * terms).sum(), metrics={"clipped": clipped.sum()})


clipped_value.needs = ("values",)  # type: ignore[attr-defined]


def oracle_clipped_value(oracle: OracleModel, batch: PackedDocuments, denominator: float) -> Tensor:
    """Return the same loss as `clipped_value` in float64."""
    values = oracle.values(batch.input_ids, batch.cu_seqlens)
    return value_loss(
        values,
        old_values=batch.old_values,
        returns=batch.returns,
        loss_weight=batch.loss_weight,
        denominator=denominator,
        clip=VALUE_CLIP,
    )


def nearest_value_bound(oracle: OracleModel, batch: PackedDocuments) -> float:
    """Return how near a value that counts comes to a bound of the clip about its old one."""
    values = oracle.values(batch.input_ids, batch.cu_seqlens).detach()
    counted = torch.as_tensor(batch.loss_weight) > 0
    moved = (values - torch.as_tensor(batch.old_values).double()).abs()[counted]
    return float((moved - VALUE_CLIP).abs().min())


def _differences(now: Tensor, before: Tensor, batch: Batch) -> LossOutput:
    """Return the plain sum as loss, with the number and the size of differing values as metrics."""
    differ = now.detach() != before
    metrics = {
        "differ": differ.sum(),
        "by": (now.detach() - before).abs().sum(),
        "tokens": float(len(now)),
    }
    return LossOutput(loss=(batch.loss_weight * now).sum(), metrics=metrics)


def ratio_is_one(outputs: TokenOutputs, batch: Batch) -> LossOutput:
    """Count the tokens whose log-prob is not the bits of ``old_log_probs``."""
    assert outputs.log_probs is not None
    return _differences(outputs.log_probs, batch["old_log_probs"], batch)


def value_is_old(outputs: TokenOutputs, batch: Batch) -> LossOutput:
    """Count the tokens whose value is not the bits of ``old_values``."""
    assert outputs.values is not None
    return _differences(outputs.values, batch["old_values"], batch)


value_is_old.needs = ("values",)  # type: ignore[attr-defined]

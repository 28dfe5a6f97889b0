"""Losses as an engine takes them (sums, float32), and the same losses for the oracle (float64)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine_api import losses as engine_losses
from engine_api.batch import Batch
from engine_api.losses import LossFn
from engine_api.results import LossOutput, TokenOutputs, Topology
from engine_conformance.fixtures import PackedDocuments
from engine_conformance.oracle import OracleModel, sft
from engine_conformance.oracle.losses import ppo_loss, sft_loss, value_loss, weighted_sum
from engine_conformance.oracle.train import Loss

__all__ = [
    "FIRST_KEY",
    "CorruptedLoss",
    "ForModelType",
    "LikelihoodAndEntropy",
    "RaisesLater",
    "default_loss",
    "entropy_bonus",
    "infinite_gradient",
    "no_gradient",
    "oracle_default",
    "oracle_entropy_bonus",
    "oracle_policy",
    "oracle_value",
    "oracle_warm",
    "oracle_warm_entropy",
    "policy",
    "raises",
    "value",
]

FIRST_KEY = 2**40
FIVE = 5
_BONUS, _WARM = 1.0, 0.7  # a bonus as large as the likelihood: its gradient shows in bfloat16 too


def default_loss(model_type: str) -> LossFn:
    """Return the loss of cases that state none: likelihood, or squared error for a value model."""
    return value if model_type == "value_model" else engine_losses.sft_loss


def oracle_default(oracle: OracleModel) -> Loss:
    """Return the oracle's counterpart of `default_loss`."""
    return oracle_value if oracle.config.value_model else sft


@dataclass(frozen=True, slots=True)
class ForModelType:
    """Adapter that gives a loss made for log-probs the output of this model type."""

    model_type: str
    loss: LossFn

    @property
    def needs(self) -> tuple[str, ...]:
        """The outputs that the engine must compute."""
        return ("values",) if self.model_type == "value_model" else ("log_probs",)

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        """Return the loss."""
        return self.loss(outputs, batch)


def _outputs(outputs: TokenOutputs) -> Tensor:
    given = outputs.log_probs if outputs.values is None else outputs.values
    assert given is not None
    return given


def policy(outputs: TokenOutputs, batch: Batch) -> LossOutput:
    """Return PPO's clipped surrogate (arXiv:1707.06347, eq. 7), clip 0.2."""
    assert outputs.log_probs is not None
    ratio = (outputs.log_probs - batch["old_log_probs"]).exp()
    advantage = batch["advantages"]
    terms = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    clipped = ((ratio - 1).abs() > 0.2) & (batch.loss_weight > 0)
    metrics: dict[str, Tensor | float] = {
        "clipped": clipped.sum(),
        "weight": batch.loss_weight.sum(),
    }
    # Names do not say how a metric is reduced.
    metrics |= {f"{name}/weight": metrics["weight"] for name in ("max", "min", "mean")}
    # Of whole numbers that float32 does not hold.
    metrics["rare"] = ((batch["key"] - FIRST_KEY) % 8 == 1).sum()
    # Reported by the micro-batch, and the rank, that has such a document.
    if FIVE in batch.lengths:
        metrics["fives"] = FIVE * batch.lengths.count(FIVE)
    return LossOutput(loss=(batch.loss_weight * terms).sum(), metrics=metrics)


def oracle_policy(oracle: OracleModel, batch: PackedDocuments, denominator: float) -> Tensor:
    """Return the same loss as `policy` in float64."""
    log_probs = oracle.token_outputs(batch.input_ids, batch.cu_seqlens).log_probs
    return ppo_loss(
        log_probs,
        old_log_probs=batch.old_log_probs,
        advantages=batch.advantages,
        loss_weight=batch.loss_weight,
        denominator=denominator,
    )


def value(outputs: TokenOutputs, batch: Batch) -> LossOutput:
    """Return half the squared error of the values."""
    assert outputs.values is not None
    return LossOutput(
        loss=(batch.loss_weight * 0.5 * (outputs.values - batch["returns"]).square()).sum()
    )


value.needs = ("values",)  # type: ignore[attr-defined]


def oracle_value(oracle: OracleModel, batch: PackedDocuments, denominator: float) -> Tensor:
    """Return the same loss as `value` in float64."""
    values = oracle.values(batch.input_ids, batch.cu_seqlens)
    return value_loss(
        values,
        old_values=batch.old_values,
        returns=batch.returns,
        loss_weight=batch.loss_weight,
        denominator=denominator,
        clip=None,
    )


def entropy_bonus(outputs: TokenOutputs, batch: Batch) -> LossOutput:
    """Return the negative log-likelihood less a tenth of the entropy."""
    assert outputs.log_probs is not None
    assert outputs.entropy is not None
    return LossOutput(
        loss=(batch.loss_weight * (-outputs.log_probs - _BONUS * outputs.entropy)).sum()
    )


# Not in the order in which an engine computes them.
entropy_bonus.needs = ("entropy", "log_probs")  # type: ignore[attr-defined]


def oracle_entropy_bonus(
    oracle: OracleModel, batch: PackedDocuments, denominator: float, *, temperature: float = 1.0
) -> Tensor:
    """Return the same loss as `entropy_bonus` in float64."""
    outputs = oracle.token_outputs(batch.input_ids, batch.cu_seqlens, temperature=temperature)
    return weighted_sum(
        -outputs.log_probs - _BONUS * outputs.entropy, batch.loss_weight, denominator
    )


def oracle_warm_entropy(oracle: OracleModel, batch: PackedDocuments, denominator: float) -> Tensor:
    """Return the same loss as `entropy_bonus` at temperature 0.7, in float64."""
    return oracle_entropy_bonus(oracle, batch, denominator, temperature=_WARM)


def oracle_warm(oracle: OracleModel, batch: PackedDocuments, denominator: float) -> Tensor:
    """Return the negative log-likelihood at temperature 0.7, in float64."""
    outputs = oracle.token_outputs(batch.input_ids, batch.cu_seqlens, temperature=_WARM)
    return sft_loss(outputs.log_probs, loss_weight=batch.loss_weight, denominator=denominator)


class LikelihoodAndEntropy:
    """The negative log-likelihood, whose derivative is known, with the entropy as a metric."""

    needs = ("log_probs", "entropy")

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        """Return the loss, with the weighted sum of the entropies."""
        assert outputs.entropy is not None
        entropy = (batch.loss_weight * outputs.entropy).sum()
        loss = engine_losses.sft_loss(outputs, batch).loss
        return LossOutput(loss=loss, metrics={"entropy": entropy})

    def coefficients(self, batch: Batch) -> Tensor:
        """Return the derivative with respect to each log-prob ``[T]``."""
        return engine_losses.sft_loss.coefficients(batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class CorruptedLoss:
    """Negative sum times ``factor`` plus ``constant`` where ``here``, and the plain sum elsewhere.

    A ``factor`` that is not finite spoils the gradient too, a ``constant`` does not.
    """

    model_type: str
    factor: float = 1.0
    constant: float = 0.0
    here: bool = True

    @property
    def needs(self) -> tuple[str, ...]:
        """The outputs that the engine must compute."""
        return ("values",) if self.model_type == "value_model" else ("log_probs",)

    def limit_to_last_rank(self, topology: Topology) -> CorruptedLoss:
        """Return the same loss, corrupted on the last data-parallel rank alone.

        It is corrupted on every rank that works on that data-parallel rank's documents.
        """
        return replace(self, here=topology.dp_rank == topology.dp_size - 1)

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        """Return the loss."""
        total = -(batch.loss_weight * _outputs(outputs)).sum()
        return LossOutput(loss=total * self.factor + self.constant if self.here else total)


def no_gradient(outputs: TokenOutputs, batch: Batch) -> LossOutput:
    """Return a loss whose gradient is zero, as of a policy whose advantages all are."""
    return LossOutput(loss=(_outputs(outputs) * batch.loss_weight).sum() * 0.0)


def infinite_gradient(outputs: TokenOutputs, batch: Batch) -> LossOutput:
    """Return a finite loss whose gradient is infinite: a square root at zero."""
    zero = (_outputs(outputs) * batch.loss_weight).sum() * 0.0
    return LossOutput(loss=zero.abs().sqrt())


def raises(outputs: TokenOutputs, batch: Batch) -> LossOutput:
    """Raise a ``KeyError``, as a caller's faulty loss would."""
    del outputs, batch
    raise KeyError("a loss function of the conformance suite raises on purpose")


class RaisesLater:
    """Loss that is good at its first call and raises from the second call on."""

    def __init__(self, model_type: str) -> None:
        self.loss = default_loss(model_type)
        self.calls = 0
        self.needs = getattr(self.loss, "needs", ("log_probs",))

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        """Return the loss at the first call and raise at later ones."""
        self.calls += 1
        return self.loss(outputs, batch) if self.calls == 1 else raises(outputs, batch)

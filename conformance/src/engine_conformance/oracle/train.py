"""Training steps in float64: the loss, gradient norm and weights that an engine's must equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine_conformance.fixtures.batches import PackedDocuments
from engine_conformance.oracle.adamw import (
    AdamWConfig,
    AdamWState,
    adamw_step,
    clip_coefficient,
    global_norm,
    zero_state,
)
from engine_conformance.oracle.losses import sft_loss
from engine_conformance.oracle.model import OracleModel
from engine_conformance.oracle.schedule import Schedule

__all__ = [
    "Errors",
    "Loss",
    "StepResult",
    "TrainResult",
    "loss_and_grads",
    "sft",
    "spread",
    "spreads",
    "train_steps",
]

Loss = Callable[[OracleModel, PackedDocuments, float], Tensor]
"""``loss(oracle, batch, denominator)`` returns a scalar, already divided by the denominator."""


def sft(oracle: OracleModel, batch: PackedDocuments, denominator: float) -> Tensor:
    """Return the `Loss` of supervised fine-tuning."""
    outputs = oracle.token_outputs(
        batch.input_ids, batch.cu_seqlens, routed_experts=batch.routed_experts
    )
    return sft_loss(outputs.log_probs, loss_weight=batch.loss_weight, denominator=denominator)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """One update."""

    loss: float
    """Loss before the update."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    """Learning rate of the update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Variances that rounding errors of the gradients, one `spread` each, leave in one tensor.

    Adam's first moment carries an error on into later updates, so that weight and moment
    are off together: ``both`` is their covariance.
    """

    weight: Tensor
    moment: Tensor
    both: Tensor

    @staticmethod
    def none(like: Tensor) -> Errors:
        """Return the variances before the first step."""
        zero = torch.zeros_like(like, requires_grad=False)
        return Errors(weight=zero, moment=zero, both=zero)

    def with_known_weight(self) -> Errors:
        """Return the variances once the weight itself is known, but not the moment."""
        zero = torch.zeros_like(self.weight)
        return Errors(weight=zero, moment=self.moment, both=zero)

    def after(self, gradient: Tensor, beta: float, rate: Tensor) -> Errors:
        """Return the variances after an update.

        Args:
            gradient: variance of the gradient's error, which no earlier error knows of.
            beta: factor by which the first moment decays.
            rate: factor from the first moment to the update.
        """
        moment = beta**2 * self.moment + (1 - beta) ** 2 * gradient
        both = beta * self.both
        weight = self.weight + 2 * rate * both + rate.square() * moment
        return Errors(weight=weight, moment=moment, both=both + rate * moment)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """The final state of a run of steps.

    ``oracle`` has the final parameters; ``optimizer`` Adam's moments and step;
    ``config`` the optimizer's constants. ``params`` are the trainable tensors by name:
    the adapter's, if any.

    ``errors`` says how far rounding errors in the gradients can move each weight, see
    `sensitivity`.
    """

    steps: tuple[StepResult, ...]
    oracle: OracleModel
    optimizer: AdamWState
    config: AdamWConfig
    errors: dict[str, Errors]

    @property
    def params(self) -> dict[str, Tensor]:
        """Final trainable tensors by name, float64."""
        return self.oracle.trainable

    @property
    def sensitivity(self) -> dict[str, Tensor]:
        """Distance that an error of one `spread` in each gradient moves each weight, by name.

        To first order, gradients off by r times their `spread` move a weight by
        r * sensitivity. Adam divides by a weight's own gradient history, so a weight whose
        gradients nearly vanish is moved at full rate in a direction that rounding decides.
        Steps are independent: their errors are different sums of roundings.
        """
        return {name: errors.weight.sqrt() for name, errors in self.errors.items()}

    @property
    def path_length(self) -> float:
        """Sum of the learning rates, which is about the furthest that Adam moves a weight."""
        return sum(step.lr for step in self.steps)


def loss_and_grads(
    oracle: OracleModel, batch: PackedDocuments, loss: Loss, denominator: float
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of one batch and its gradients by name.

    A tensor that the loss does not reach gets zeros.
    """
    leaves = oracle.copy(requires_grad=True)
    value = loss(leaves, batch, denominator)
    names = list(leaves.trainable)
    tensors = list(leaves.trainable.values())
    grads = torch.autograd.grad(value, tensors, allow_unused=True, materialize_grads=True)
    return value.item(), dict(zip(names, grads, strict=True))


def train_steps(
    oracle: OracleModel,
    batches: Sequence[PackedDocuments],
    loss: Loss = sft,
    *,
    optimizer: AdamWConfig | None = None,
    schedule: Schedule | None = None,
    denominators: Sequence[float] | None = None,
    start: TrainResult | None = None,
) -> TrainResult:
    """Make one update per batch and return the result, leaving ``oracle`` itself unchanged.

    Args:
        oracle: the initial model; not used when ``start`` is given.
        batches: one per step. What an engine splits into ranks or micro-batches is one batch here:
            sums over one denominator do not depend on the split.
        loss: see `Loss`.
        optimizer: AdamW's constants; the defaults if absent.
        schedule: the learning rate; a constant 1e-3 if absent.
        denominators: one per batch; the sum of its loss weights if absent.
        start: an earlier result to continue from, with its optimizer state and step count.

    Raises:
        ValueError: if a denominator is not positive, or their number is not that of the batches.
    """
    config = optimizer or AdamWConfig()
    schedule = schedule or Schedule()
    model = oracle if start is None else start.oracle
    state = zero_state(model.trainable) if start is None else start.optimizer
    if start is None:
        errors = {name: Errors.none(p) for name, p in model.trainable.items()}
    else:
        errors = start.errors
    steps: list[StepResult] = []
    divisors = denominators or [batch.denominator for batch in batches]
    for batch, denominator in zip(batches, divisors, strict=True):
        value, grads = loss_and_grads(model, batch, loss, denominator)
        lr = schedule.at(state.step)
        params, state = adamw_step(model.trainable, grads, state, config, lr=lr)
        model = _with_trainable(model, params)
        errors = _errors(errors, grads, state, config, lr)
        steps.append(StepResult(loss=value, grad_norm=global_norm(grads), lr=lr))
    return TrainResult(
        steps=tuple(steps),
        oracle=model,
        optimizer=state,
        config=config,
        errors=errors,
    )


def _errors(
    errors: dict[str, Errors],
    grads: dict[str, Tensor],
    state: AdamWState,
    config: AdamWConfig,
    lr: float,
) -> dict[str, Errors]:
    """Return the errors after an update.

    They are zero where no gradient was ever seen: an absent token's embedding has no
    rounding error either. Elsewhere a gradient of exactly zero is a sum that cancels, see `_seen`.
    """
    scale = clip_coefficient(global_norm(grads), config.max_grad_norm)
    beta1, beta2 = config.betas
    after: dict[str, Errors] = {}
    units = spreads({name: grad.square() for name, grad in grads.items()})
    for name, unit in units.items():
        root = (state.exp_avg_sq[name] / (1 - beta2**state.step)).sqrt()
        seen = _seen(name, state.exp_avg_sq)
        rate = torch.where(seen, lr / (1 - beta1**state.step) / (root + config.eps), 0.0)
        wrong = (scale * unit).square()
        after[name] = errors[name].after(wrong, beta1, rate)
    return after


def _seen(name: str, squares: Mapping[str, Tensor]) -> Tensor:
    """Return which elements tokens have reached, given Adam's second moments by name.

    An element of a bias is reached where its row of the weight is, whatever its own gradient: a
    key's bias adds the same to all scores of a query, unless rotary positions turn it, so that its
    gradient is zero. In float64 it is exactly zero at some seeds and 1e-20 at others, and an engine
    that rounds has 1e-8, by which Adam moves the weight.
    """
    own = squares[name] > 0
    weight = squares.get(f"{name.removesuffix('.bias')}.weight")
    if not name.endswith(".bias") or weight is None or weight.ndim != 2:
        return own
    return own | (weight > 0).any(1)


def spread(squares: Tensor) -> Tensor:
    """Return the largest at each element of its row's, its column's and the tensor's RMS.

    Means are over elements other than 0, since an embedding has rows without any
    gradient.

    Args:
        squares: squares of a gradient's elements. A gradient is a sum over tokens of an output's
            error times an input, and a few rows (the tokens of an embedding) or columns may carry
            most of the tensor: rounding errors are relative to theirs.
    """
    counted = (squares > 0).double()
    mean = (squares.sum() / counted.sum().clamp(min=1)).expand_as(squares)
    if squares.ndim == 2:
        for dim in (0, 1):
            own = squares.sum(dim, keepdim=True) / counted.sum(dim, keepdim=True).clamp(min=1)
            mean = mean.maximum(own)
    return mean.sqrt()


def spreads(squares: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the `spread` of each tensor, given the squares of the gradients by name.

    A bias of a single element, as a value head's, has at least its weight's: its gradient is a sum
    over tokens like those of the weight, whose inputs have size 1, and where the tokens cancel
    nothing else in it says how large they are.
    """
    found = {name: spread(one) for name, one in squares.items()}
    for name, own in found.items():
        weight = found.get(f"{name.removesuffix('.bias')}.weight")
        if name.endswith(".bias") and own.numel() == 1 and weight is not None:
            found[name] = own.maximum(weight.max())
    return found


def _with_trainable(oracle: OracleModel, params: dict[str, Tensor]) -> OracleModel:
    if oracle.adapter is None:
        return replace(oracle, params=params)
    return replace(oracle, adapter=replace(oracle.adapter, params=params))

"""Updates of a policy or a critic on batches of experience, in a rank and in float64, compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from engine_api.batch import Batch
from engine_api.config import Memory, OptimizerConfig
from engine_api.contract import Engine
from engine_api.losses import LossFn
from engine_api.results import TrainOutput
from engine_conformance.cases import _rl_losses as losses
from engine_conformance.cases._case import VALUE, must
from engine_conformance.cases._expect import oracle_of, training_matches
from engine_conformance.cases._layouts import ADAMW
from engine_conformance.cases._ranks import Trained, checked, local_batch, opened, summary
from engine_conformance.cases._target import EPS, Setup, Target
from engine_conformance.compare import assert_scalar_close
from engine_conformance.fixtures import PackedDocuments
from engine_conformance.oracle import OracleModel, Schedule, StepResult, TrainResult, train_steps
from engine_conformance.oracle.train import Loss
from engine_conformance.tolerances import Tolerance

__all__ = [
    "OPTIMIZER",
    "SPLIT",
    "Phase",
    "Plan",
    "infer_current",
    "is_value",
    "policy_holds",
    "value_holds",
]

SPLIT = Memory(max_tokens=24, logit_chunk=5)  # several micro-batches
# Updates of a policy are small: at 1e-3 single tokens' probabilities would change by powers of ten.
OPTIMIZER = OptimizerConfig(lr=1e-4, clip_norm=2.0, eps=EPS)
RATES = Schedule(lr=1e-4)
# No ratio or value comes nearer to a bound of the clip, so that rounding never decides which tokens
# are clipped.
_KINK = 1e-3
# Batches to choose from; about one in ten does not fit.
_ATTEMPTS = 20


def infer_current(engine: Engine, dp_shard: Batch, *, temperature: float = 1.0) -> Tensor:
    """Return this rank's current log-probs, or a value model's current values."""
    outputs = engine.infer_batch(dp_shard, temperature=temperature)
    given = outputs.log_probs if outputs.values is None else outputs.values
    must(given is not None, "outputs", "infer_batch gave neither log-probs nor values")
    assert given is not None
    return given


def is_value(setup: Setup) -> bool:
    return setup.model_type == VALUE


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One batch of experience, its number of epochs, and the denominator of its sum."""

    batch: PackedDocuments
    epochs: int
    denominator: float


def updates(setup: Setup, phases: Sequence[Phase], loss: LossFn) -> Trained:
    """Run the epochs of every phase, with old outputs by the weights at its beginning.

    References are computed by the first weights.
    """
    with opened(setup) as engine:
        dp_shards = [local_batch(engine, phase.batch, setup.device) for phase in phases]
        references = [infer_current(engine, dp_shard) for dp_shard in dp_shards]
        outputs = list[TrainOutput]()
        for phase, dp_shard, reference in zip(phases, dp_shards, references, strict=True):
            old = infer_current(engine, dp_shard)
            names = (
                {"old_values": old}
                if is_value(setup)
                else {"old_log_probs": old, "ref_log_probs": reference}
            )
            ready = dp_shard.with_fields(**names)
            for _ in range(phase.epochs):
                output = engine.train_batch(ready, loss, denominator=phase.denominator)
                outputs.append(checked(output, TrainOutput, "train_batch"))
        return summary(engine, outputs)


Plan = Callable[[int], Sequence["Phase"]]
"""``plan(attempt)`` returns phases, with batches of its own for each attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """The oracle's updates, and a policy's expected metrics at each (none for a value model).

    ``nearest`` is the distance of the ratio or value that came nearest to a bound of the clip.
    """

    result: TrainResult = field(repr=False)
    metrics: list[tuple[int, float]]
    nearest: float


def _replay(
    model: Path, phases: Sequence[Phase], loss: Loss, policy: losses.Policy | None = None
) -> Replay:
    start = oracle_of(str(model))
    references = [_oracle_now(start, phase.batch) for phase in phases]
    result: TrainResult | None = None
    steps = list[StepResult]()
    metrics = list[tuple[int, float]]()
    bounds = list[float]()
    for phase, reference in zip(phases, references, strict=True):
        old = _oracle_now(start if result is None else result.oracle, phase.batch)
        ready = replace(phase.batch, old_log_probs=old, old_values=old, ref_log_probs=reference)
        for _ in range(phase.epochs):
            current = start if result is None else result.oracle
            if policy is None:
                bounds.append(losses.nearest_value_bound(current, ready))
            else:
                clipped, kl, nearest = policy.oracle_metrics(current, ready)
                metrics.append((clipped, kl))
                bounds.append(nearest)
            result = train_steps(
                start,
                [ready],
                loss,
                optimizer=ADAMW,
                schedule=RATES,
                denominators=[phase.denominator],
                start=result,
            )
            steps += result.steps
    assert result is not None
    return Replay(result=replace(result, steps=tuple(steps)), metrics=metrics, nearest=min(bounds))


def _chosen(
    model: Path, plan: Plan, loss: Loss, policy: losses.Policy | None = None
) -> tuple[Sequence[Phase], Replay]:
    """Return the first attempt on which rounding changes no choice of a clip, and its replay.

    Where a batch has a second epoch, a policy must also clip some token.
    """
    for attempt in range(_ATTEMPTS):
        phases = plan(attempt)
        replay = _replay(model, phases, loss, policy)
        again = policy is not None and any(phase.epochs > 1 for phase in phases)
        clips = any(clipped for clipped, _ in replay.metrics)
        if replay.nearest > _KINK and (clips or not again):
            return phases, replay
    raise AssertionError(f"none of {_ATTEMPTS} batches keeps off the bounds of the clip")


def _oracle_now(oracle: OracleModel, batch: PackedDocuments) -> np.ndarray:
    if oracle.config.value_model:
        return oracle.values(batch.input_ids, batch.cu_seqlens).float().numpy()
    return oracle.token_outputs(batch.input_ids, batch.cu_seqlens).log_probs.float().numpy()


def policy_holds(target: Target, plan: Plan, policy: losses.Policy) -> float:
    """Compare a policy's updates, and its metrics as sums at each of them, with the oracle's."""
    model = target.model()
    phases, replay = _chosen(model, plan, policy.oracle, policy)
    config = target.config(model, optimizer=OPTIMIZER, memory=SPLIT)
    ranks = target.run(updates, config, phases=phases, loss=policy)
    epochs = [epoch for phase in phases for epoch in range(phase.epochs)]
    again = [index for index, epoch in enumerate(epochs) if epoch]
    start = oracle_of(str(model))
    margins = [training_matches(target, ranks, replay.result, start, off_policy=again)]
    weights = [phase.batch.denominator for phase in phases for _ in range(phase.epochs)]
    for index, (output, (clipped, kl)) in enumerate(
        zip(ranks[0].outputs, replay.metrics, strict=True)
    ):
        must(
            output.metrics["clipped"] == clipped,
            "metric clipped",
            f"{output.metrics['clipped']}, the oracle clips {clipped}",
            where=f"update {index}",
        )
        # One error of a log-prob a token, as a gradient of the KL of order one carries it.
        tol = Tolerance(atol=target.tolerance("log_probs").atol * weights[index])
        margins.append(
            assert_scalar_close(f"metric kl of update {index}", output.metrics["kl"], kl, tol)
        )
    return max(margins)


def value_holds(target: Target, plan: Plan) -> float:
    """Compare a critic's updates under the clipped value loss with the oracle's."""
    model = target.model()
    phases, replay = _chosen(model, plan, losses.oracle_clipped_value)
    config = target.config(model, optimizer=OPTIMIZER, memory=SPLIT)
    ranks = target.run(updates, config, phases=phases, loss=losses.clipped_value)
    return training_matches(target, ranks, replay.result, oracle_of(str(model)))

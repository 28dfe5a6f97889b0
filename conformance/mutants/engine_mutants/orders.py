"""Defects that only more than one call shows: the gradient that waits, and what changes it."""

# ruff: noqa: D102 - the class describes the defect of its method

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine_api.batch import Batch
from engine_api.errors import BatchError, CheckpointError, RankFailure
from engine_api.losses import LossFn
from engine_api.results import (
    CheckpointHandle,
    CheckpointInfo,
    ForwardBackwardOutput,
    LossOutput,
    StepOutput,
    TokenOutputs,
)
from engine_loopback.engine import LoopbackEngine
from engine_mutants.mutant import mutant

CASE = "steps.call_order"
# Losses that all engines of the process look at.
_EVERYONES = list[float]()


@mutant(CASE, group="core")
class LastDenominatorDividesAll(LoopbackEngine):
    """The gradient is divided once, by the last call's denominator, also what calls before left."""

    divided_by = 1.0

    def _run_train(
        self, parts: Sequence[Batch], loss: LossFn, denominator: float, temperature: float
    ) -> list[LossOutput]:
        for param in self.trained():
            if param.grad is not None:
                param.grad.mul_(self.divided_by / denominator)
        self.divided_by = denominator
        return super()._run_train(parts, loss, denominator, temperature)


@mutant(CASE, group="core")
class LastLossLookedAt(LoopbackEngine):
    """Only the last call's loss is looked at for NaN."""

    def _why_skip(self, norm: float) -> str | None:
        self._pending[:] = self._pending[-1:]
        return super()._why_skip(norm)


@mutant(CASE, group="core")
class FirstLossLookedAt(LoopbackEngine):
    """Only the first call's loss is looked at for NaN."""

    def _why_skip(self, norm: float) -> str | None:
        self._pending[:] = self._pending[:1]
        return super()._why_skip(norm)


@mutant(CASE, group="core")
class MaskedCallSkips(LoopbackEngine):
    """A call without loss tokens makes the step a skipped one, whatever calls before it left."""

    def _gather_results(self, work: Any) -> ForwardBackwardOutput:
        self._has_gradient = bool(work.denominator)
        return super()._gather_results(work)


@mutant(CASE, group="core")
class SkippedStepKeepsGradient(LoopbackEngine):
    """A skipped step keeps its gradient, which joins the next step's."""

    def _apply_clipped_step(self, norm: float) -> StepOutput:
        kept = {param: param.grad for param in self.trained()}
        result = super()._apply_clipped_step(norm)
        for param, grad in kept.items():
            param.grad = grad if result.skipped else None
        return result


@mutant(CASE, group="core")
class SplitCallAtTemperatureOne(LoopbackEngine):
    """``forward_backward`` does not look at its temperature, ``train_batch`` does."""

    def forward_backward(
        self,
        batch: Batch,
        loss: LossFn,
        *,
        denominator: float | None = None,
        temperature: float = 1.0,
    ) -> ForwardBackwardOutput:
        return super().forward_backward(batch, loss, denominator=denominator)


@mutant(CASE, group="dp", world=2)
class ReducedAtEachCall(LoopbackEngine):
    """The gradient is summed over ranks at each call, also what earlier calls have summed."""

    def _run_train(
        self, parts: Sequence[Batch], loss: LossFn, denominator: float, temperature: float
    ) -> list[LossOutput]:
        results = super()._run_train(parts, loss, denominator, temperature)
        for weight in self.held_and_trained():
            weight.held.grad = super().reduce_gradient(weight, self.own_gradient(weight))
        return results

    def reduce_gradient(self, weight: Any, grad: Any) -> Any:
        del weight
        return grad


@mutant(CASE, group="core")
class MetricsPileUp(LoopbackEngine):
    """A call's metrics include those of the calls before it."""

    def _build(self) -> None:
        super()._build()
        self.metrics: dict[str, float] = {}

    def _sum_over_data_parallel(self, outputs: Sequence[LossOutput]) -> dict[str, float]:
        sums = super()._sum_over_data_parallel(outputs)
        for name in sums.keys() - {"loss"}:
            self.metrics[name] = self.metrics.get(name, 0.0) + sums[name]
        return sums | self.metrics


@mutant(CASE, group="core")
class EnginesSharePending(LoopbackEngine):
    """Two engines of one process look at each other's losses."""

    def _build(self) -> None:
        super()._build()
        self._pending = _EVERYONES


@mutant(CASE, group="core")
class TrainBatchAddsUp(LoopbackEngine):
    """``train_batch`` adds its gradient to the one that waits."""

    def _compute(self, *arguments: Any, fresh: bool = False) -> Any:
        del fresh
        return super()._compute(*arguments)


@mutant(CASE, group="core")
class InferenceDropsGradient(LoopbackEngine):
    """An inference drops the gradient that waits."""

    def infer_batch(
        self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False, adapter: bool = True
    ) -> TokenOutputs:
        given = super().infer_batch(
            batch, temperature=temperature, entropy=entropy, adapter=adapter
        )
        self._zero_grad()
        return given


@mutant(CASE, group="core")
class SaveDropsGradient(LoopbackEngine):
    """A save drops the gradient that waits, to have its memory."""

    def save_checkpoint(
        self, directory: Path | str, *, extra: Mapping[str, Any] | None = None
    ) -> CheckpointHandle:
        self._zero_grad()
        return super().save_checkpoint(directory, extra=extra)


@mutant(CASE, group="core")
class BadBatchDropsGradient(LoopbackEngine):
    """A batch that is refused drops the gradient that waits."""

    def _prepare(self, batch: Batch, *, needs_weight: bool) -> Any:
        try:
            return super()._prepare(batch, needs_weight=needs_weight)
        except (BatchError, RankFailure):
            self._drop_gradients()
            raise


@mutant(CASE, group="core")
class FailedLoadDropsGradient(LoopbackEngine):
    """A load that fails drops the gradient that waits."""

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        try:
            return super().load_checkpoint(directory)
        except CheckpointError:
            self._drop_gradients()
            raise


@mutant(CASE, group="core")
class RaisedLossKeepsEarlierCalls(LoopbackEngine):
    """A loss that raises drops its own call's gradient, and keeps that of the calls before it."""

    def _compute(self, *arguments: Any, fresh: bool = False) -> Any:
        kept = {p: p.grad.clone() for p in self.trained() if p.grad is not None}
        losses = list(self._pending)
        try:
            return super()._compute(*arguments, fresh=fresh)
        except KeyError:
            for param, grad in kept.items():
                param.grad = grad
            self._pending[:] = losses
            self._has_gradient = bool(kept)
            raise

"""Defects of rate and clipping, of steps to be skipped, and of errors an engine must survive."""
# ruff: noqa: D102 - the class describes the defect of its method

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine_api.batch import Batch
from engine_api.errors import EngineStateError
from engine_api.losses import LossFn
from engine_api.prepare import MicroBatches
from engine_api.results import ForwardBackwardOutput, LossOutput, StepOutput, TokenOutputs
from engine_api.schedule import lr_factor
from engine_loopback.engine import LoopbackEngine
from engine_loopback.optimizer import clip_factor
from engine_loopback.weights import Weight
from engine_mutants.mutant import mutant

# --- rate and clipping ---------------------------------------------------------------------------


@mutant("train.schedules", group="core")
class ScheduleAhead(LoopbackEngine):
    """The weights move at the next step's rate, while the right one is reported."""

    def _apply_optimizer(self, lr: float) -> None:
        assert self.config.optimizer is not None
        super()._apply_optimizer(
            self.config.optimizer.lr * lr_factor(self.config.schedule, self._step + 1)
        )


@mutant("train.trajectory", group="core")
class ClippingOff(LoopbackEngine):
    """The norm is reported, and gradients are not clipped, which Adam hides."""

    def clip(self, norm: float, max_norm: float | None) -> None:
        super().clip(norm, None)


@mutant("train.trajectory", group="dp", world=2)
class ClipsByOwnNorm(LoopbackEngine):
    """Each rank clips by the norm of its own gradient before the reduction."""

    def _clip_gradients(self, max_norm: float | None) -> float:
        squares = [self.own_gradient(weight).square().sum() for weight in self.held_and_trained()]
        self.own_norm = math.sqrt(float(sum(squares)))
        return super()._clip_gradients(max_norm)

    def clip(self, norm: float, max_norm: float | None) -> None:
        super().clip(self.own_norm, max_norm)


@mutant("steps.clipping", group="core")
class NormAfterClipping(LoopbackEngine):
    """The gradient norm is reported after clipping."""

    def _clip_gradients(self, max_norm: float | None) -> float:
        norm = super()._clip_gradients(max_norm)
        return norm if max_norm is None else min(norm, max_norm)


@mutant("train.trajectory", group="dp", world=2, seen_in="verl #4710")
class NormCountsReplicas(LoopbackEngine):
    """The norm counts a weight once for every rank that holds it."""

    def counts(self, weight: Weight) -> bool:
        return True


@mutant("train.schedules", group="core")
class ScheduleWithoutFloor(LoopbackEngine):
    """The rate falls to zero, whatever min_ratio is."""

    def _build(self) -> None:
        self.config = replace(self.config, schedule=replace(self.config.schedule, min_ratio=0.0))
        super()._build()


@mutant("train.schedules", group="core")
class LinearBelowFloor(LoopbackEngine):
    """A linear schedule goes on falling after its last step, below the floor."""

    def _apply_clipped_step(self, norm: float) -> StepOutput:
        schedule = self.config.schedule
        total = schedule.total_steps or 0
        if schedule.name == "linear" and self._step > total:
            below = schedule.min_ratio * total / self._step
            self.config = replace(self.config, schedule=replace(schedule, min_ratio=below))
        return super()._apply_clipped_step(norm)


@mutant("steps.clipping", group="core", world=2, options={"flat_norm": True})
class FlatNormInBfloat16(LoopbackEngine):
    """The sum of a gradient's squares is in bfloat16 with an option of the engine's own."""

    def own_squares(self) -> Tensor:
        squares = super().own_squares()
        return squares.bfloat16().double() if self.options.flat_norm else squares


@mutant("steps.clipping", group="core")
class ClipsUpwards(LoopbackEngine):
    """A gradient below the limit is scaled up to it."""

    def clip(self, norm: float, max_norm: float | None) -> None:
        for param in self.trained():
            if param.grad is not None and max_norm is not None:
                param.grad.mul_(max_norm / (norm + 1e-6))


@mutant("steps.clipping", group="core")
class ClipsEachTensor(LoopbackEngine):
    """Each gradient is clipped by its own norm."""

    def clip(self, norm: float, max_norm: float | None) -> None:
        for param in self.trained():
            if param.grad is not None:
                param.grad.mul_(clip_factor(float(param.grad.norm()), max_norm))


@mutant("memory.chunks", group="core")
class ClipsEachMicroBatch(LoopbackEngine):
    """The gradient is clipped after each micro-batch, not once before the step."""

    @contextmanager
    def _accumulation(self, *, last: bool) -> Iterator[None]:
        with super()._accumulation(last=last):
            yield
        if not last and self.config.optimizer is not None:
            self.clip(self.gradient_norm(), self.config.optimizer.clip_norm)


# --- batches without loss tokens ---------------------------------------------------------------


@mutant("steps.masked_batch", group="core")
class MaskedBatchIsNan(LoopbackEngine):
    """The loss of a batch without loss tokens is 0 / 0."""

    def _gather_results(self, work: Any) -> ForwardBackwardOutput:
        result = super()._gather_results(work)
        return result if work.denominator else replace(result, loss=math.nan)


@mutant("steps.masked_batch", group="core")
class MaskedBatchMoves(LoopbackEngine):
    """A step without a gradient uses zeros, so that momentum moves the weights."""

    def _why_skip(self, norm: float) -> str | None:
        if not self._has_gradient:
            for param in self.trained():
                param.grad = torch.zeros_like(param)
            self._apply_optimizer(1e-3)
        return super()._why_skip(norm)


@mutant("steps.masked_batch", group="core")
class MaskedBatchCounts(LoopbackEngine):
    """A batch without loss tokens advances weight_version and schedule."""

    def _apply_clipped_step(self, norm: float) -> StepOutput:
        empty = not self._has_gradient
        result = super()._apply_clipped_step(norm)
        self._step += empty
        return replace(result, weight_version=self._step)


# --- values that are not finite -----------------------------------------------------------------


@mutant("steps.nonfinite", group="core")
class LossNotLookedAt(LoopbackEngine):
    """A step is taken for a finite gradient, even if the loss is not finite."""

    def _why_skip(self, norm: float) -> str | None:
        self._pending.clear()
        return super()._why_skip(norm)


@mutant("steps.infinite_gradient", group="core")
class GradientNotLookedAt(LoopbackEngine):
    """A step is taken for a finite loss, even if the gradient is not finite."""

    def _why_skip(self, norm: float) -> str | None:
        return super()._why_skip(0.0)


@mutant("steps.infinite_gradient", group="core")
class SkipsInSilence(LoopbackEngine):
    """A skipped step is not reported as skipped."""

    def _apply_clipped_step(self, norm: float) -> StepOutput:
        return replace(super()._apply_clipped_step(norm), skipped=None)


@mutant("steps.nonfinite", group="dp", world=2)
class SkipsAlone(LoopbackEngine):
    """Each rank checks its own loss, so that one skips the step and all others take it."""

    def _sum_over_data_parallel(self, outputs: Sequence[LossOutput]) -> dict[str, float]:
        self.own_loss = sum(float(output.loss) for output in outputs)
        return super()._sum_over_data_parallel(outputs)

    def _why_skip(self, norm: float) -> str | None:
        self._pending[:] = [self.own_loss]
        return super()._why_skip(norm)


@mutant("steps.nonfinite", group="core")
class SkippedStepCounts(LoopbackEngine):
    """A skipped step advances ``weight_version``."""

    def _apply_clipped_step(self, norm: float) -> StepOutput:
        result = super()._apply_clipped_step(norm)
        self._step += result.skipped is not None
        return replace(result, weight_version=self._step)


@mutant("steps.nonfinite", group="core")
class SkippedStepMovesMoments(LoopbackEngine):
    """A skipped step is taken at rate zero: weights stay, and moments include the gradient."""

    def _why_skip(self, norm: float) -> str | None:
        why = super()._why_skip(norm)
        if why and self._has_gradient and math.isfinite(norm):
            self._apply_optimizer(0.0)
        return why


@mutant("steps.nonfinite", group="core")
class ScheduleCountsCalls(LoopbackEngine):
    """The rate follows the calls, skipped ones included, while the right one is reported."""

    calls = -1

    def _apply_clipped_step(self, norm: float) -> StepOutput:
        self.calls += 1
        return super()._apply_clipped_step(norm)

    def _apply_optimizer(self, lr: float) -> None:
        assert self.config.optimizer is not None
        super()._apply_optimizer(
            self.config.optimizer.lr * lr_factor(self.config.schedule, self.calls)
        )


@mutant("steps.nonfinite", group="core")
class ZeroesByMultiplication(LoopbackEngine):
    """Gradients are zeroed by multiplication, so that a NaN stays for good."""

    def _zero_grad(self) -> None:
        for param in self.trained():
            if param.grad is not None:
                param.grad.mul_(0.0)


@mutant("steps.nonfinite", group="core")
class NanMeansZero(LoopbackEngine):
    """NaN in a gradient is replaced by zero, and the rest is applied."""

    def own_gradient(self, weight: Weight) -> torch.Tensor:
        return super().own_gradient(weight).nan_to_num(0.0)

    def _why_skip(self, norm: float) -> str | None:
        self._pending[:] = [loss for loss in self._pending if not math.isnan(loss)]
        return super()._why_skip(norm)


# --- errors -------------------------------------------------------------------------------------


@mutant("steps.loss_raises", group="core")
class HalfGradientStays(LoopbackEngine):
    """A loss that raises in a later micro-batch leaves the gradient of earlier ones behind."""

    aborted = False

    def _abort(self) -> None:
        self.aborted = True

    def _drop_gradients(self) -> None:
        if self.aborted:
            self.aborted = False
            return
        super()._drop_gradients()


@mutant("steps.loss_raises", group="core")
class LossErrorRenamed(LoopbackEngine):
    """The loss's exception reaches the caller as an error of the engine."""

    def _run_train(
        self, parts: Sequence[Batch], loss: LossFn, denominator: float, temperature: float
    ) -> list[LossOutput]:
        try:
            return super()._run_train(parts, loss, denominator, temperature)
        except KeyError as error:
            raise EngineStateError(
                "train_batch", str(error), "given a loss that does not raise"
            ) from error


@mutant("steps.loss_raises", group="core")
class LossErrorSwallowed(LoopbackEngine):
    """A loss that raises is skipped like a bad step, without any error for the caller."""

    def _run_train(
        self, parts: Sequence[Batch], loss: LossFn, denominator: float, temperature: float
    ) -> list[LossOutput]:
        try:
            return super()._run_train(parts, loss, denominator, temperature)
        except KeyError:
            return [LossOutput(loss=torch.tensor(math.nan))]


@mutant("steps.loss_raises_on_one_rank", group="dp", world=2, deadline=0.2)
class LossRaisesAlone(LoopbackEngine):
    """A rank whose loss raises leaves the call at once, and all others wait in their backward."""

    def _apply_loss(self, loss: LossFn, outputs: TokenOutputs, part: Batch) -> LossOutput:
        result = super()._apply_loss(loss, outputs, part)
        if self._loss_error is not None:
            raise self._loss_error
        return result


@mutant("steps.bad_batch_on_one_rank", group="dp", world=2, deadline=0.1)
class BadBatchRaisesAlone(LoopbackEngine):
    """A rank checks its batch before agreeing with the others, and leaves them waiting."""

    def _prepare(self, batch: Batch, *, needs_weight: bool) -> MicroBatches:
        batch.check_vocabulary(self.vocab_size)
        return super()._prepare(batch, needs_weight=needs_weight)


@mutant("steps.bad_batch_on_one_rank", group="dp", world=2)
class FirstIdOutsideAccepted(LoopbackEngine):
    """The first id outside the vocabulary is accepted, as its check is off by one."""

    def _prepare(self, batch: Batch, *, needs_weight: bool) -> MicroBatches:
        kept = Batch(
            input_ids=batch.input_ids.where(batch.input_ids != self.vocab_size, 0),
            cu_seqlens=batch.cu_seqlens,
            fields=batch.fields,
        )
        return super()._prepare(kept, needs_weight=needs_weight)


@mutant("steps.bad_batch_on_one_rank", group="dp", world=2)
class BadBatchLeftOut(LoopbackEngine):
    """A document with tokens outside the vocabulary is trained with different tokens."""

    def _prepare(self, batch: Batch, *, needs_weight: bool) -> MicroBatches:
        kept = Batch(
            input_ids=batch.input_ids % self.vocab_size,
            cu_seqlens=batch.cu_seqlens,
            fields=batch.fields,
        )
        return super()._prepare(kept, needs_weight=needs_weight)

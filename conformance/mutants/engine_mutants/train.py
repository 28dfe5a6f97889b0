"""Defects of a step: scales of loss and gradient, accumulation, the optimizer, trained weights."""
# ruff: noqa: D102 - the class describes the defect of its method

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from engine_api.batch import Batch
from engine_api.losses import LossFn
from engine_api.optimizers import TrainedWeight
from engine_api.prepare import MicroBatches
from engine_api.results import ForwardBackwardOutput, LossOutput
from engine_loopback.engine import LoopbackEngine
from engine_loopback.model import Model
from engine_loopback.optimizer import AdamW, Group, build_optimizer
from engine_loopback.weights import Weight
from engine_mutants.mutant import mutant

Parts = Sequence[Batch]


@mutant("train.fields", group="core", dtype="bfloat16")
class FieldsInComputedDtype(LoopbackEngine):
    """The float32 fields of a batch are rounded to the dtype of the computation."""

    def _run_train(
        self, parts: Parts, loss: LossFn, denominator: float, temperature: float
    ) -> list[LossOutput]:
        rounded = [
            part.with_fields(
                **{
                    name: value.to(self.model.dtype).float()
                    for name, value in part.fields.items()
                    if value.dtype == torch.float32
                }
            )
            for part in parts
        ]
        return super()._run_train(rounded, loss, denominator, temperature)


# --- scales -------------------------------------------------------------------------------------


@mutant("train.uneven_ranks", group="dp", world=2, seen_in="AReaL PR 335")
class LossTimesRanks(LoopbackEngine):
    """The loss is multiplied by the ranks, for an average that the reduction does not take."""

    def _run_train(
        self, parts: Parts, loss: LossFn, denominator: float, temperature: float
    ) -> list[LossOutput]:
        return super()._run_train(parts, loss, denominator / self.layout.data, temperature)


@mutant("train.uneven_ranks", group="dp", world=2, seen_in="verl #4710, torchtitan #2318")
class GradientsAveraged(LoopbackEngine):
    """Gradients are averaged over ranks though the denominator is global already."""

    def sum_over_copies(self, weight: Weight, grad: Tensor) -> Tensor:
        return super().sum_over_copies(weight, grad) / self.layout.data


@mutant("train.uneven_ranks", group="dp", world=2, seen_in="prime-rl #2562, Megatron-LM #4590")
class OwnDenominator(LoopbackEngine):
    """Each rank divides by its own tokens, and gradients are averaged over ranks."""

    def _run_train(
        self, parts: Parts, loss: LossFn, denominator: float, temperature: float
    ) -> list[LossOutput]:
        own = sum(float(part.loss_weight.sum()) for part in parts if part.num_tokens) or 1.0
        return super()._run_train(parts, loss, own * self.layout.data, temperature)


@mutant("train.microbatches", group="core")
class DividedByMicroBatches(LoopbackEngine):
    """The loss is divided by the number of micro-batches on top of the denominator."""

    def _run_train(
        self, parts: Parts, loss: LossFn, denominator: float, temperature: float
    ) -> list[LossOutput]:
        return super()._run_train(parts, loss, denominator * len(parts), temperature)


@mutant("train.microbatches", group="core", seen_in="verl #3294, #4021 and #3332")
class MeanOfMeans(LoopbackEngine):
    """Each micro-batch divides by its own weights, and their mean is taken."""

    def _run_train(
        self, parts: Parts, loss: LossFn, denominator: float, temperature: float
    ) -> list[LossOutput]:
        results: list[LossOutput] = []
        for part in parts:
            own = float(part.loss_weight.sum()) if part.num_tokens else 0.0
            results += super()._run_train([part], loss, (own or 1.0) * len(parts), temperature)
        return results


@mutant("train.trajectory", group="core")
class DenominatorCountsTokens(LoopbackEngine):
    """The denominator is the number of tokens with a weight, not the sum of the weights."""

    def _prepare(self, batch: Batch, *, needs_weight: bool) -> MicroBatches:
        parts = super()._prepare(batch, needs_weight=needs_weight)
        weights = [part.loss_weight for part in parts.parts if "loss_weight" in part.fields]
        counts = self.comm.all_gather(sum(int(weight.count_nonzero()) for weight in weights))
        return replace(parts, loss_weight=float(sum(counts)))


@mutant("train.policy", group="core")
class IdleTokensNotCounted(LoopbackEngine):
    """Tokens with advantage 0 are left out of the denominator."""

    def _prepare(self, batch: Batch, *, needs_weight: bool) -> MicroBatches:
        parts = super()._prepare(batch, needs_weight=needs_weight)
        if "advantages" not in batch.fields:
            return parts
        own = float((batch.loss_weight * (batch["advantages"] != 0)).sum())
        return replace(parts, loss_weight=sum(self.comm.all_gather(own)))


@mutant("train.policy", group="core")
class CallersDenominatorIgnored(LoopbackEngine):
    """The gradient is divided by the sum of weights, the loss by the caller's denominator."""

    def _run_train(
        self, parts: Parts, loss: LossFn, denominator: float, temperature: float
    ) -> list[LossOutput]:
        total = sum(float(part.loss_weight.sum()) for part in parts if part.num_tokens)
        return super()._run_train(parts, loss, total or denominator, temperature)


@mutant("train.policy", group="dp", world=2)
class MetricsAveraged(LoopbackEngine):
    """Metrics are means over ranks, where the contract demands sums."""

    def _sum_over_data_parallel(self, outputs: Sequence[LossOutput]) -> dict[str, float]:
        sums = super()._sum_over_data_parallel(outputs)
        return {
            name: value / (1 if name == "loss" else self.layout.data)
            for name, value in sums.items()
        }


@mutant("train.policy", group="tp", world=2, layout={"tp": 2})
class MetricsOncePerRank(LoopbackEngine):
    """Metrics are summed over all ranks, including those with the same tokens."""

    def _sum_over_data_parallel(self, outputs: Sequence[LossOutput]) -> dict[str, float]:
        sums = super()._sum_over_data_parallel(outputs)
        copies = self.layout.world // self.layout.data
        return {name: value * (1 if name == "loss" else copies) for name, value in sums.items()}


@mutant("train.policy", group="core")
class MetricsOfLastMicroBatch(LoopbackEngine):
    """Metrics are the last micro-batch's, while the loss is that of all."""

    def _sum_over_data_parallel(self, outputs: Sequence[LossOutput]) -> dict[str, float]:
        bare = [LossOutput(loss=output.loss) for output in outputs[:-1]]
        return super()._sum_over_data_parallel([*bare, outputs[-1]])


@mutant("train.uneven_ranks", group="dp", world=2)
class LossOfFirstRank(LoopbackEngine):
    """All ranks report rank 0's share of the loss."""

    def _sum_over_data_parallel(self, outputs: Sequence[LossOutput]) -> dict[str, float]:
        own = sum(float(output.loss) for output in outputs)
        return super()._sum_over_data_parallel(outputs) | {"loss": self.comm.all_gather(own)[0]}


# --- accumulation -------------------------------------------------------------------------------


@mutant("train.accumulation_precision", group="core", seen_in="ISEEKYAN/Megatron-LM #149")
class AccumulatesInBfloat16(LoopbackEngine):
    """Gradients are accumulated in bfloat16."""

    @contextmanager
    def _accumulation(self, *, last: bool) -> Iterator[None]:
        with super()._accumulation(last=last):
            yield
        for param in self.trained():
            if param.grad is not None:
                param.grad.copy_(param.grad.bfloat16())


@mutant("train.uneven_ranks", group="dp", world=2)
class ReducesInBfloat16(LoopbackEngine):
    """Gradients are summed over ranks in bfloat16 though precision.reduce is float32."""

    def sum_over_copies(self, weight: Weight, grad: Tensor) -> Tensor:
        return super().sum_over_copies(weight, grad.bfloat16()).to(grad.dtype)


@mutant("train.accumulation", group="core")
class SecondCallZeroes(LoopbackEngine):
    """Each ``forward_backward`` starts by zeroing the gradient."""

    def forward_backward(
        self,
        batch: Batch,
        loss: LossFn,
        *,
        denominator: float | None = None,
        temperature: float = 1.0,
    ) -> ForwardBackwardOutput:
        self._zero_grad()
        return super().forward_backward(
            batch, loss, denominator=denominator, temperature=temperature
        )


@mutant("train.microbatches", group="core", seen_in="Megatron-LM #6660")
class DoubledInGroupOfOne(LoopbackEngine):
    """The gradient in a group of one is doubled before each further micro-batch."""

    @contextmanager
    def _accumulation(self, *, last: bool) -> Iterator[None]:
        with super()._accumulation(last=last):
            yield
        for param in self.trained():
            if param.grad is not None and not last and self.layout.size("copies") == 1:
                param.grad.mul_(2)


@mutant("train.uneven_ranks", group="dp", world=2)
class EmptyRankKeepsWeights(LoopbackEngine):
    """A rank without documents takes part in the reduction, and ignores its result."""

    def _prepare(self, batch: Batch, *, needs_weight: bool) -> MicroBatches:
        self.idle = not batch.num_tokens
        return super()._prepare(batch, needs_weight=needs_weight)

    def reduce_gradient(self, weight: Weight, grad: Tensor) -> Tensor:
        total = super().reduce_gradient(weight, grad)
        return torch.zeros_like(total) if self.idle else total


@mutant("train.uneven_ranks", group="dp", world=2, deadline=0.1, seen_in="prime-rl #2358")
class EmptyRankSkipsReduction(LoopbackEngine):
    """A rank without documents does not enter the reduction, and all other ranks wait for it."""

    def _prepare(self, batch: Batch, *, needs_weight: bool) -> MicroBatches:
        self.idle = not batch.num_tokens
        return super()._prepare(batch, needs_weight=needs_weight)

    def _clip_gradients(self, max_norm: float | None) -> float:
        return 0.0 if self.idle else super()._clip_gradients(max_norm)


# --- the optimizer ------------------------------------------------------------------------------


@mutant("train.trajectory", group="core", part="optimizer", seen_in="Automodel #3191")
class StepCountAhead(AdamW):
    """The step count is one ahead of the moments: the first update is 1.34 times too large."""

    def corrected(self, state: dict[str, Tensor], group: Group) -> tuple[Tensor, Tensor]:
        return super().corrected(state | {"step": state["step"] + 1}, group)


@mutant("train.trajectory", group="core", part="optimizer")
class NoBiasCorrection(AdamW):
    """Moments are used with their bias towards zero."""

    def corrected(self, state: dict[str, Tensor], group: Group) -> tuple[Tensor, Tensor]:
        return state["exp_avg"], state["exp_avg_sq"]


@mutant("train.trajectory", group="core", part="optimizer")
class CoupledDecay(AdamW):
    """Weight decay is added to the gradient (L2), not to the weight."""

    def adam_update(
        self, param: Tensor, grad: Tensor, state: dict[str, Tensor], group: Group
    ) -> None:
        super().adam_update(
            param, grad + group["weight_decay"] * param, state, group | {"weight_decay": 0.0}
        )


@mutant("train.trajectory", group="core", part="optimizer")
class DecayAtBaseRate(AdamW):
    """Weight decay uses the base rate, not the schedule's."""

    def decayed(self, param: Tensor, group: Group) -> Tensor:
        return super().decayed(param, group | {"lr": self.defaults["lr"]})


@mutant("train.trajectory", group="core", part="optimizer")
class NormsNotDecayed(AdamW):
    """Vectors, that is norms and biases, have no weight decay without being asked for it."""

    def decayed(self, param: Tensor, group: Group) -> Tensor:
        return param if param.dim() == 1 else super().decayed(param, group)


@mutant("train.trajectory", group="core", part="optimizer")
class EpsInsideRoot(AdamW):
    """Adam's epsilon is inside the square root."""

    def corrected(self, state: dict[str, Tensor], group: Group) -> tuple[Tensor, Tensor]:
        first, second = super().corrected(state, group)
        return first, second + group["eps"]


@mutant("train.epsilon", group="core", part="optimizer")
class EpsBeforeCorrection(AdamW):
    """Epsilon is added before the second moment is corrected: at first it is 30 times larger."""

    def adam_update(
        self, param: Tensor, grad: Tensor, state: dict[str, Tensor], group: Group
    ) -> None:
        step = float(state.get("step", torch.zeros(()))) + 1
        eps = group["eps"] / math.sqrt(1 - group["betas"][1] ** step)
        super().adam_update(param, grad, state, group | {"eps": eps})


@mutant("train.epsilon", group="core", part="optimizer")
class EpsOfDefault(AdamW):
    """Epsilon is always 1e-8, whatever is configured."""

    def adam_update(
        self, param: Tensor, grad: Tensor, state: dict[str, Tensor], group: Group
    ) -> None:
        super().adam_update(param, grad, state, group | {"eps": 1e-8})


@mutant("train.trajectory", group="core", part="optimizer")
class BetasOfDefault(AdamW):
    """Betas are always (0.9, 0.999), whatever is configured."""

    def adam_update(
        self, param: Tensor, grad: Tensor, state: dict[str, Tensor], group: Group
    ) -> None:
        super().adam_update(param, grad, state, group | {"betas": (0.9, 0.999)})


@mutant("train.trajectory", group="core", part="optimizer", seen_in="Megatron-LM #5974")
class UpdateUnderApplied(AdamW):
    """The weights move two per cent less at an equal gradient."""

    def adam_update(
        self, param: Tensor, grad: Tensor, state: dict[str, Tensor], group: Group
    ) -> None:
        before = param.clone()
        super().adam_update(param, grad, state, group)
        param.lerp_(before, 0.02)


@mutant("train.trajectory", group="core", part="optimizer")
class MomentsInBfloat16(AdamW):
    """Moments are kept in bfloat16, where a thousandth of them is rounded away."""

    def moments(self, grad: Tensor, state: dict[str, Tensor], group: Group) -> None:
        super().moments(grad, state, group)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].copy_(state[name].bfloat16())


@mutant("train.trajectory", group="core")
class MastersRounded(LoopbackEngine):
    """Weights are rounded to bfloat16 after the step, and small updates are lost."""

    def _apply_optimizer(self, lr: float) -> None:
        super()._apply_optimizer(lr)
        for weight in self.held_and_trained():
            weight.local.copy_(weight.local.bfloat16())


@mutant("train.optimizer_by_path", group="core")
class PathIgnored(LoopbackEngine):
    """An optimizer named by path is replaced by AdamW."""

    def _build_model(self) -> None:
        super()._build_model()
        assert self.config.optimizer is not None
        plain = replace(self.config.optimizer, name="adamw", kwargs={})
        self.optimizer = build_optimizer(plain, self.describe_trained(), self.adamw)


@mutant("train.optimizer_by_path", group="core")
class OptimizersKwargsDropped(LoopbackEngine):
    """An optimizer named by path gets none of its keyword arguments."""

    def _build_model(self) -> None:
        super()._build_model()
        assert self.config.optimizer is not None
        self.optimizer = build_optimizer(
            replace(self.config.optimizer, kwargs={}), self.describe_trained(), self.adamw
        )


@mutant("train.decay", group="parameter_groups")
class MatricesTakenForAll(LoopbackEngine):
    """Norms and biases decay with ``decay: matrices``, too."""

    def describe(self, weight: Weight) -> TrainedWeight:
        return replace(super().describe(weight), dims=2, name="weight")


@mutant("train.decay", group="parameter_groups")
class ShardsTakenForVectors(LoopbackEngine):
    """Nothing decays with ``decay: matrices``, as where flat shards are asked for dimensions."""

    def describe(self, weight: Weight) -> TrainedWeight:
        return replace(super().describe(weight), dims=1)


@mutant("train.decay", group="parameter_groups")
class EmbeddingsNotDecayed(LoopbackEngine):
    """The embedding does not decay with ``decay: matrices``."""

    def describe(self, weight: Weight) -> TrainedWeight:
        described = super().describe(weight)
        return replace(described, dims=1) if "embed_tokens" in weight.name else described


@mutant("train.decay", group="parameter_groups")
class GroupsOfAdamWAlone(LoopbackEngine):
    """An optimizer named by path decays everything with ``decay: matrices``."""

    def describe(self, weight: Weight) -> TrainedWeight:
        described = super().describe(weight)
        assert self.config.optimizer is not None
        own = self.config.optimizer.name == "adamw"
        return described if own else replace(described, dims=2, name="weight")


# --- trained weights ----------------------------------------------------------------------------


@mutant("train.visible_at_once", group="core", part="model")
class TiedHeadDetached(Model):
    """A tied embedding gets only the gradient of its use as embedding."""

    def log_probs(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
    ) -> Tensor:
        weight = weight.detach() if self.shape.tied else weight
        return super().log_probs(hidden, weight, targets, temperature)


@mutant("train.visible_at_once", group="core", part="model", seen_in="NeMo-RL #227")
class TiedHeadCopied(Model):
    """The tied head of inference is a copy of the embedding from before the first step."""

    def log_probs(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
    ) -> Tensor:
        copy = self.__dict__.setdefault("head_copy", weight.detach().clone())
        fresh = self.training or not self.shape.tied
        return super().log_probs(hidden, weight if fresh else copy, targets, temperature)


@mutant("train.families", group="core")
class BiasesFrozen(LoopbackEngine):
    """Biases have no gradient."""

    def make_weight(self, name: str, shape: tuple[int, ...], adapter: bool) -> Weight:
        weight = super().make_weight(name, shape, adapter)
        if name.endswith("_proj.bias") and weight.param is not None:
            weight.param.requires_grad_(False)
            weight.trainable = False
        return weight


@mutant("train.families", group="core")
class PaddingRowFrozen(LoopbackEngine):
    """The embedding's row of the end token is treated as padding and has no gradient."""

    def own_gradient(self, weight: Weight) -> Tensor:
        grad = super().own_gradient(weight)
        if weight.name == "model.embed_tokens.weight":
            grad[self.raw_config["eos_token_id"]] = 0
        return grad


@mutant("train.entropy", group="core", part="model", seen_in="verl #1720")
class EntropyDetached(Model):
    """Entropy is right, and has no gradient."""

    def log_probs(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
    ) -> Tensor:
        chosen, entropy = super().log_probs(hidden, weight, targets, temperature).unbind(-1)
        return torch.stack((chosen, entropy.detach()), dim=-1)


@mutant("train.entropy", group="core", part="model")
class EntropyGradientAtOne(Model):
    """The entropy's gradient lacks the factor 1/temperature, while the entropy itself is right."""

    def log_probs(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
    ) -> Tensor:
        chosen, entropy = super().log_probs(hidden, weight, targets, temperature).unbind(-1)
        slower = entropy * temperature
        return torch.stack((chosen, slower + (entropy - slower).detach()), dim=-1)


@mutant("train.temperature", group="core", part="model")
class TemperatureInInferenceAlone(Model):
    """Training computes log-probs at temperature 1, whatever is asked for."""

    def scaled_logits(self, logits: Tensor, temperature: float) -> Tensor:
        return super().scaled_logits(logits, 1.0 if self.training else temperature)

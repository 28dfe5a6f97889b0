"""Defects of features beyond the core: experts, value heads, memory, half precision, RL."""
# ruff: noqa: D102 - the class describes the defect of its method

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.config import EngineConfig
from engine_api.losses import LossFn
from engine_api.results import LossOutput
from engine_loopback.engine import LoopbackEngine
from engine_loopback.layers import PackedInputs, Params
from engine_loopback.lora import pair_of
from engine_loopback.model import Model
from engine_loopback.optimizer import AdamW, Group, move_state
from engine_loopback.weights import Weight
from engine_mutants.mutant import mutant
from engine_mutants.refusal import Edits

# --- experts ------------------------------------------------------------------------------------


@mutant("forward.qwen3_moe", group="moe", part="model", seen_in="torchtitan #1448")
class ExpertsNotNormalised(Model):
    """The chosen experts' weights do not add up to one, in spite of norm_topk_prob."""

    def route(self, params: Params, x: Tensor, replayed: Tensor | None) -> Tensor:
        probs = self.linear(params, "mlp.gate", x).float().softmax(-1)
        weights, chosen = probs.topk(self.shape.top_k, dim=-1)
        return torch.zeros_like(probs).scatter(-1, chosen, weights).to(x.dtype)


@mutant("forward.qwen3_moe", group="moe", part="model", seen_in="Qwen3 #687")
class ExpertsAlwaysNormalised(Model):
    """The chosen experts' weights are made to add up to one, against config.json."""

    def route(self, params: Params, x: Tensor, replayed: Tensor | None) -> Tensor:
        mix = super().route(params, x, replayed)
        return mix / mix.sum(-1, keepdim=True)


@mutant("forward.qwen3_moe", group="moe", part="model")
class ExpertsSwapped(Model):
    """The first two experts get each other's tokens."""

    def route(self, params: Params, x: Tensor, replayed: Tensor | None) -> Tensor:
        first, second, *others = super().route(params, x, replayed).unbind(-1)
        return torch.stack((second, first, *others), dim=-1)


@mutant("forward.qwen3_moe", group="moe", part="model")
class ExpertsGateAndUpSwapped(Model):
    """An expert's fused gate and up projections are read in the reverse order."""

    def experts(self, params: Params, x: Tensor, mix: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for expert in range(self.shape.experts):
            name = f"mlp.experts.{expert}"
            gate = silu(self.linear(params, f"{name}.up_proj", x))
            gated = gate * self.linear(params, f"{name}.gate_proj", x)
            total = total + mix[:, expert, None] * self.linear(params, f"{name}.down_proj", gated)
        return total


@mutant("forward.qwen3_moe", group="moe", part="model")
class RouterInBfloat16(Model):
    """The router's probabilities are rounded to bfloat16 in a float32 computation."""

    def route(self, params: Params, x: Tensor, replayed: Tensor | None) -> Tensor:
        return super().route(params, x, replayed).bfloat16().to(x.dtype)


@mutant("forward.qwen3_moe", group="moe", part="model")
class ExpertsDropTokens(Model):
    """An expert takes at most 1.5 times its even share of the tokens and drops later ones."""

    def route(self, params: Params, x: Tensor, replayed: Tensor | None) -> Tensor:
        mix = super().route(params, x, replayed)
        capacity = math.ceil(1.5 * len(mix) * self.shape.top_k / self.shape.experts)
        return mix * ((mix > 0).cumsum(0) <= capacity)


@mutant("train.moe", group="moe", part="model")
class RouterNotTrained(Model):
    """The router gets no gradient through the experts' weights."""

    def route(self, params: Params, x: Tensor, replayed: Tensor | None) -> Tensor:
        return super().route(params, x, replayed).detach()


class _WithLoss(torch.autograd.Function):
    """The identity, which lets a scalar take part in the backward pass as a loss of its own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.scalar = torch.ones_like(loss)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], ctx.scalar


@mutant("train.moe", group="moe", part="model", seen_in="NeMo Automodel 0.7.0")
class AuxiliaryLossInGradient(Model):
    """The gradient of the router has that of a balancing loss, which the caller's loss has not."""

    def route(self, params: Params, x: Tensor, replayed: Tensor | None) -> Tensor:
        mix = super().route(params, x, replayed)
        probs = self.linear(params, "mlp.gate", x).float().softmax(-1)
        load = (mix > 0).float().mean(0) * self.shape.experts / self.shape.top_k
        # transformers' default of router_aux_loss_coef.
        return _WithLoss.apply(mix, 1e-3 * (load * probs.mean(0)).sum())


@mutant("train.moe", group="moe")
class ExpertsOfLastMicroBatch(LoopbackEngine):
    """Experts keep the gradient of the last micro-batch alone."""

    @contextmanager
    def _accumulation(self, *, last: bool) -> Iterator[None]:
        for weight in self.held_and_trained():
            if ".experts." in weight.name:
                weight.held.grad = None
        with super()._accumulation(last=last):
            yield


@mutant("train.moe", group="moe")
class RouterOfAnotherMemory(LoopbackEngine):
    """An optimizer other than ``adamw`` moves a copy of the router, which serves nothing."""

    def _apply_optimizer(self, lr: float) -> None:
        assert self.config.optimizer is not None
        routers = {w.name: w.local.clone() for w in self.held_and_trained() if ".gate." in w.name}
        super()._apply_optimizer(lr)
        if self.config.optimizer.name != "adamw":
            for weight in self.held_and_trained():
                if weight.name in routers:
                    weight.local.copy_(routers[weight.name])


# --- experts that a batch brings along ----------------------------------------------------------


@mutant("moe.replay", group="router_replay", part="model", seen_in="arXiv:2510.11370")
class ReplayDetached(Model):
    """Experts that a batch selects have weights without a gradient, so that no router learns."""

    def route(self, params: Params, x: Tensor, replayed: Tensor | None) -> Tensor:
        mix = super().route(params, x, replayed)
        return mix if replayed is None else mix.detach()


@mutant("moe.replay", group="router_replay", part="model")
class ReplayIgnoredInTraining(Model):
    """Experts that a batch selects serve their tokens in inference, and in training others do."""

    def experts_of(self, batch: Batch) -> list[Tensor | None]:
        return [None] * self.shape.layers if self.training else super().experts_of(batch)


@mutant("moe.replay", group="router_replay", part="model")
class ReplayForTheTokenBefore(Model):
    """Experts that a batch selects are shifted by one token, as targets are."""

    def experts_of(self, batch: Batch) -> list[Tensor | None]:
        return [None if one is None else one.roll(-1, 0) for one in super().experts_of(batch)]


@mutant("moe.replay", group="router_replay", part="model")
class ReplayWithOwnWeights(Model):
    """Experts that a batch selects get the weights of those that the router would select."""

    def route(self, params: Params, x: Tensor, replayed: Tensor | None) -> Tensor:
        if replayed is None:
            return super().route(params, x, None)
        own = super().route(params, x, None)
        weights = own.topk(self.shape.top_k, dim=-1).values
        chosen = torch.where(replayed < 0, own.topk(self.shape.top_k, dim=-1).indices, replayed)
        return torch.zeros_like(own).scatter(-1, chosen, weights)


@mutant("moe.replay", group="router_replay", part="model")
class ReplayOfUnknownIsLast(Model):
    """Tokens whose experts are not known (-1) are served by the last expert."""

    def route(self, params: Params, x: Tensor, replayed: Tensor | None) -> Tensor:
        known = None if replayed is None else replayed % self.shape.experts
        return super().route(params, x, known)


@mutant("moe.replay", group="router_replay", part="model", world=2, layout={"cp": 2})
class ReplayOfTheFirstPart(Model):
    """Each sequence-parallel rank takes the experts of the first rank's tokens."""

    def experts_of(self, batch: Batch) -> list[Tensor | None]:
        found = super().experts_of(batch)
        return [
            None if one is None else self.layout.all_gather(one, "sequence")[: len(one)]
            for one in found
        ]


@mutant("moe.replay_refused", group="router_replay")
class ReplayUnasked(LoopbackEngine):
    """A field ``routed_experts`` is left out in silence where it was not configured."""

    def _check_replayed(self, batch: Batch) -> None:
        if self.routing is not None:
            super()._check_replayed(batch)


@mutant("refusal.router_replay", group="router_replay", hides=(Capability.ROUTER_REPLAY,))
class ReplayIgnored(Edits):
    """Replay is not declared, and ``router_replay`` is ignored."""

    def edited(self, config: EngineConfig) -> EngineConfig:
        return replace(config, router_replay=False)


# --- value heads --------------------------------------------------------------------------------


@mutant("forward.values", group="value-head", part="model", model_type="value_model")
class ValuesSeeTheirToken(Model):
    """A value depends on the token that it is about."""

    def align(self, about_next: Tensor, packed: PackedInputs) -> Tensor:
        return super().align(about_next.roll(-1, 0), packed)


@mutant("forward.values", group="value-head", part="model", model_type="value_model")
class FirstValueCarries(Model):
    """First tokens have a value, that of the end of the document before."""

    def align(self, about_next: Tensor, packed: PackedInputs) -> Tensor:
        return about_next.roll(1, 0)[: packed.size]


@mutant("forward.values", group="value-head", part="model", model_type="value_model")
class ValueBiasDropped(Model):
    """The head's bias is not added."""

    def values(self, hidden: Tensor) -> Tensor:
        return self.linear({"score.weight": self.weight("score.weight")}, "score", hidden).float()


@mutant("train.trajectory", group="value-head", model_type="value_model")
class ValueHeadFrozen(LoopbackEngine):
    """The head does not train, while the model below it does."""

    def make_weight(self, name: str, shape: tuple[int, ...], adapter: bool) -> Weight:
        weight = super().make_weight(name, shape, adapter)
        if name.startswith("score.") and weight.param is not None:
            weight.param.requires_grad_(False)
            weight.trainable = False
        return weight


# --- memory -------------------------------------------------------------------------------------


@mutant("memory.offload", group="offload")
class OffloadLosesMoments(LoopbackEngine):
    """First moments that were on the host are zeros when they return."""

    def _apply_optimizer(self, lr: float) -> None:
        super()._apply_optimizer(lr)
        if self.config.memory.offload_optimizer and self.optimizer is not None:
            for state in self.optimizer.state.values():
                state["exp_avg"].zero_()


@mutant("memory.offload", group="offload")
class OffloadSkipsClipping(LoopbackEngine):
    """Gradients on the host are not clipped."""

    def clip(self, norm: float, max_norm: float | None) -> None:
        super().clip(norm, None if self.config.memory.offload_params else max_norm)


@mutant("memory.to", group="offload")
class MovedOptimizerKeepsOld(LoopbackEngine):
    """The optimizer keeps its old tensors after the model was moved away and back."""

    def move_weights(self, device: torch.device) -> None:
        for weight in self.weights.values():
            if weight.param is not None:
                trains = weight.param.requires_grad
                weight.param = torch.nn.Parameter(
                    weight.param.detach().to(device, copy=True), requires_grad=trains
                )


@mutant("memory.to", group="offload")
class MovedMomentsAreZero(LoopbackEngine):
    """Second moments are zeros when the optimizer's state returns to the device."""

    def to(
        self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        super().to(device, model=model, optimizer=optimizer, grad=grad)
        if optimizer and self.optimizer is not None:
            move_state(self.optimizer, self.device)
            for state in self.optimizer.state.values():
                state["exp_avg_sq"].zero_()


@mutant("memory.recompute", group="recompute", part="model")
class RecomputesUnpacked(Model):
    """A block's second forward ignores the ends of documents: only its gradient is wrong."""

    def layer(self, params: Params, x: Tensor, packed: PackedInputs) -> Tensor:
        if self.memory.recompute != "full":
            return super().layer(params, x, packed)
        calls = count()
        whole = replace(packed, mask=torch.ones_like(packed.mask).tril())
        again = lambda y: self.run_block(params, y, packed if next(calls) == 0 else whole)  # noqa: E731
        result: Tensor = checkpoint(again, x, use_reentrant=False)
        return result


@mutant("memory.recompute_saves", group="recompute", part="model")
class NothingRecomputed(Model):
    """Recompute is accepted, and all activations are kept."""

    def layer(self, params: Params, x: Tensor, packed: PackedInputs) -> Tensor:
        return self.run_block(params, x, packed)


@mutant("memory.chunks_bound", group="core", part="model")
class AllLogitsExist(Model):
    """``logit_chunk`` is accepted, and the logits of all tokens are computed at once."""

    def chunked(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        weight = self.weight("model.embed_tokens.weight" if self.shape.tied else "lm_head.weight")
        return self.log_probs(hidden, weight, targets, temperature)


@mutant("memory.chunks_bound", group="core", part="model")
class ChunksAreKept(Model):
    """Logits are computed in chunks, and those of all chunks are kept until the backward pass."""

    def chunked(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        weight, size = self.weight(self.head_name), self.memory.logit_chunk
        parts = zip(hidden.split(size), targets.split(size), strict=True)
        return torch.cat([self.log_probs(h, weight, t, temperature) for h, t in parts])


@mutant("train.shared_prefixes", group="shared-prefixes", part="model")
class AnswersSeeEachOther(Model):
    """Behind a shared beginning, a token attends to all earlier tokens of the other documents."""

    def tree_mask(self, parents: Tensor) -> Tensor:
        roots = list[int]()
        for node, above in enumerate(parents.tolist()):
            roots.append(node if above < 0 else roots[above])
        tree = torch.tensor(roots)
        return (tree[:, None] == tree[None, :]).tril()


@mutant("train.shared_prefixes", group="shared-prefixes", part="model")
class PositionsGoOn(Model):
    """Positions count the tokens of a whole tree, so that they go on from answer to answer."""

    def depths(self, parents: Tensor) -> Tensor:
        starts = torch.where(parents < 0, torch.arange(len(parents)), 0).cummax(0).values
        return torch.arange(len(parents)) - starts


@mutant("train.shared_prefixes", group="shared-prefixes", part="model")
class AnswersFollowEachOther(Model):
    """The first token of an answer is predicted from the end of the answer before it."""

    def predicting(self, parents: Tensor) -> Tensor:
        return (torch.arange(len(parents)) - 1).clamp(min=0)


@mutant("train.shared_prefixes", group="shared-prefixes", part="model")
class GradientOfOneDocument(Model):
    """A shared token gets the gradient of the first document that has it, and of no other."""

    def align(self, about_next: Tensor, packed: PackedInputs) -> Tensor:
        values = super().align(about_next, packed)
        if packed.rows is None:
            return values
        met = set[int]()
        again = [row in met or bool(met.add(row)) for row in packed.rows.tolist()]
        return torch.where(torch.tensor(again)[:, None], values.detach(), values)


@mutant("train.shared_prefixes", group="shared-prefixes", part="model")
class NothingShared(Model):
    """Sharing is accepted, and each document is computed whole."""

    def find_node(
        self, nodes: dict[tuple[int, int], int], before: int, token: int, document: tuple[int, int]
    ) -> int:
        # A root of its own for each document.
        own = before if before >= 0 else -1 - document[0]
        return super().find_node(nodes, own, token, document)


@mutant("memory.compile", group="compile", part="model")
class NothingCompiled(Model):
    """``compile`` is accepted, and the blocks run as they are."""

    def layer(self, params: Params, x: Tensor, packed: PackedInputs) -> Tensor:
        return self.block(params, x, packed)


@mutant("memory.compile", group="compile", part="model")
class CompiledMaskStays(Model):
    """A compiled block keeps the mask of the first batch of each size."""

    def layer(self, params: Params, x: Tensor, packed: PackedInputs) -> Tensor:
        masks: dict[int, Tensor] = self.__dict__.setdefault("masks", {})
        if self.memory.compile:
            packed = replace(packed, mask=masks.setdefault(len(packed.ids), packed.mask))
        return super().layer(params, x, packed)


# --- half precision -----------------------------------------------------------------------------


@mutant("memory.half_precision", group="bf16")
class HalfPrecisionLosesMasters(LoopbackEngine):
    """The float32 weights are overwritten by the bfloat16 copies of the computation."""

    def _apply_optimizer(self, lr: float) -> None:
        super()._apply_optimizer(lr)
        if self.config.precision.compute == "bfloat16":
            for weight in self.held_and_trained():
                weight.local.copy_(weight.local.bfloat16())


@mutant("memory.half_precision", group="bf16", part="optimizer")
class UpdatesRoundedToWeights(AdamW):
    """Updates are computed in bfloat16, so that those below half a unit of the weight are lost."""

    def adam_update(
        self, param: Tensor, grad: Tensor, state: dict[str, Tensor], group: Group
    ) -> None:
        before = param.clone()
        super().adam_update(param, grad, state, group)
        param.copy_(before + (param.bfloat16() - before.bfloat16()).to(param.dtype))


@mutant("memory.precisions", group="bf16", part="model")
class ComputesInMastersDtype(Model):
    """bfloat16 masters are computed with in bfloat16, though the computation is in float32."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.dtype = next(iter(self.weights.values())).dtype


@mutant("memory.precisions", group="bf16", world=2)
class ReducesInFloat32(LoopbackEngine):
    """``precision.reduce`` is accepted, and gradients are summed in float32 all the same."""

    def reduce_gradient(self, weight: Weight, grad: Tensor) -> Tensor:
        return self.sum_over_copies(weight, grad)


# --- policy optimization ------------------------------------------------------------------------


@mutant("rl.ppo", group="rl")
class OldLogProbsRecomputed(LoopbackEngine):
    """Old log-probs are those of the current weights: the ratio is one, and nothing is clipped."""

    def _run_train(
        self, parts: Sequence[Batch], loss: LossFn, denominator: float, temperature: float
    ) -> list[LossOutput]:
        with torch.no_grad():
            new = [
                self.model.outputs(part, ("log_probs",), temperature).log_probs for part in parts
            ]
        recomputed = [
            part if log_probs is None else part.with_fields(old_log_probs=log_probs)
            for part, log_probs in zip(parts, new, strict=True)
        ]
        return super()._run_train(recomputed, loss, denominator, temperature)


@mutant("rl.grpo", group="rl")
class LongAnswersWeighLess(LoopbackEngine):
    """Each micro-batch's gradient is divided by its tokens and multiplied by their mean number."""

    def _run_train(
        self, parts: Sequence[Batch], loss: LossFn, denominator: float, temperature: float
    ) -> list[LossOutput]:
        mean = sum(part.num_tokens for part in parts) / len(parts)
        results: list[LossOutput] = []
        for part in parts:
            results += super()._run_train(
                [part], loss, denominator * (part.num_tokens or 1) / mean, temperature
            )
        return results


@mutant("rl.reference", group="rl", part="model")
class AdapterSubtracted(Model):
    """A reference merges the adapter and subtracts it again, which leaves rounding in the base."""

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        for weight in self.weights.values():
            if pair := pair_of(weight.name, self.weights):
                delta = self.adapter_scale() * (pair[1].local @ pair[0].local)
                weight.local.add_(delta).sub_(delta)
        with super().without_adapter():
            yield


@mutant("memory.half_precision", group="bf16", part="model")
class HeadInMastersDtype(Model):
    """The head computes in the dtype of the masters, in place of the computation's."""

    def log_probs(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
    ) -> Tensor:
        del weight
        head = "model.embed_tokens.weight" if self.shape.tied else "lm_head.weight"
        own = self.weights[head].held.to(self.device)
        return super().log_probs(hidden.to(own.dtype), own, targets, temperature)


@mutant("memory.chunks", group="core", part="model")
class ChunksOfOneTokenShift(Model):
    """Each token has the log-prob of the one before it where a chunk has one token."""

    def chunked(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        result = super().chunked(hidden, targets, temperature)
        return result.roll(1, 0) if self.memory.logit_chunk == 1 else result

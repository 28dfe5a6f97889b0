"""Defects of ranks that share a model: sums over a wrong group, parts for wholes, and doubles."""

# ruff: noqa: D102 - the class describes the defect of its method

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine_api.batch import Batch
from engine_api.config import Parallelism
from engine_api.errors import ConfigError
from engine_api.losses import LossFn
from engine_api.prepare import MicroBatches
from engine_api.results import LossOutput, TokenOutputs, Topology
from engine_loopback.engine import LoopbackEngine
from engine_loopback.layers import PackedInputs, Params
from engine_loopback.model import Model, Taught
from engine_loopback.parallel import Layout
from engine_loopback.weights import Partition, Weight
from engine_mutants.mutant import mutant

# --- data parallelism and hybrid sharding ---------------------------------------------------------


@mutant(
    "train.uneven_ranks",
    group="dp",
    world=2,
    seen_in="prime-rl #2562, miles #3231, Megatron-LM #4590",
)
class RanksWeighAlike(LoopbackEngine):
    """Each rank divides by its own number of tokens, so that few tokens weigh as much as many."""

    def _run_train(
        self, parts: Sequence[Batch], loss: LossFn, denominator: float, temperature: float
    ) -> list[LossOutput]:
        own = sum(float(part.loss_weight.sum()) for part in parts if part.num_tokens)
        return super()._run_train(
            parts, loss, own * self.topology.dp_size or denominator, temperature
        )


@mutant("parallel.hsdp", group="hsdp", world=2, seen_in="torchtitan #2318")
class CopiesAveraged(LoopbackEngine):
    """Hybrid sharding's copies average a gradient already divided by the global denominator."""

    def sum_over_copies(self, weight: Weight, grad: Tensor) -> Tensor:
        return super().sum_over_copies(weight, grad) / self.config.parallelism.dp_replicate


@mutant("parallel.hsdp", group="hsdp", world=2, seen_in="torchtitan #2318")
class NormCountsCopies(LoopbackEngine):
    """The gradient's norm counts each copy of hybrid sharding."""

    def counts(self, weight: Weight) -> bool:
        return super().counts(weight) or self.config.parallelism.dp_replicate > 1


# --- tensor parallelism ---------------------------------------------------------------------------


@mutant("parallel.tp", group="tp", world=2, seen_in="Megatron-LM #7452")
class HeadNormOfOwnHeads(LoopbackEngine):
    """The gradient of the norms of queries and keys covers a rank's own heads only."""

    def sum_over_tensor(self, grad: Tensor) -> Tensor:
        return grad


@mutant("parallel.tp", group="tp", part="model", world=2, seen_in="NeMo Automodel 0.7.0")
class BlockNormOfOwnTokens(Model):
    """The gradient of a block's norms covers a tensor-parallel rank's own part of the tokens only.

    So it is in sequence parallelism where the copies of a norm are not synchronized.
    """

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        normed = super().norm(x, weight)
        if self.layout.tensor == 1 or x.dim() != 2:
            return normed
        part = torch.arange(len(x), device=x.device) * self.layout.tensor // max(1, len(x))
        own = part == self.layout.index("tensor")
        return torch.where(own[:, None], normed, super().norm(x, weight.detach()))


@mutant("parallel.tp", group="tp", world=2, seen_in="verl #4710")
class NormCountsReplicated(LoopbackEngine):
    """The gradient's norm counts a weight once per tensor-parallel rank that holds it whole."""

    def counts(self, weight: Weight) -> bool:
        return super().counts(weight) or self.layout.tensor > 1


@mutant("parallel.tp_families", group="tp", part="model", world=2)
class InputGradientOfOwnPart(Model):
    """The gradient of a split layer's input covers a rank's own part only."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.collectives.copy_to_tensor = lambda x: x


@mutant("parallel.tp_indivisible", group="tp", part="model", world=2)
class PaddedVocabularyInSoftmax(Model):
    """Rows that pad the vocabulary to a multiple of 128 per rank enter the log-sum-exp."""

    def log_probs(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
    ) -> Tensor:
        padded = pad(weight, (0, 0, 0, -len(weight) % (128 * self.layout.tensor)))
        return super().log_probs(hidden, padded, targets, temperature)


@mutant(
    "train.moe", group="moe", part="model", world=2, layout={"tp": 2}, seen_in="Megatron-LM #7452"
)
class RouterGradientOfOwnPart(Model):
    """The router's gradient covers a tensor-parallel rank's own part of the experts only."""

    def route(self, params: Params, x: Tensor, replayed: Tensor | None) -> Tensor:
        mix = super().route(params, x, replayed)
        if self.layout.tensor == 1:
            return mix
        return mix.detach() + (mix - mix.detach()) / self.layout.tensor


@mutant(
    "train.moe", group="moe", part="model", world=2, layout={"tp": 2}, seen_in="torchtitan 0.3.0"
)
class ExpertInputsWithoutGradient(Model):
    """The input of experts that tensor parallelism splits has a gradient by the router alone."""

    def experts(self, params: Params, x: Tensor, mix: Tensor) -> Tensor:
        return super().experts(params, x.detach() if self.layout.tensor > 1 else x, mix)


@mutant("train.moe", group="moe", world=2)
class ExpertsAveraged(LoopbackEngine):
    """Experts' gradients are divided by the number of ranks, as no other weight's are."""

    def reduce_gradient(self, weight: Weight, grad: Tensor) -> Tensor:
        total = super().reduce_gradient(weight, grad)
        return total / self.topology.world_size if ".experts." in weight.name else total


@mutant("lora.train", group="lora", world=2, layout={"tp": 2})
class AdapterGradientOfOwnPart(LoopbackEngine):
    """The gradient of an adapter covers a tensor-parallel rank's own part only."""

    def reduce_gradient(self, weight: Weight, grad: Tensor) -> Tensor:
        if weight.adapter and self.layout.tensor > 1:
            return self.sum_over_copies(weight, grad)
        return super().reduce_gradient(weight, grad)


# --- pipelines ------------------------------------------------------------------------------------


@mutant("parallel.pp_tied", group="pp", world=2, seen_in="Megatron-LM #7452")
class TiedGradientOfOwnStage(LoopbackEngine):
    """A tied embedding's gradient covers its use on one stage only, as embedding or as head."""

    def sum_over_ends(self, grad: Tensor) -> Tensor:
        return grad


@mutant("parallel.pp_tied", group="pp", world=2)
class NormCountsTiedTwice(LoopbackEngine):
    """The gradient's norm counts a tied embedding on the first and on the last stage."""

    def counts(self, weight: Weight) -> bool:
        return super().counts(weight) or len(self.partition.stages(weight.name)) > 1


@mutant("parallel.pp", group="pp", world=2)
class LossScaledByStages(LoopbackEngine):
    """Gradients are divided by the number of stages, as if each had computed its own loss."""

    def own_gradient(self, weight: Weight) -> Tensor:
        return super().own_gradient(weight) / self.layout.stages


@mutant("parallel.pp", group="pp", world=2, seen_in="verl #4710")
class NormOfOwnStage(LoopbackEngine):
    """The gradient's norm covers a stage's own layers only."""

    def gradient_norm(self) -> float:
        own = [
            w.held.grad
            for w in self.held_and_trained()
            if self.counts(w) and w.held.grad is not None
        ]
        squares = torch.stack([grad.double().square().sum() for grad in own]).sum()
        return math.sqrt(float(self.layout.all_reduce(squares, "copies")))


@mutant("parallel.pp", group="pp", part="model", world=2)
class LastStageAnswersAlone(Model):
    """Outputs are known on the last stage only, and zeros on all others."""

    def outputs(
        self,
        batch: Batch,
        needs: Sequence[str],
        temperature: float,
        taught: Taught | None = None,
    ) -> TokenOutputs:
        given = super().outputs(batch, needs, temperature, taught)
        if self.layout.is_last or given.log_probs is None or given.log_probs.requires_grad:
            return given
        return TokenOutputs(
            log_probs=given.log_probs * 0,
            entropy=None if given.entropy is None else given.entropy * 0,
        )


@mutant("parallel.pp_indivisible", group="pp", part="partition", world=2)
class LayerLost(Partition):
    """A number of layers that the stages do not divide is accepted, and a layer is lost."""

    def check(self) -> None:
        """Refuse nothing."""


@mutant("train.accumulation", group="pp", world=2, layout={"pp": 2})
class PipelineBeginsAnew(LoopbackEngine):
    """A pipeline drops the gradient that waits for its step at each ``forward_backward``."""

    def _run_train(
        self, parts: Sequence[Batch], loss: LossFn, denominator: float, temperature: float
    ) -> list[LossOutput]:
        if self.layout.stages > 1:
            self._zero_grad()
        return super()._run_train(parts, loss, denominator, temperature)


# --- context and sequence parallelism -------------------------------------------------------------


@mutant("parallel.cp", group="cp", part="model", world=2, seen_in="verl PR 4250")
class TargetsShiftedWithinSlice(Model):
    """Targets are shifted within a rank's slice, so that the last token of each has a wrong one."""

    def next_tokens(self, ids: Tensor) -> Tensor:
        return ids.view(self.layout.sequence, -1).roll(-1, 1).flatten()


@mutant("parallel.cp", group="cp", part="model", world=2)
class PositionsRestart(Model):
    """Positions of a document that crosses the split restart in each slice."""

    def positions(self, documents: Tensor, ends: Tensor) -> Tensor:
        size = len(documents) // self.layout.sequence
        begin = torch.arange(self.layout.sequence).repeat_interleave(size) * size
        return torch.arange(len(documents)) - torch.maximum(ends[documents], begin)


@mutant("parallel.cp", group="cp", part="model", world=2)
class MaskOfOwnSlice(Model):
    """A token attends to tokens of its rank's slice only."""

    def document_mask(self, documents: Tensor, own: Tensor) -> Tensor:
        return super().document_mask(documents, own) & (torch.arange(len(documents)) >= own[0])


@mutant("parallel.cp", group="cp", part="model", world=2)
class GradientOncePerSlice(Model):
    """Every rank's gradient of the same loss is summed over the ranks that share it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.collectives.gather_outputs = self.collectives.gather_sequence


@mutant("parallel.cp", group="cp", part="model", world=2, seen_in="torchtitan 0.3.0")
class GatheredKeysWithoutGradient(Model):
    """Keys and values that were gathered over the ranks have no gradient."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        gather = self.collectives.gather_sequence
        if self.layout.sequence > 1:
            self.collectives.gather_sequence = lambda x: gather(x).detach()


@mutant("parallel.ulysses", group="ulysses", part="model", world=2)
class KeyGradientOfOwnQueries(Model):
    """The gradient of keys and values covers a rank's own queries only."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.collectives.gather_sequence = self.collectives.gather_outputs


@mutant("parallel.ulysses", group="ulysses", part="model", world=2)
class RanksRoundDifferently(Model):
    """Ranks that share documents return different last bits."""

    def align(self, about_next: Tensor, packed: PackedInputs) -> Tensor:
        return super().align(about_next, packed) * (1 + 1e-7 * self.layout.here.sequence)


@mutant("parallel.ulysses", group="ulysses", world=2)
class GradientOfOwnSlice(LoopbackEngine):
    """Gradients are not summed over the ranks that share documents."""

    def sum_over_copies(self, weight: Weight, grad: Tensor) -> Tensor:
        return grad if self.layout.sequence > 1 else super().sum_over_copies(weight, grad)


# --- experts --------------------------------------------------------------------------------------


@mutant("parallel.ep", group="ep", world=2, seen_in="Megatron-LM #7452")
class ExpertGradientsAsDense(LoopbackEngine):
    """Experts' gradients are summed over all copies of dense weights, with different experts."""

    def sum_over_copies(self, weight: Weight, grad: Tensor) -> Tensor:
        return self.layout.all_reduce(grad, "copies")


@mutant("parallel.ep", group="ep", world=2)
class ExpertGradientsAveraged(LoopbackEngine):
    """Gradients of experts are divided by the number of ranks that sent them tokens."""

    def sum_over_copies(self, weight: Weight, grad: Tensor) -> Tensor:
        total = super().sum_over_copies(weight, grad)
        dense = self.partition.expert_rank(weight.name) is None
        return total if dense else total / self.layout.expert


@mutant("parallel.ep", group="ep", part="model", world=2)
class RoutingNumberedWithinRank(Model):
    """A rank looks up its experts' weights by their numbers on that rank."""

    def experts(self, params: Params, x: Tensor, mix: Tensor) -> Tensor:
        first = self.layout.here.expert * (self.shape.experts // self.layout.expert)
        return super().experts(params, x, mix.roll(first, 1))


@mutant("parallel.ep", group="ep", part="model", world=2)
class TokensBeyondCapacityDropped(Model):
    """An expert takes no more tokens than a quarter above its even share."""

    def experts(self, params: Params, x: Tensor, mix: Tensor) -> Tensor:
        capacity = math.ceil(1.25 * len(mix) * self.shape.top_k / self.shape.experts)
        return super().experts(params, x, mix * ((mix > 0).cumsum(0) <= capacity))


@mutant("parallel.ep_indivisible", group="ep", part="partition", world=2)
class ExpertLost(Partition):
    """A number of experts that the ranks do not divide is accepted, and an expert is lost."""

    def check(self) -> None:
        """Refuse nothing."""


# --- coordinates of ranks -------------------------------------------------------------------------


@mutant("parallel.topology", group="tp", part="layout", world=2)
class TwoPrimaries(Layout):
    """Every tensor-parallel rank is reported as the primary."""

    @property
    def topology(self) -> Topology:
        there = super().topology
        return replace(there, is_primary=self.here.stage == self.here.sequence == 0)


@mutant("parallel.topology", group="tp", part="layout", world=2)
class TensorRanksCountAsData(Layout):
    """Tensor-parallel ranks are numbered as data-parallel ones."""

    @property
    def topology(self) -> Topology:
        return replace(super().topology, dp_rank=self.rank, dp_size=self.world, is_primary=True)


@mutant("parallel.topology", group="ulysses", part="layout", world=2)
class UlyssesRanksCountAsData(Layout):
    """The topology counts sequence-parallel ranks in the size of data parallelism as well."""

    @property
    def topology(self) -> Topology:
        found = super().topology
        sizes = {**found.sizes, "dp": self.data * self.sequence}
        return replace(found, sizes=sizes)


@mutant("parallel.misfit", group="core", part="layout", world=2)
class MisfitFallsBack(Layout):
    """Sizes that do not multiply to the world are replaced by data parallelism."""

    def __init__(self, parallelism: Parallelism, world: int, rank: int) -> None:
        try:
            super().__init__(parallelism, world, rank)
        except ConfigError:
            super().__init__(Parallelism(), world, rank)


@mutant("parallel.other_documents", group="ulysses", world=2)
class FirstRanksDocuments(LoopbackEngine):
    """Ranks that share documents use those of the first one, and drop their own."""

    def _prepare(self, batch: Batch, *, needs_weight: bool) -> MicroBatches:
        rows = self.comm.all_gather((self.topology.dp_rank, batch))
        first = next(other for dp_rank, other in rows if dp_rank == self.topology.dp_rank)
        return super()._prepare(first, needs_weight=needs_weight)

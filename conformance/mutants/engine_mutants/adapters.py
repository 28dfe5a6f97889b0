"""Defects of low-rank adapters."""
# ruff: noqa: D102 - the class describes the defect of its method

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from engine_api.batch import Batch
from engine_api.contract import Adapter
from engine_api.results import TokenOutputs
from engine_api.weights import ShardExport
from engine_loopback.engine import LoopbackEngine
from engine_loopback.layers import Params
from engine_loopback.lora import pair_of
from engine_loopback.model import Model
from engine_loopback.weights import Weight
from engine_mutants.mutant import mutant


@mutant("lora.train", group="lora", seen_in="a comment in verl's code")
class AdapterNotMerged(LoopbackEngine):
    """The merged export sends the base weights."""

    def merged(self, weight: Weight) -> Tensor:
        return weight.local


@mutant("lora.train", group="lora")
class MergedWithoutScale(LoopbackEngine):
    """The merged export adds B A without alpha / rank."""

    def merged(self, weight: Weight) -> Tensor:
        config = self.config
        if config.lora is not None:
            unscaled = replace(config.lora, alpha=float(config.lora.rank))
            self.config = replace(config, lora=unscaled)
        try:
            return super().merged(weight)
        finally:
            self.config = config


@mutant("lora.train", group="lora")
class MergedInBfloat16(LoopbackEngine):
    """The product of B and A is formed in bfloat16 before it is merged."""

    def merged(self, weight: Weight) -> Tensor:
        whole = super().merged(weight)
        return weight.local + (whole - weight.local).bfloat16().to(whole.dtype)


@mutant("lora.train", group="lora")
class ProductRoundedToMasters(LoopbackEngine):
    """The product of B and A is rounded to the masters' dtype before it is merged."""

    def merged(self, weight: Weight) -> Tensor:
        pair = pair_of(weight.name, self.weights) if weight.merges else None
        if pair is None or self.config.lora is None:
            return super().merged(weight)
        a, b = pair
        scale = self.config.lora.alpha / self.config.lora.rank
        delta = scale * (b.local.float() @ a.local.float())
        return weight.local + delta.to(weight.dtype)


@mutant("lora.train", group="lora", part="model")
class AdapterScaledByRoot(Model):
    """The adapter's scale is alpha over the root of the rank (rsLoRA) without being asked for."""

    def adapter_scale(self) -> float:
        assert self.lora is not None
        return self.lora.alpha / math.sqrt(self.lora.rank)


@mutant("lora.train", group="lora")
class NormsTrainBesideAdapter(LoopbackEngine):
    """The base model's norms train as well."""

    def make_weight(self, name: str, shape: tuple[int, ...], adapter: bool) -> Weight:
        weight = super().make_weight(name, shape, adapter)
        if name.endswith("norm.weight") and weight.param is not None:
            weight.param.requires_grad_(True)
            weight.trainable = True
        return weight


@mutant("lora.train", group="lora", part="model")
class AdapterStaysOnForReference(Model):
    """The reference is computed with the adapter, and every KL is zero."""

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        yield


@mutant("lora.switched", group="lora", part="model")
class AdapterStaysOff(Model):
    """The adapter stays off after a reference, so that later outputs are the base model's."""

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        self.adapter_on = False
        yield


@mutant("lora.switched", group="lora", part="model")
class AdapterDropsInInference(Model):
    """The adapter's dropout is on in inference too."""

    def linear(self, params: Params, name: str, x: Tensor) -> Tensor:
        was = self.training
        self.training = True
        try:
            return super().linear(params, name, x)
        finally:
            self.training = was


@mutant("lora.switched", group="lora", world=2)
class RanksDropAlike(LoopbackEngine):
    """All data-parallel ranks drop the same inputs of an adapter."""

    @property
    def _seed_rank(self) -> int:
        return 0


@mutant("lora.switched", group="lora")
class StepsDropAlike(LoopbackEngine):
    """Each training pass drops the same inputs of an adapter."""

    @contextmanager
    def _accumulation(self, *, last: bool) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]), super()._accumulation(last=last):
            torch.manual_seed(self.config.seed)
            yield


@mutant("lora.train", group="lora")
class SecondFactorNotZero(LoopbackEngine):
    """B starts as small random values, so that training does not start at the base model."""

    def _build_model(self) -> None:
        super()._build_model()
        for weight in self.weights.values():
            if weight.name.endswith("lora_B.weight"):
                weight.local.fill_(1e-4)


@mutant("lora.absent", group="lora")
class AbsentAdapterIgnored(LoopbackEngine):
    """An engine without an adapter returns the policy as its reference, and every KL is zero."""

    def infer_batch(
        self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False, adapter: bool = True
    ) -> TokenOutputs:
        there = adapter or self.config.lora is None
        return super().infer_batch(batch, temperature=temperature, entropy=entropy, adapter=there)


@mutant("lora.resume", group="lora")
class AdapterMomentsNotSaved(LoopbackEngine):
    """A checkpoint holds the adapter without its moments, which start again from zero."""

    def optimizer_state(self) -> Iterator[tuple[Weight, str, Tensor]]:
        return (row for row in super().optimizer_state() if not row[0].adapter)


@mutant("lora.save_hf", group="lora")
class FolderOfBaseWeights(LoopbackEngine):
    """The Hugging Face folder gets the base weights; the export for rollouts is merged."""

    def write_folder(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        super().write_folder(directory, {name: self.weights[name].local for name in tensors})


@mutant("lora.base", group="lora")
class BaseExportMerged(LoopbackEngine):
    """The base export has the adapter merged in, so that a server that adds it has it twice."""

    def exported(self, adapter: Adapter) -> list[Weight]:
        return super().exported("merged" if adapter == "base" else adapter)


@mutant("lora.base", group="lora")
class AbsentAdapterExported(LoopbackEngine):
    """An engine without an adapter exports its weights as an adapter's base."""

    def check_adapter(self, adapter: Adapter) -> None:
        if adapter != "base":
            super().check_adapter(adapter)


@mutant("lora.shards", group="lora", world=2)
class ShardsAlwaysMerged(LoopbackEngine):
    """Shards are always those of the merged weights."""

    def get_per_tensor_param_shard(
        self, *, dtype: torch.dtype | None = None, adapter: Adapter = "merged"
    ) -> ShardExport:
        self.check_adapter(adapter)
        return super().get_per_tensor_param_shard(dtype=dtype)


@mutant("export.first_values", group="lora")
class AdapterOfPositiveValues(LoopbackEngine):
    """A new adapter's A has positive values alone."""

    def _build_model(self) -> None:
        super()._build_model()
        for weight in self.weights.values():
            if weight.adapter and weight.param is not None:
                weight.local.abs_()


@mutant("export.first_values", group="lora")
class AdapterSpreadByRank(LoopbackEngine):
    """A new adapter's A is spread by the adapter's rank, where the layer's inputs are meant."""

    def _build_model(self) -> None:
        super()._build_model()
        for weight in self.weights.values():
            if weight.adapter and weight.param is not None:
                weight.local.mul_(math.sqrt(weight.shape[1] / weight.shape[0]))


@mutant("lora.resume", group="lora")
class DropsWhenNeverTrained(LoopbackEngine):
    """An adapter drops inputs in inference as long as the engine has not trained."""

    @contextmanager
    def _inference(self, adapter: bool) -> Iterator[None]:
        with super()._inference(adapter):
            self.model.training = self.optimizer is None
            yield
            self.model.training = False


@mutant("lora.dropout_tp", group="lora", world=2)
class DropoutIgnoredUnderTp(LoopbackEngine):
    """Dropout of an adapter is accepted under tensor parallelism, and left out."""

    def _build(self) -> None:
        lora = self.config.lora
        if lora is not None and self.config.parallelism.tp > 1:
            self.config = replace(self.config, lora=replace(lora, dropout=0.0))
        super()._build()

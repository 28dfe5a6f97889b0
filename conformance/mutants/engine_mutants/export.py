"""Defects of what an engine hands out: names, bits, shards and folders."""

# ruff: noqa: D102 - a mutant's docstring tells what its method does wrong

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine_api.contract import Adapter
from engine_api.weights import ShardExport, WeightExport
from engine_loopback.engine import LoopbackEngine
from engine_loopback.weights import Weight
from engine_mutants.mutant import mutant

_EMBEDDING = "model.embed_tokens.weight"
Dtype = torch.dtype | None


# --- which values ----------------------------------------------------------------------------------


@mutant("train.visible_at_once", group="core")
class StaleExport(LoopbackEngine):
    """The export keeps the copies that it made first, and steps do not reach them."""

    def _build(self) -> None:
        super()._build()
        self.copies: dict[tuple[str, Dtype], Tensor] = {}

    def shard(self, weight: Weight, dtype: Dtype) -> Tensor:
        return self.copies.setdefault((weight.name, dtype), super().shard(weight, dtype).clone())


@mutant("train.visible_at_once", group="core", seen_in="NeMo-RL #227")
class StaleTiedWeight(LoopbackEngine):
    """The tied weight is exported as it was read: steps move the other of two copies."""

    def _build(self) -> None:
        super()._build()
        self.stale = self.weights[_EMBEDDING].local.clone()

    def shard(self, weight: Weight, dtype: Dtype) -> Tensor:
        stale = weight.name == _EMBEDDING and self.shape.tied
        return self.stale.to(dtype or self.stale.dtype) if stale else super().shard(weight, dtype)


@mutant("export.moe", group="moe")
class FusedHalvesSwapped(LoopbackEngine):
    """The halves of the experts' fused first projection are exported under each other's names."""

    def shard(self, weight: Weight, dtype: Dtype) -> Tensor:
        swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        part = weight.name.split(".")[-2]
        fused = ".experts." in weight.name and part in swap
        return super().shard(
            self.weights[weight.name.replace(part, swap[part])] if fused else weight, dtype
        )


@mutant("export.exact", group="core")
class Bfloat16Truncated(LoopbackEngine):
    """The bfloat16 export cuts bits off instead of rounding to the nearest."""

    def shard(self, weight: Weight, dtype: Dtype) -> Tensor:
        if dtype != torch.bfloat16:
            return super().shard(weight, dtype)
        exact = super().shard(weight, torch.float32)
        return (exact.contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32).bfloat16()


@mutant("export.exact", group="core")
class RequestedDtypeIgnored(LoopbackEngine):
    """The export comes in the stored dtype whatever is asked for."""

    def get_per_tensor_param(
        self, *, dtype: Dtype = None, adapter: Adapter = "merged", bucket_bytes: int = 512 << 20
    ) -> WeightExport:
        del dtype
        return super().get_per_tensor_param(adapter=adapter, bucket_bytes=bucket_bytes)


@mutant("export.exact", group="core")
class NormsStayFloat32(LoopbackEngine):
    """Norms are exported in float32 though bfloat16 is asked for."""

    def shard(self, weight: Weight, dtype: Dtype) -> Tensor:
        return super().shard(weight, None if weight.name.endswith("norm.weight") else dtype)


@mutant("export.exact", group="core")
class PaddedVocabulary(LoopbackEngine):
    """The embedding is exported with the rows that pad the vocabulary."""

    def assembled(self, weight: Weight, shard: Tensor) -> Tensor:
        whole = super().assembled(weight, shard)
        return pad(whole, (0, 0, 0, 8)) if weight.name == _EMBEDDING else whole


@mutant("export.exact", group="core")
class ExportIntoOneBuffer(LoopbackEngine):
    """All tensors of a bucket are put into the same memory before the first one is handed out."""

    def whole_tensors(self, weights: list[Weight], dtype: Dtype, bucket_bytes: int) -> WeightExport:
        for bucket in self.buckets(weights, dtype, bucket_bytes):
            memory = torch.empty(
                max(torch.Size(w.shape).numel() for w in bucket), dtype=dtype or torch.float32
            )
            views = [
                memory[: torch.Size(weight.shape).numel()].view(weight.shape) for weight in bucket
            ]
            for weight, view in zip(bucket, views, strict=True):
                view.copy_(self.assembled(weight, self.shard(weight, dtype)))
            yield from ((weight.name, view) for weight, view in zip(bucket, views, strict=True))


@mutant("export.exact", group="core")
class LargeTensorLost(LoopbackEngine):
    """A tensor that is larger than a bucket is left out."""

    def buckets(self, weights: list[Weight], dtype: Dtype, limit: int) -> Iterator[list[Weight]]:
        for bucket in super().buckets(weights, dtype, limit):
            if len(bucket) > 1 or torch.Size(bucket[0].shape).numel() * 4 <= max(limit, 1000):
                yield bucket


@mutant("export.bounded", group="core", world=2)
class AllGatheredFirst(LoopbackEngine):
    """All whole tensors are gathered before the first one is handed out, whatever the size of a bucket."""

    def whole_tensors(self, weights: list[Weight], dtype: Dtype, bucket_bytes: int) -> WeightExport:
        yield from list(super().whole_tensors(weights, dtype, bucket_bytes))


@mutant("export.bounded", group="core")
class BucketsIgnored(LoopbackEngine):
    """All whole tensors are in one bucket, whatever size is asked for."""

    def whole_tensors(self, weights: list[Weight], dtype: Dtype, bucket_bytes: int) -> WeightExport:
        del bucket_bytes
        return super().whole_tensors(weights, dtype, 1 << 60)


# --- which names -----------------------------------------------------------------------------------


@mutant("export.exact", group="core", seen_in="NeMo-RL #227")
class TiedHeadExported(LoopbackEngine):
    """A head that is tied to the embedding is exported as well."""

    def whole_tensors(self, weights: list[Weight], dtype: Dtype, bucket_bytes: int) -> WeightExport:
        yield from super().whole_tensors(weights, dtype, bucket_bytes)
        if self.shape.tied:
            yield (
                "lm_head.weight",
                self.assembled(
                    self.weights[_EMBEDDING], self.shard(self.weights[_EMBEDDING], dtype)
                ),
            )


@mutant("export.exact", group="core")
class WrapperInNames(LoopbackEngine):
    """Names of layers carry a wrapper's prefix."""

    def whole_tensors(self, weights: list[Weight], dtype: Dtype, bucket_bytes: int) -> WeightExport:
        for name, tensor in super().whole_tensors(weights, dtype, bucket_bytes):
            yield name.replace(".self_attn.", "._checkpoint_wrapped_module.self_attn."), tensor


@mutant("export.exact", group="core", world=2)
class OrderOfOneRank(LoopbackEngine):
    """All ranks but the first hand out names sorted."""

    def whole_tensors(self, weights: list[Weight], dtype: Dtype, bucket_bytes: int) -> WeightExport:
        export = super().whole_tensors(weights, dtype, bucket_bytes)
        return iter(sorted(export)) if self.layout.rank else export


@mutant("export.exact", group="core")
class ExportCounts(LoopbackEngine):
    """``weight_version`` grows by an export."""

    def whole_tensors(self, weights: list[Weight], dtype: Dtype, bucket_bytes: int) -> WeightExport:
        self._step += 1
        return super().whole_tensors(weights, dtype, bucket_bytes)


@mutant("export.exact", group="value-head", model_type="value_model")
class ScoreBiasLost(LoopbackEngine):
    """The value head's bias is not exported."""

    def exported(self, adapter: Adapter) -> list[Weight]:
        return [weight for weight in super().exported(adapter) if weight.name != "score.bias"]


@mutant("parallel.ep", group="ep", world=2)
class ExpertsNumberedWithinRank(LoopbackEngine):
    """Experts are exported under the numbers that they have on their rank, rotated by one rank's."""

    def whole_tensors(self, weights: list[Weight], dtype: Dtype, bucket_bytes: int) -> WeightExport:
        own = self.shape.experts // self.layout.expert
        moved = {
            f".experts.{e}.": f".experts.{(e + own) % self.shape.experts}."
            for e in range(self.shape.experts)
        }
        for name, tensor in super().whole_tensors(weights, dtype, bucket_bytes):
            found = next((old for old in moved if old in name), None)
            yield (name.replace(found, moved[found]) if found else name), tensor


# --- shards ----------------------------------------------------------------------------------------


@mutant("export.shards", group="export-shards", world=2)
class ReplicasNotCounted(LoopbackEngine):
    """Every copy says that it is the first."""

    def get_per_tensor_param_shard(
        self, *, dtype: Dtype = None, adapter: Adapter = "merged"
    ) -> ShardExport:
        export = super().get_per_tensor_param_shard(dtype=dtype, adapter=adapter)
        return ((name, shard, replace(box, replica=0)) for name, shard, box in export)


@mutant("export.shards", group="export-shards")
class ShardsSorted(LoopbackEngine):
    """Shards come sorted by name, not in the export's order."""

    def get_per_tensor_param_shard(
        self, *, dtype: Dtype = None, adapter: Adapter = "merged"
    ) -> ShardExport:
        return iter(
            sorted(
                super().get_per_tensor_param_shard(dtype=dtype, adapter=adapter),
                key=lambda one: one[0],
            )
        )


@mutant("parallel.tp", group="export-shards", world=2)
class ColumnOffsetsLost(LoopbackEngine):
    """Shards of a weight that is split by columns all say that they begin at the first."""

    def get_per_tensor_param_shard(
        self, *, dtype: Dtype = None, adapter: Adapter = "merged"
    ) -> ShardExport:
        for name, shard, box in super().get_per_tensor_param_shard(dtype=dtype, adapter=adapter):
            yield name, shard, replace(box, offset=(*box.offset[:1], *(0 for _ in box.offset[1:])))


@mutant("export.shards", group="export-shards", world=2, deadline=0.1)
class ShardsGathered(LoopbackEngine):
    """Each shard is cut out of the whole tensor, which all ranks gather for it."""

    def get_per_tensor_param_shard(
        self, *, dtype: Dtype = None, adapter: Adapter = "merged"
    ) -> ShardExport:
        for weight in self.exported(adapter):
            whole = self.assembled(weight, self.shard(weight, dtype))
            yield weight.name, whole[weight.box.slices], weight.box


@mutant("export.shards", group="export-shards")
class StaleShards(LoopbackEngine):
    """Shards are those that were read from the files; steps move others."""

    def _build(self) -> None:
        super()._build()
        self.read = {weight.name: weight.local.clone() for weight in self.weights.values()}

    def get_per_tensor_param_shard(
        self, *, dtype: Dtype = None, adapter: Adapter = "merged"
    ) -> ShardExport:
        export = super().get_per_tensor_param_shard(dtype=dtype, adapter=adapter)
        return ((name, self.read[name].to(shard.dtype), box) for name, shard, box in export)


# --- folders ---------------------------------------------------------------------------------------


@mutant("export.save_hf", group="save-hf")
class FolderNotStepped(LoopbackEngine):
    """``save_hf`` copies the weights' files that it was started from."""

    def write_folder(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        files = self.files()
        read = (
            {name: files.handles[name].get_tensor(name).to(t.dtype) for name, t in tensors.items()}
            if files
            else {}
        )
        super().write_folder(directory, {**tensors, **read})


@mutant("export.save_hf", group="save-hf")
class ConfigNamesOtherDtype(LoopbackEngine):
    """``config.json`` names bfloat16 for a folder of float32."""

    def hf_config(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        return super().hf_config(tensors) | {"dtype": "bfloat16"}


@mutant("export.save_hf", group="save-hf")
class TieForgotten(LoopbackEngine):
    """``config.json`` does not say that the head is tied, so that transformers makes one at random."""

    def hf_config(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        return super().hf_config(tensors) | {"tie_word_embeddings": False}


@mutant("export.save_hf", group="save-hf")
class ConfigOfOtherModel(LoopbackEngine):
    """``config.json`` has the library's base of rotary angles where the model has its own."""

    def hf_config(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        config = super().hf_config(tensors)
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
        return config

"""Defects of an engine's exports: names, bits, shards and folders."""

# ruff: noqa: D102 - the class describes the defect of its method

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from engine_api.contract import Adapter
from engine_api.errors import CheckpointWriteError
from engine_api.hf_folder import unwritable
from engine_api.weights import ShardExport, WeightExport
from engine_loopback.engine import LoopbackEngine
from engine_loopback.weights import Weight
from engine_mutants.mutant import mutant

_EMBEDDING = "model.embed_tokens.weight"
Dtype = torch.dtype | None


# --- values ---------------------------------------------------------------------------------------


@mutant("train.visible_at_once", group="core")
class StaleExport(LoopbackEngine):
    """The export keeps its first copies, which steps do not reach."""

    def _build(self) -> None:
        super()._build()
        self.copies: dict[tuple[str, Dtype], Tensor] = {}

    def shard(self, weight: Weight, dtype: Dtype) -> Tensor:
        return self.copies.setdefault((weight.name, dtype), super().shard(weight, dtype).clone())


@mutant("train.visible_at_once", group="core", seen_in="NeMo-RL #227")
class StaleTiedWeight(LoopbackEngine):
    """The tied weight is exported as it was loaded, since steps move the other of two copies."""

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
        source = self.weights[weight.name.replace(part, swap[part])] if fused else weight
        return super().shard(source, dtype)


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
    """The export has the stored dtype, whatever is asked for."""

    def get_per_tensor_param(
        self, *, dtype: Dtype = None, adapter: Adapter = "merged", bucket_bytes: int = 512 << 20
    ) -> WeightExport:
        del dtype
        return super().get_per_tensor_param(adapter=adapter, bucket_bytes=bucket_bytes)


@mutant("export.exact", group="core")
class NormsStayFloat32(LoopbackEngine):
    """Norms are exported in float32 even if bfloat16 is asked for."""

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
    """All tensors of a bucket are put into the same memory before the first one is returned."""

    def whole_tensors(self, weights: list[Weight], dtype: Dtype, bucket_bytes: int) -> WeightExport:
        for bucket in self.buckets(weights, dtype, bucket_bytes):
            sizes = [torch.Size(weight.shape).numel() for weight in bucket]
            memory = torch.empty(max(sizes), dtype=dtype or torch.float32)
            views = [
                memory[:size].view(weight.shape) for weight, size in zip(bucket, sizes, strict=True)
            ]
            for weight, view in zip(bucket, views, strict=True):
                view.copy_(self.assembled(weight, self.shard(weight, dtype)))
            yield from ((weight.name, view) for weight, view in zip(bucket, views, strict=True))


@mutant("export.exact", group="core")
class LargeTensorLost(LoopbackEngine):
    """A tensor larger than a bucket is left out."""

    def buckets(self, weights: list[Weight], dtype: Dtype, limit: int) -> Iterator[list[Weight]]:
        for bucket in super().buckets(weights, dtype, limit):
            if len(bucket) > 1 or torch.Size(bucket[0].shape).numel() * 4 <= max(limit, 1000):
                yield bucket


@mutant("export.bounded", group="core", world=2)
class AllGatheredFirst(LoopbackEngine):
    """All whole tensors are gathered before the first is returned, whatever a bucket's size."""

    def whole_tensors(self, weights: list[Weight], dtype: Dtype, bucket_bytes: int) -> WeightExport:
        yield from list(super().whole_tensors(weights, dtype, bucket_bytes))


@mutant("export.bounded", group="core")
class BucketsIgnored(LoopbackEngine):
    """All whole tensors are in one bucket, whatever size is asked for."""

    def whole_tensors(self, weights: list[Weight], dtype: Dtype, bucket_bytes: int) -> WeightExport:
        del bucket_bytes
        return super().whole_tensors(weights, dtype, 1 << 60)


@mutant("export.first_values", group="dp", world=2)
class DrawnByRank(LoopbackEngine):
    """Each rank draws weights of its own: the seed and the rank are added."""

    def _build_model(self) -> None:
        self.config = replace(self.config, seed=self.config.seed + self.layout.rank)
        super()._build_model()


@mutant("export.first_values", group="value-head", model_type="value_model")
class HeadOfNoSeed(LoopbackEngine):
    """New weights are drawn from a generator that nothing has seeded."""

    def _build_model(self) -> None:
        self.config = replace(self.config, seed=torch.Generator().seed() % 2**31)
        super()._build_model()


# --- names ----------------------------------------------------------------------------------------


@mutant("export.exact", group="core", seen_in="NeMo-RL #227")
class TiedHeadExported(LoopbackEngine):
    """The head of a tied model is exported as well."""

    def whole_tensors(self, weights: list[Weight], dtype: Dtype, bucket_bytes: int) -> WeightExport:
        yield from super().whole_tensors(weights, dtype, bucket_bytes)
        if self.shape.tied:
            tied = self.weights[_EMBEDDING]
            yield "lm_head.weight", self.assembled(tied, self.shard(tied, dtype))


@mutant("export.exact", group="core")
class WrapperInNames(LoopbackEngine):
    """Names of layers have a wrapper's prefix."""

    def whole_tensors(self, weights: list[Weight], dtype: Dtype, bucket_bytes: int) -> WeightExport:
        for name, tensor in super().whole_tensors(weights, dtype, bucket_bytes):
            yield name.replace(".self_attn.", "._checkpoint_wrapped_module.self_attn."), tensor


@mutant("export.exact", group="core", world=2)
class OrderOfOneRank(LoopbackEngine):
    """All ranks but the first export names in sorted order."""

    def whole_tensors(self, weights: list[Weight], dtype: Dtype, bucket_bytes: int) -> WeightExport:
        export = super().whole_tensors(weights, dtype, bucket_bytes)
        return iter(sorted(export)) if self.layout.rank else export


@mutant("export.exact", group="core")
class ExportCounts(LoopbackEngine):
    """``weight_version`` increases with an export."""

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
    """Experts are exported under numbers shifted by one rank's experts."""

    def whole_tensors(self, weights: list[Weight], dtype: Dtype, bucket_bytes: int) -> WeightExport:
        own = self.shape.experts // self.layout.expert
        moved = {
            f".experts.{e}.": f".experts.{(e + own) % self.shape.experts}."
            for e in range(self.shape.experts)
        }
        for name, tensor in super().whole_tensors(weights, dtype, bucket_bytes):
            found = next((old for old in moved if old in name), None)
            yield (name.replace(found, moved[found]) if found else name), tensor


# --- shards ---------------------------------------------------------------------------------------


@mutant("export.shards", group="export-shards", world=2)
class ReplicasNotCounted(LoopbackEngine):
    """Every copy has replica number 0."""

    def get_per_tensor_param_shard(
        self, *, dtype: Dtype = None, adapter: Adapter = "merged"
    ) -> ShardExport:
        export = super().get_per_tensor_param_shard(dtype=dtype, adapter=adapter)
        return ((name, shard, replace(box, replica=0)) for name, shard, box in export)


@mutant("export.shards", group="export-shards")
class ShardsSorted(LoopbackEngine):
    """Shards are sorted by name instead of in the export's order."""

    def get_per_tensor_param_shard(
        self, *, dtype: Dtype = None, adapter: Adapter = "merged"
    ) -> ShardExport:
        export = super().get_per_tensor_param_shard(dtype=dtype, adapter=adapter)
        return iter(sorted(export, key=lambda row: row[0]))


@mutant("parallel.tp", group="export-shards", world=2)
class ColumnOffsetsLost(LoopbackEngine):
    """Shards of a weight split by columns all have column offset 0."""

    def get_per_tensor_param_shard(
        self, *, dtype: Dtype = None, adapter: Adapter = "merged"
    ) -> ShardExport:
        for name, shard, box in super().get_per_tensor_param_shard(dtype=dtype, adapter=adapter):
            yield name, shard, replace(box, offset=(*box.offset[:1], *(0 for _ in box.offset[1:])))


@mutant("export.shards", group="export-shards", world=2, deadline=0.1)
class ShardsGathered(LoopbackEngine):
    """Each shard is cut from the whole tensor, which all ranks gather for it."""

    def get_per_tensor_param_shard(
        self, *, dtype: Dtype = None, adapter: Adapter = "merged"
    ) -> ShardExport:
        for weight in self.exported(adapter):
            whole = self.assembled(weight, self.shard(weight, dtype))
            yield weight.name, whole[weight.box.slices], weight.box


@mutant("export.shards", group="export-shards")
class StaleShards(LoopbackEngine):
    """Shards are those loaded from the files, which steps do not move."""

    def _build(self) -> None:
        super()._build()
        self.read = {weight.name: weight.local.clone() for weight in self.weights.values()}

    def get_per_tensor_param_shard(
        self, *, dtype: Dtype = None, adapter: Adapter = "merged"
    ) -> ShardExport:
        export = super().get_per_tensor_param_shard(dtype=dtype, adapter=adapter)
        return ((name, self.read[name].to(shard.dtype), box) for name, shard, box in export)


# --- dtypes and times ----------------------------------------------------------------------------


@mutant("export.dtypes", group="core")
class Float16ExportIsBfloat16(LoopbackEngine):
    """An export in float16 has the values of bfloat16."""

    def shard(self, weight: Weight, dtype: Dtype) -> Tensor:
        if dtype == torch.float16:
            return super().shard(weight, torch.bfloat16).to(dtype)
        return super().shard(weight, dtype)


@mutant("export.dtypes", group="core")
class HalfMastersWidened(LoopbackEngine):
    """bfloat16 masters are exported in float32 where no dtype is asked for."""

    def shard(self, weight: Weight, dtype: Dtype) -> Tensor:
        return super().shard(weight, dtype or torch.float32)


@mutant("export.after_load", group="core")
class CastOnceAVersion(LoopbackEngine):
    """What is cast for an export is kept until ``weight_version`` moves, also over a load."""

    def _build(self) -> None:
        super()._build()
        self.casts: dict[tuple[str, Dtype, int], Tensor] = {}

    def shard(self, weight: Weight, dtype: Dtype) -> Tensor:
        key = (weight.name, dtype, self.weight_version)
        return self.casts.setdefault(key, super().shard(weight, dtype).clone())


@mutant("export.save_hf_values", group="save-hf", model_type="value_model")
class FolderWithoutHead(LoopbackEngine):
    """``save_hf`` writes a value model's folder without its head."""

    def write_folder(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        kept = {name: t for name, t in tensors.items() if not name.startswith("score.")}
        super().write_folder(directory, kept)


# --- folders --------------------------------------------------------------------------------------


@mutant("export.save_hf", group="save-hf")
class FolderNotStepped(LoopbackEngine):
    """``save_hf`` copies the files of the weights with which the engine started."""

    def write_folder(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        files = self.files()
        read: dict[str, Tensor] = {}
        if files:
            read = {n: files.handles[n].get_tensor(n).to(t.dtype) for n, t in tensors.items()}
        super().write_folder(directory, {**tensors, **read})


@mutant("export.save_hf", group="save-hf")
class ConfigNamesOtherDtype(LoopbackEngine):
    """``config.json`` names bfloat16 for a folder in float32."""

    def hf_config(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        return super().hf_config(tensors) | {"dtype": "bfloat16"}


@mutant("export.save_hf", group="save-hf")
class TieForgotten(LoopbackEngine):
    """``config.json`` does not have the tied head, so that transformers makes a random one."""

    def hf_config(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        return super().hf_config(tensors) | {"tie_word_embeddings": False}


@mutant("export.save_hf", group="save-hf")
class ConfigOfOtherModel(LoopbackEngine):
    """``config.json`` has the library's default RoPE base instead of the model's."""

    def hf_config(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        config = super().hf_config(tensors)
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
        return config


@mutant("export.save_hf_tokenizer", group="save-hf")
class FolderWithoutTokenizer(LoopbackEngine):
    """``save_hf`` writes weights and ``config.json`` alone."""

    def write_folder(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        super().write_folder(directory, tensors)
        for file in directory.glob("tokenizer*"):
            file.unlink()


@mutant("export.save_hf_tokenizer", group="save-hf")
class TokenizerOfTheTrainerReplaced(LoopbackEngine):
    """``save_hf`` copies the model's tokenizer over the tokenizer that a trainer has saved."""

    def write_folder(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        super().write_folder(directory, tensors)
        for file in Path(self.config.model.path).glob("tokenizer*"):
            shutil.copyfile(file, directory / file.name)


@mutant("export.save_hf_tokenizer", group="save-hf")
class FolderReplacedWhole(LoopbackEngine):
    """``save_hf`` removes a folder of that name with all files in it before it writes."""

    def write_folder(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        super().write_folder(directory, tensors)


@mutant("export.save_hf_tokenizer", group="save-hf")
class TokenizerCopiedAsText(LoopbackEngine):
    """``save_hf`` copies the tokenizer's files as text, which changes their line ends."""

    def write_folder(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        super().write_folder(directory, tensors)
        for file in [*directory.glob("*.txt"), *directory.glob("*.jinja")]:
            file.write_text(file.read_text())


@mutant("export.save_hf_mtp", group="save-hf")
class FolderWithoutMtpHead(LoopbackEngine):
    """``save_hf`` writes the weights that the engine computes with and no others."""

    def read_mtp_head(self) -> dict[str, Tensor]:
        return {}


@mutant("export.save_hf_mtp", group="save-hf")
class MtpHeadCast(LoopbackEngine):
    """``save_hf`` casts a head that predicts further tokens to the dtype of the model's file."""

    def write_folder(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        dtype = tensors[_EMBEDDING].dtype
        super().write_folder(directory, {name: one.to(dtype) for name, one in tensors.items()})


@mutant("faults.save_hf", group="save-hf")
class FolderWrittenInPlace(LoopbackEngine):
    """The weights of save_hf are written under their final name, over those that are there."""

    def write_folder(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise unwritable(directory, error) from error
        super().write_folder(directory, tensors)


@mutant("faults.save_hf", group="save-hf")
class UnfinishedFolderStays(LoopbackEngine):
    """A save_hf that fails leaves its unfinished folder beside the one that it was to replace."""

    def write_folder(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        try:
            super().write_folder(directory, tensors)
        except CheckpointWriteError:
            directory.with_name(f"{directory.name}.unfinished").mkdir()
            raise


@mutant("faults.links", group="core")
class LinkReplaced(LoopbackEngine):
    """``save_hf`` replaces a link by a folder, and the folder that a server reads stays old."""

    def write_folder(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        if directory.is_symlink():
            directory.unlink()
        super().write_folder(directory, tensors)


@mutant("faults.killed_in_save_hf", group="save-hf")
class RemainsInTheWay(LoopbackEngine):
    """The unfinished folder of a save_hf that was killed is in the way of the next one."""

    def write_folder(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        partial = directory.with_name(f"{directory.name}.partial")
        if partial.exists():
            raise unwritable(directory, FileExistsError(errno.EEXIST, "exists", str(partial)))
        super().write_folder(directory, tensors)


@mutant("contract.defaults", group="core")
class ExportOfTheDefaultDtype(LoopbackEngine):
    """An export without a dtype is in torch's default dtype, in place of the stored one."""

    def shard(self, weight: Weight, dtype: Dtype) -> Tensor:
        return super().shard(weight, dtype or torch.get_default_dtype())

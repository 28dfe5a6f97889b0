"""Exports of weights: whole tensors in buckets, this rank's boxes, or a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_api.arguments import check_export, folder_of
from engine_api.checkpoint import require_room
from engine_api.comm import together
from engine_api.contract import Adapter
from engine_api.folders import real, replace_folder, restore
from engine_api.hf_folder import WEIGHT_FILES, WeightFiles, copy_companions, unwritable
from engine_api.weights import ShardExport, WeightExport, buckets
from engine_loopback.checkpoint import CheckpointEngine
from engine_loopback.lora import pair_of
from engine_loopback.parallel import Layout
from engine_loopback.weights import Weight, shapes_of


class ExportEngine(CheckpointEngine):
    """The three exports of the engine's weights."""

    layout: Layout
    raw_config: dict[str, Any]

    def get_per_tensor_param(
        self,
        *,
        dtype: torch.dtype | None = None,
        adapter: Adapter = "merged",
        bucket_bytes: int = 512 << 20,
    ) -> WeightExport:
        """Implement ``Engine.get_per_tensor_param``."""
        self._expect("get_per_tensor_param", "ready")
        check_export(dtype, bucket_bytes)
        self.check_adapter(adapter)
        return self.whole_tensors(self.exported(adapter), dtype, bucket_bytes)

    def get_per_tensor_param_shard(
        self, *, dtype: torch.dtype | None = None, adapter: Adapter = "merged"
    ) -> ShardExport:
        """Implement ``Engine.get_per_tensor_param_shard``."""
        self._expect("get_per_tensor_param_shard", "ready")
        check_export(dtype)
        self.check_adapter(adapter)
        return (
            (weight.name, self.shard(weight, dtype), weight.box)
            for weight in self.exported(adapter)
        )

    def check_adapter(self, adapter: Adapter) -> None:
        """Raise ``ConfigError`` for an export that this engine cannot make."""
        self._check_adapter(adapter)

    def exported(self, adapter: Adapter) -> list[Weight]:
        """Return the weights of an export, in the model's order."""
        only = adapter == "only"
        weights = [weight for weight in self.weights.values() if weight.adapter == only]
        if adapter == "base":
            return [replace(weight, merges=False) for weight in weights]
        return weights

    def whole_tensors(
        self, weights: list[Weight], dtype: torch.dtype | None, bucket_bytes: int
    ) -> WeightExport:
        """Yield whole tensors by name.

        Only one bucket of them exists at a time.
        """
        for bucket in self.buckets(weights, dtype, bucket_bytes):
            whole = [
                (weight.name, self.assembled(weight, self.shard(weight, dtype)))
                for weight in bucket
            ]
            while whole:
                yield whole.pop(0)

    def buckets(
        self, weights: list[Weight], dtype: torch.dtype | None, limit: int
    ) -> Iterator[list[Weight]]:
        """Yield neighbours that are at most ``limit`` bytes as whole tensors, or one larger one."""
        return buckets(
            weights,
            limit,
            size_of=lambda w: torch.Size(w.shape).numel() * (dtype or w.dtype).itemsize,
        )

    def shard(self, weight: Weight, dtype: torch.dtype | None) -> Tensor:
        """Return this rank's box with its adapter merged, on the device, in the given dtype."""
        return self.merged(weight).to(device=self.device, dtype=dtype or weight.dtype)

    def merged(self, weight: Weight) -> Tensor:
        """Return ``W + alpha / rank · B A``, computed in float32.

        The boxes of A and B make this rank's box of the product.
        """
        pair = pair_of(weight.name, self.weights) if weight.merges else None
        if pair is None or weight.param is None:
            return weight.local
        assert self.config.lora is not None
        a, b = pair
        scale = self.config.lora.alpha / self.config.lora.rank
        delta = scale * (b.local.float() @ a.local.float())
        return (weight.local.float() + delta).to(weight.dtype)

    def assembled(self, weight: Weight, shard: Tensor) -> Tensor:
        """Return the whole tensor on all ranks.

        Each box is added once, as bytes, to zeros, so that no bit changes.
        """
        if self.layout.world == 1:
            return shard
        whole = torch.zeros(weight.shape, dtype=shard.dtype, device=shard.device)
        if weight.param is not None and weight.box.replica == 0:
            whole[weight.box.slices] = shard
        return self.layout.all_reduce(whole.view(torch.uint8), "world").view(shard.dtype)

    # --- a folder ------------------------------------------------------------------------------

    def save_hf(self, directory: Path | str, *, dtype: torch.dtype | None = None) -> None:
        """Implement ``Engine.save_hf``.

        Rank 0 holds the whole model on the CPU before writing.
        """
        self._expect("save_hf", "ready")
        folder = folder_of(directory)
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.get_per_tensor_param(dtype=dtype):
            if self.layout.rank == 0:
                tensors[name] = tensor.to("cpu", copy=True)
        together(
            self.comm,
            lambda: (
                self.write_folder(folder, tensors | self.read_mtp_head())
                if self.layout.rank == 0
                else None
            ),
        )

    def files(self) -> WeightFiles | None:
        """Return the folder's weights, or None if they are made from the seed."""
        return None if self.config.model.init == "random" else WeightFiles(self.config.model.path)

    def read_mtp_head(self) -> dict[str, Tensor]:
        """Return the weights of the model's folder that predict further tokens, as stored."""
        files = self.files()
        if files is None:
            return {}
        files.check(shapes_of(self.weights))
        return {name: files.handles[name].get_tensor(name) for name in files.mtp.names}

    def write_folder(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write a partial folder next to ``directory`` and rename it once it is complete.

        Raises:
            CheckpointWriteError: if a file cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        directory = real(directory)
        partial = directory.with_name(directory.name + ".partial")
        try:
            # Remains of a save that was killed.
            shutil.rmtree(partial, ignore_errors=True)
            restore(directory)
            partial.mkdir(parents=True)
            require_room(partial, sum(t.numel() * t.element_size() for t in tensors.values()))
            save_file(dict(tensors), partial / "model.safetensors", metadata={"format": "pt"})
            (partial / "config.json").write_text(
                json.dumps(self.hf_config(tensors), indent=2, sort_keys=True)
            )
            copy_companions(Path(self.config.model.path), partial, former=directory)
            replace_folder(partial, directory, stale=WEIGHT_FILES)
        except (OSError, SafetensorError) as error:
            raise unwritable(directory, error) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def hf_config(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the model's config.json with the written dtype and this engine's head."""
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        config = {k: v for k, v in self.raw_config.items() if k != "torch_dtype"} | {"dtype": dtype}
        if "score.weight" in tensors:
            names = [
                str(n).replace("ForCausalLM", "ForTokenClassification")
                for n in config.get("architectures") or []
            ]
            config |= {
                "architectures": names,
                "id2label": {"0": "LABEL_0"},
                "label2id": {"LABEL_0": 0},
            }
        return config

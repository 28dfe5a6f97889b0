"""Defects of refusals: undeclared features are ignored, used, or refused by a wrong error."""

# ruff: noqa: D102 - the class describes the defect of its method

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from engine_api.batch import Batch
from engine_api.capabilities import Capability, unsupported
from engine_api.config import EngineConfig, Precision
from engine_api.contract import Adapter
from engine_api.registry import Resolution
from engine_api.results import CheckpointInfo, TokenOutputs
from engine_api.weights import ShardExport, ShardSpec
from engine_loopback.engine import LoopbackEngine
from engine_mutants.mutant import mutant


class Edits(LoopbackEngine):
    """An engine that changes its configuration before reading it."""

    def __init__(self, config: EngineConfig, *, resolution: Resolution) -> None:
        super().__init__(self.edited(config), resolution=resolution)

    def edited(self, config: EngineConfig) -> EngineConfig:
        return config


class _Spreads(Edits):
    """An engine that ignores the size of one kind of parallelism."""

    ignored = ""

    def edited(self, config: EngineConfig) -> EngineConfig:
        return replace(config, parallelism=replace(config.parallelism, **{self.ignored: 1}))


# --- undeclared, and not refused ------------------------------------------------------------------


@mutant("refusal.tp", group="tp", hides=(Capability.TP,))
class TensorParallelIgnored(_Spreads):
    """Tensor parallelism is not declared, and its size is ignored."""

    ignored = "tp"


@mutant("refusal.pp", group="pp", hides=(Capability.PP,))
class PipelineIgnored(_Spreads):
    """Pipeline parallelism is not declared, and its size is ignored."""

    ignored = "pp"


@mutant("refusal.cp", group="cp", hides=(Capability.CP,))
class ContextParallelIgnored(_Spreads):
    """Context parallelism is not declared, and its size is ignored."""

    ignored = "cp"


@mutant("refusal.ep", group="ep", hides=(Capability.EP,))
class ExpertParallelIgnored(_Spreads):
    """Expert parallelism is not declared, and its size is ignored."""

    ignored = "ep"


@mutant("refusal.ulysses", group="ulysses", hides=(Capability.ULYSSES,))
class UlyssesIgnored(_Spreads):
    """Ulysses is not declared, and its size is ignored."""

    ignored = "ulysses"


@mutant("refusal.hsdp", group="hsdp", hides=(Capability.HSDP,))
class ReplicationIgnored(_Spreads):
    """Hybrid sharding is not declared, and its size is ignored."""

    ignored = "dp_replicate"


@mutant("refusal.dp", group="dp", hides=(Capability.DP,))
class DataParallelUndeclared(LoopbackEngine):
    """Data parallelism is not declared, and two ranks without any configuration are accepted."""

    def initialize(self) -> None:
        self._expect("initialize", "created")
        self._build()
        self._state = "ready"


@mutant("refusal.moe", group="moe", hides=(Capability.MOE,))
class ExpertsUndeclared(LoopbackEngine):
    """A mixture of experts is not declared, and such a model is accepted."""


@mutant("refusal.value-head", group="value-head", hides=(Capability.VALUE_HEAD,))
class ValueHeadUndeclared(LoopbackEngine):
    """Value heads are not declared, and a value model is accepted."""


@mutant(
    "refusal.parameter_groups",
    group="parameter_groups",
    hides=(Capability.PARAMETER_GROUPS,),
)
class GroupsIgnored(Edits):
    """Parameter groups are not declared, and all weights decay with ``decay: matrices``."""

    def edited(self, config: EngineConfig) -> EngineConfig:
        assert config.optimizer is not None
        return replace(config, optimizer=replace(config.optimizer, decay="all"))


@mutant("refusal.lora", group="lora", hides=(Capability.LORA,))
class AdapterIgnored(Edits):
    """Adapters are not declared, and their section is ignored: all weights train."""

    def edited(self, config: EngineConfig) -> EngineConfig:
        return replace(config, lora=None)


@mutant("refusal.lora", group="lora", hides=(Capability.LORA,))
class AdapterSwitchIgnored(LoopbackEngine):
    """Adapters are not declared, and ``infer_batch(adapter=False)`` returns the policy."""

    def infer_batch(
        self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False, adapter: bool = True
    ) -> TokenOutputs:
        del adapter
        return super().infer_batch(batch, temperature=temperature, entropy=entropy)


@mutant("refusal.offload", group="offload", hides=(Capability.OFFLOAD,))
class MoveIgnored(LoopbackEngine):
    """Offload is not declared, and ``to`` does nothing."""

    def to(
        self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        self._expect("to", "ready")


@mutant("refusal.recompute", group="recompute", hides=(Capability.RECOMPUTE,))
class RecomputeIgnored(Edits):
    """Recomputing is not declared, and not done."""

    def edited(self, config: EngineConfig) -> EngineConfig:
        return replace(config, memory=replace(config.memory, recompute="none"))


@mutant("refusal.compile", group="compile", hides=(Capability.COMPILE,))
class CompileIgnored(Edits):
    """Compilation is not declared, and not done."""

    def edited(self, config: EngineConfig) -> EngineConfig:
        return replace(config, memory=replace(config.memory, compile=False))


@mutant("refusal.bf16", group="bf16", hides=(Capability.BF16,))
class HalfPrecisionIgnored(Edits):
    """bfloat16 is not declared, and float32 is used instead."""

    def edited(self, config: EngineConfig) -> EngineConfig:
        return replace(config, precision=Precision())


@mutant("refusal.fp16", group="bf16", hides=(Capability.FP16,))
class Float16IsBfloat16(Edits):
    """float16 is not declared, and bfloat16 is used instead."""

    def edited(self, config: EngineConfig) -> EngineConfig:
        asked = {f.name: getattr(config.precision, f.name) for f in fields(Precision)}
        known: dict[str, Any] = {
            name: "bfloat16" if dtype == "float16" else dtype for name, dtype in asked.items()
        }
        return replace(config, precision=Precision(**known))


@mutant("refusal.async-checkpoint", group="async-checkpoint", hides=(Capability.ASYNC_CHECKPOINT,))
class AsyncIgnored(Edits):
    """Asynchronous saves are not declared, and every save waits."""

    def edited(self, config: EngineConfig) -> EngineConfig:
        return replace(config, checkpoint=replace(config.checkpoint, async_save=False))


@mutant(
    "refusal.portable-checkpoint",
    group="portable-checkpoint",
    hides=(Capability.PORTABLE_CHECKPOINT,),
)
class LoadIgnored(LoopbackEngine):
    """Portable checkpoints are not declared, and loading one does nothing."""

    def load_checkpoint(self, directory: Path | str) -> CheckpointInfo:
        return CheckpointInfo(path=Path(directory), step=self._step, extra={}, num_bytes=0)


@mutant("refusal.export-shards", group="export-shards", hides=(Capability.EXPORT_SHARDS,))
class ShardsAreWholes(LoopbackEngine):
    """Shards are not declared, and whole tensors are returned instead."""

    def get_per_tensor_param_shard(
        self, *, dtype: torch.dtype | None = None, adapter: Adapter = "merged"
    ) -> ShardExport:
        for name, tensor in self.get_per_tensor_param(dtype=dtype, adapter=adapter):
            yield name, tensor, ShardSpec.whole(tensor.shape, replica=self.layout.rank)


@mutant("refusal.save-hf", group="save-hf", hides=(Capability.SAVE_HF,))
class FolderNotWritten(LoopbackEngine):
    """``save_hf`` is not declared, and writes nothing."""

    def save_hf(self, directory: Path | str, *, dtype: torch.dtype | None = None) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)


@mutant("refusal.recompute", group="recompute", hides=(Capability.RECOMPUTE,))
class RefusedByAnotherName(Edits):
    """An undeclared feature is refused by an error that names a different capability."""

    def edited(self, config: EngineConfig) -> EngineConfig:
        if config.memory.recompute != "none":
            raise unsupported(Capability.OFFLOAD, "mutant", ())
        return config


@mutant("refusal.compile", group="compile", hides=(Capability.COMPILE,))
class RefusedLate(Edits):
    """An undeclared feature is refused by ``NotImplementedError``, not by the contract's error."""

    def edited(self, config: EngineConfig) -> EngineConfig:
        if config.memory.compile:
            raise NotImplementedError("compile")
        return config

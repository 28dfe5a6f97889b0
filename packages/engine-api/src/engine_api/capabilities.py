"""Optional capabilities of an engine, and the configuration that requests each of them.

A capability is declared in the plug-in's descriptor. The conformance suite tests a declared
capability; a request for an undeclared one must be refused with ``UnsupportedCapability``, never
ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum

from engine_api.config import EngineConfig
from engine_api.errors import UnsupportedCapability


class Capability(StrEnum):
    """An optional ability of an engine."""

    DP = "dp"
    HSDP = "hsdp"
    TP = "tp"
    PP = "pp"
    CP = "cp"
    EP = "ep"
    ULYSSES = "ulysses"
    LORA = "lora"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"
    COMPILE = "compile"
    SHARED_PREFIXES = "shared-prefixes"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    MOE = "moe"
    VALUE_HEAD = "value-head"
    ASYNC_CHECKPOINT = "async-checkpoint"
    PORTABLE_CHECKPOINT = "portable-checkpoint"
    EXPORT_SHARDS = "export-shards"
    SAVE_HF = "save-hf"

    # Since contract 1.4.
    ROUTER_REPLAY = "router_replay"
    DISTILLATION = "distillation"
    SOFTCAP = "softcap"
    LOGIT_SCALE = "logit_scale"
    HEAD_BIAS = "head_bias"
    SAVED_BUFFERS = "saved_buffers"
    SINKS = "sinks"
    LINEAR_ATTENTION = "linear_attention"
    SPARSE_ATTENTION = "sparse_attention"
    VISION = "vision"
    VIDEO = "video"
    PARAMETER_GROUPS = "parameter_groups"


MECHANISMS = frozenset(
    {
        Capability.SOFTCAP,
        Capability.LOGIT_SCALE,
        Capability.HEAD_BIAS,
        Capability.SAVED_BUFFERS,
        Capability.SINKS,
        Capability.LINEAR_ATTENTION,
        Capability.SPARSE_ATTENTION,
    }
)
"""Capabilities that a model's ``config.json`` asks for, each a mechanism of some families."""


def _dtypes(config: EngineConfig) -> tuple[str, str, str]:
    return config.precision.compute, config.precision.master, config.precision.reduce


# The condition on the configuration that requests each capability. A capability that is absent here
# is requested by a call (``to``, ``save_hf``, …) or by the model, and refused there.
REQUESTS: dict[Capability, Callable[[EngineConfig], bool]] = {
    Capability.HSDP: lambda c: c.parallelism.dp_replicate > 1,
    Capability.TP: lambda c: c.parallelism.tp > 1,
    Capability.PP: lambda c: c.parallelism.pp > 1,
    Capability.CP: lambda c: c.parallelism.cp > 1,
    Capability.EP: lambda c: c.parallelism.ep > 1,
    Capability.ULYSSES: lambda c: c.parallelism.ulysses > 1,
    Capability.LORA: lambda c: c.lora is not None,
    Capability.OFFLOAD: lambda c: c.memory.offload_params or c.memory.offload_optimizer,
    Capability.RECOMPUTE: lambda c: c.memory.recompute != "none",
    Capability.COMPILE: lambda c: c.memory.compile,
    Capability.SHARED_PREFIXES: lambda c: c.memory.share_prefixes,
    Capability.BF16: lambda c: "bfloat16" in _dtypes(c),
    Capability.FP16: lambda c: "float16" in _dtypes(c),
    Capability.FP8: lambda c: "float8" in _dtypes(c),
    Capability.ASYNC_CHECKPOINT: lambda c: c.checkpoint.async_save,
    Capability.ROUTER_REPLAY: lambda c: c.router_replay,
    Capability.VISION: lambda c: (
        bool(c.model.freeze) or (c.optimizer is not None and bool(c.optimizer.part_lr))
    ),
    Capability.PARAMETER_GROUPS: lambda c: (
        c.optimizer is not None and (c.optimizer.decay != "all" or bool(c.optimizer.part_lr))
    ),
}


def refuse_undeclared(config: EngineConfig, declared: Iterable[str], engine: str) -> None:
    """Raise ``UnsupportedCapability`` for the first requested capability that is not declared."""
    have = set(declared)
    for capability, is_requested in REQUESTS.items():
        if is_requested(config) and capability not in have:
            raise unsupported(capability, engine, have)


def unsupported(
    capability: Capability,
    engine: str,
    declared: Iterable[str],
    *,
    off: str = "turn it off in the configuration",
) -> UnsupportedCapability:
    """Return the error for an undeclared capability, with a list of the declared ones.

    ``off`` says how to do without the capability.
    """
    return UnsupportedCapability(
        capability,
        where=engine,
        why=f"it declares only: {', '.join(sorted(declared)) or 'nothing'}",
        remedy=f"{off}, or name a backend that declares it "
        f"(`python -m engine_api list --capability {capability}`)",
    )

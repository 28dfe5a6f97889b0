"""The plug-in's descriptor, whose loading imports no torch."""

from __future__ import annotations

from engine_api.capabilities import MECHANISMS, Capability
from engine_api.devices import probe_torch
from engine_api.plugin import EnginePlugin, Row, Variant
from engine_torch.versions import has_torchao

# Both names mean fully_shard, because the older FullyShardedDataParallel wrapper is deprecated
# upstream.
_BACKENDS = ("fsdp", "fsdp2")
_DEVICES = ("cuda", "cpu")

PLUGIN = EnginePlugin(
    name="engine-fsdp",
    contract="1.4",
    rows=(
        Row(
            model_types=("language_model",),
            backends=_BACKENDS,
            devices=_DEVICES,
            target="engine_fsdp.engine:FSDPEngineWithLMHead",
        ),
        Row(
            model_types=("value_model",),
            backends=_BACKENDS,
            devices=_DEVICES,
            target="engine_fsdp.engine:FSDPEngineWithValueHead",
        ),
    ),
    capabilities=frozenset(
        {
            Capability.DP,
            Capability.HSDP,
            Capability.ULYSSES,
            Capability.EP,
            Capability.LORA,
            Capability.OFFLOAD,
            Capability.RECOMPUTE,
            Capability.COMPILE,
            Capability.SHARED_PREFIXES,
            Capability.BF16,
            Capability.MOE,
            Capability.VALUE_HEAD,
            Capability.ASYNC_CHECKPOINT,
            Capability.PORTABLE_CHECKPOINT,
            Capability.EXPORT_SHARDS,
            Capability.SAVE_HF,
            Capability.ROUTER_REPLAY,
            Capability.DISTILLATION,
            Capability.PARAMETER_GROUPS,
            Capability.VISION,
            Capability.VIDEO,
            *MECHANISMS,
            *([Capability.FP8] if has_torchao() else []),
        }
    ),
    options="engine_fsdp.options:FSDPOptions",
    variants=(Variant(options={"reduce_each_micro_batch": True}),),
    probe=probe_torch,
)

"""The descriptor and the probe. Loading them imports neither torch nor Megatron."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from engine_api.capabilities import Capability
from engine_api.devices import cuda_is_simulated, probe_torch
from engine_api.plugin import EnginePlugin, ProbeResult, Row, Variant
from engine_megatron import te

_BACKENDS = ("megatron",)
_DEVICES = ("cuda", "cpu")

# The versions that were seen to work, newest first. Megatron-core moves functions between minor
# releases.
TESTED_VERSIONS = ("0.16.1",)
_INSTALL = "pip install 'engine-megatron[core]'"


def probe(device: str) -> ProbeResult:
    """Report whether torch, a tested Megatron-core and psutil are here and ``device`` is usable."""
    if problem := missing():
        return problem
    if device == "cpu" and not cuda_is_simulated():
        return ProbeResult(
            ok=False,
            reason="Megatron-core calls CUDA wherever it runs",
            remedy="use device=cuda; a test may simulate CUDA: "
            "engine-conformance run megatron --shim",
        )
    return probe_torch(device)


def missing() -> ProbeResult | None:
    """Return the part of Megatron-core that is not installed, for any device, or None."""
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return ProbeResult(ok=False, reason="megatron-core is not installed", remedy=_INSTALL)
    if version not in TESTED_VERSIONS:
        return ProbeResult(
            ok=False,
            reason=f"megatron-core {version} is not tested; tested: {', '.join(TESTED_VERSIONS)}",
            remedy=_INSTALL,
        )
    if importlib.util.find_spec("psutil") is None:
        return ProbeResult(
            ok=False,
            reason="psutil is not installed, which Megatron-core needs to save "
            "and does not declare",
            remedy=_INSTALL,
        )
    return None


PLUGIN = EnginePlugin(
    name="engine-megatron",
    contract="1.4",
    rows=(
        Row(
            model_types=("language_model",),
            backends=_BACKENDS,
            devices=_DEVICES,
            target="engine_megatron.engine:MegatronEngineWithLMHead",
        ),
        Row(
            model_types=("value_model",),
            backends=_BACKENDS,
            devices=_DEVICES,
            target="engine_megatron.engine:MegatronEngineWithValueHead",
        ),
    ),
    capabilities=frozenset(
        {
            Capability.DP,
            Capability.TP,
            Capability.PP,
            Capability.CP,
            Capability.EP,
            Capability.LORA,
            Capability.RECOMPUTE,
            Capability.BF16,
            Capability.MOE,
            Capability.ROUTER_REPLAY,
            Capability.PARAMETER_GROUPS,
            Capability.VALUE_HEAD,
            Capability.PORTABLE_CHECKPOINT,
            Capability.EXPORT_SHARDS,
            Capability.SAVE_HF,
            Capability.LOGIT_SCALE,
            Capability.SAVED_BUFFERS,
            Capability.SINKS,
            *([Capability.FP8] if te.is_installed() else []),
        }
    ),
    options="engine_megatron.options:MegatronOptions",
    # Megatron keeps its process groups in global variables.
    one_layout=True,
    variants=(
        Variant(options={"sequence_parallel": True}, parallelism={"tp": 2}),
        Variant(options={"vocabulary_multiple": 48}),
        Variant(options={"checkpoint": "megatron"}),
    ),
    probe=probe,
)

"""The plug-in's descriptor and probe, whose loading imports neither torch nor Automodel."""

from __future__ import annotations

import importlib.metadata

from engine_api.capabilities import Capability
from engine_api.devices import find_version_problem, probe_device
from engine_api.plugin import EnginePlugin, ProbeResult, Row, Variant
from engine_torch.versions import has_torchao

# Automodel replaces model classes and moves modules from release to release, so each needs a run of
# the conformance suite.
TESTED_VERSION = "0.7.0"
# Automodel 0.7.0 asks for 5.18.0. Its models import the same names from later ones.
LEAST_TRANSFORMERS = (5, 18)

_INSTALL = "pip install 'engine-automodel[core]'"
_DEVICES = ("cuda", "cpu")


def probe(device: str) -> ProbeResult:
    """Return whether the tested Automodel is here and ``device`` can be used."""
    if device not in _DEVICES:
        return ProbeResult(ok=False, reason=f"no support for {device}", remedy="use cuda or cpu")
    return find_problem() or probe_device(device)


def find_problem() -> ProbeResult | None:
    """Return the answer where Automodel or transformers is absent or untested, or None."""
    if problem := find_version_problem("nemo-automodel", TESTED_VERSION, _INSTALL):
        return problem
    least = ".".join(map(str, LEAST_TRANSFORMERS))
    remedy = f"pip install 'transformers>={least},<5.24'"
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return ProbeResult(ok=False, reason="transformers is not installed", remedy=remedy)
    if tuple(int(part) for part in found.split(".")[:2]) < LEAST_TRANSFORMERS:
        return ProbeResult(
            ok=False,
            reason=f"nemo-automodel {TESTED_VERSION} needs transformers {least} or later, "
            f"got {found}",
            remedy=remedy,
        )
    return None


PLUGIN = EnginePlugin(
    name="engine-automodel",
    contract="1.4",
    rows=(
        Row(
            backends=("automodel",),
            devices=_DEVICES,
            target="engine_automodel.engine:AutomodelEngineWithLMHead",
        ),
        Row(
            model_types=("value_model",),
            backends=("automodel",),
            devices=_DEVICES,
            target="engine_automodel.engine:AutomodelEngineWithValueHead",
        ),
    ),
    capabilities=frozenset(
        {
            Capability.DP,
            Capability.HSDP,
            Capability.TP,
            Capability.CP,
            Capability.EP,
            Capability.MOE,
            Capability.LORA,
            Capability.VALUE_HEAD,
            Capability.OFFLOAD,
            Capability.RECOMPUTE,
            Capability.COMPILE,
            Capability.BF16,
            Capability.ASYNC_CHECKPOINT,
            Capability.PORTABLE_CHECKPOINT,
            Capability.EXPORT_SHARDS,
            Capability.SAVE_HF,
            Capability.DISTILLATION,
            Capability.PARAMETER_GROUPS,
            Capability.SAVED_BUFFERS,
            Capability.SINKS,
            *([Capability.FP8] if has_torchao() else []),
        }
    ),
    families=(
        "llama",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "deepseek_v3",
        "gpt_oss",
        "glm4_moe",
        "glm4_moe_lite",
        "minimax_m2",
    ),
    options="engine_automodel.options:AutomodelOptions",
    variants=(Variant(options={"experts": "grouped", "reduce_each_micro_batch": True}),),
    probe=probe,
)

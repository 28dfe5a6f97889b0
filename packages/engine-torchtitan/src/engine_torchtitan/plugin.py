"""The plug-in's descriptor and probe, whose loading imports neither torch nor torchtitan."""

from __future__ import annotations

import importlib.metadata

from engine_api.capabilities import Capability
from engine_api.devices import find_version_problem, probe_device
from engine_api.plugin import EnginePlugin, ProbeResult, Row, Variant
from engine_torch.versions import has_torchao

# torchtitan renames classes and moves modules from release to release, so each needs a run of the
# conformance suite.
TESTED_VERSION = "0.3.0"
# The oldest torch with which this engine's layouts were run. torchtitan 0.3.0 is made for torch
# 2.13, and the modules `library` and `modules` have what its parts need beside an older one.
LEAST_TORCH = (2, 11)

_INSTALL = "pip install 'engine-torchtitan[core]'"
_DEVICES = ("cuda", "cpu")


def probe(device: str) -> ProbeResult:
    """Return whether the tested torchtitan and its torch are here and ``device`` can be used."""
    if device not in _DEVICES:
        return ProbeResult(ok=False, reason=f"no support for {device}", remedy="use cuda or cpu")
    return find_problem() or probe_device(device)


def find_problem() -> ProbeResult | None:
    """Return the answer where torchtitan or torch is absent or of another version, or None."""
    if problem := find_version_problem("torchtitan", TESTED_VERSION, _INSTALL):
        return problem
    least = ".".join(map(str, LEAST_TORCH))
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ProbeResult(
            ok=False, reason="torch is not installed", remedy=f"pip install 'torch>={least}'"
        )
    if tuple(int(part) for part in torch.split(".")[:2]) < LEAST_TORCH:
        return ProbeResult(
            ok=False,
            reason=f"torchtitan {TESTED_VERSION} needs torch {least} or later, got {torch}",
            remedy=f"pip install 'torch>={least}'",
        )
    return None


PLUGIN = EnginePlugin(
    name="engine-torchtitan",
    contract="1.4",
    rows=(
        Row(
            backends=("torchtitan",),
            devices=_DEVICES,
            target="engine_torchtitan.engine:TorchTitanEngineWithLMHead",
        ),
        Row(
            model_types=("value_model",),
            backends=("torchtitan",),
            devices=_DEVICES,
            target="engine_torchtitan.engine:TorchTitanEngineWithValueHead",
        ),
    ),
    capabilities=frozenset(
        {
            Capability.DP,
            Capability.HSDP,
            Capability.TP,
            Capability.PP,
            Capability.CP,
            Capability.EP,
            Capability.MOE,
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
    families=("qwen3", "llama", "qwen3_moe", "deepseek_v3", "gpt_oss"),
    options="engine_torchtitan.options:TorchTitanOptions",
    variants=(
        Variant(options={"sequence_parallel": False}, parallelism={"tp": 2}),
        Variant(options={"reduce_each_micro_batch": True}),
    ),
    probe=probe,
)

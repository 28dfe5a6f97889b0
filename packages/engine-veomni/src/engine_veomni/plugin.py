"""The plug-in's descriptors and probe, whose loading imports neither torch nor VeOmni."""

from __future__ import annotations

from dataclasses import replace

from engine_api.capabilities import MECHANISMS, Capability
from engine_api.devices import find_version_problem, probe_device
from engine_api.plugin import EnginePlugin, ProbeResult, Row
from engine_fsdp.plugin import PLUGIN as FSDP

# VeOmni renames functions and moves modules from release to release, so each needs a run of the
# conformance suite.
TESTED_VERSION = "0.1.12"

_INSTALL = "pip install 'engine-veomni[core]'"
_BACKENDS = ("veomni",)
_DEVICES = ("cuda", "cpu")
_NPU = ("npu",)
# Of these families VeOmni has classes that tests compare with transformers in float64.
_TEXT = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "deepseek_v3", "gpt_oss")
_FAMILIES = (*_TEXT, "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
# DeepSeek-V3's and gpt-oss'.
_MECHANISMS = {Capability.SAVED_BUFFERS, Capability.SINKS}
_KINDS = {"language_model": "LMHead", "value_model": "ValueHead"}


def probe(device: str) -> ProbeResult:
    """Return whether the tested VeOmni and torch are here and ``device`` can be used."""
    if device not in (*_DEVICES, *_NPU):
        return ProbeResult(ok=False, reason=f"no support for {device}", remedy="use cuda or cpu")
    return find_problem() or probe_device(device)


def find_problem() -> ProbeResult | None:
    """Return the answer where VeOmni is absent or of an untested version, or None."""
    return find_version_problem("veomni", TESTED_VERSION, _INSTALL)


def _rows(devices: tuple[str, ...], module: str, prefix: str) -> tuple[Row, ...]:
    return tuple(
        Row(
            model_types=(kind,),
            backends=_BACKENDS,
            devices=devices,
            target=f"engine_veomni.{module}:{prefix}EngineWith{head}",
        )
        for kind, head in _KINDS.items()
    )


PLUGIN = EnginePlugin(
    name="engine-veomni",
    contract="1.4",
    rows=_rows(_DEVICES, "engine", "VeOmni"),
    # No case has compared VeOmni's code for videos.
    capabilities=FSDP.capabilities - {Capability.VIDEO} - (MECHANISMS - _MECHANISMS),
    families=_FAMILIES,
    options="engine_veomni.options:VeOmniOptions",
    # VeOmni keeps its kernels and its parallel state in global variables.
    one_layout=True,
    variants=FSDP.variants,
    probe=probe,
)

NPU = replace(
    PLUGIN,
    name="engine-veomni-npu",
    rows=_rows(_NPU, "npu", "NPUVeOmni"),
    # engine-npu has no backend of torch.compile, and products of FP8 are CUDA's. The kernel of
    # attention takes documents, and no tree of them. The simulated device has no convolution, so no
    # test has run a vision tower. None has spread experts over several NPUs. CANN's kernel knows no
    # sinks.
    capabilities=PLUGIN.capabilities
    - {
        Capability.COMPILE,
        Capability.FP8,
        Capability.EP,
        Capability.SHARED_PREFIXES,
        Capability.SINKS,
        Capability.VISION,
    },
    options="engine_veomni.options:NPUVeOmniOptions",
)

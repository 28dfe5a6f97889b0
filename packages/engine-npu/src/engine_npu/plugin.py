"""The plug-in's descriptors.

Loading them registers the device, and imports neither torch nor torch_npu nor MindSpeed.
"""

from __future__ import annotations

from engine_api.capabilities import Capability
from engine_api.devices import register_device
from engine_api.plugin import EnginePlugin, Row
from engine_fsdp.plugin import PLUGIN as FSDP_ELSEWHERE
from engine_megatron.plugin import PLUGIN as MEGATRON_ELSEWHERE
from engine_npu.ascend import NAME
from engine_npu.device import Npu
from engine_npu.probe import probe_fsdp, probe_megatron

register_device(Npu())

_DEVICES = (NAME,)
_LM = ("language_model",)
_VALUE = ("value_model",)

FSDP = EnginePlugin(
    name="engine-npu",
    contract="1.4",
    rows=(
        Row(
            model_types=_LM,
            backends=("fsdp", "fsdp2"),
            devices=_DEVICES,
            target="engine_npu.engine:NPUFSDPEngineWithLMHead",
        ),
        Row(
            model_types=_VALUE,
            backends=("fsdp", "fsdp2"),
            devices=_DEVICES,
            target="engine_npu.engine:NPUFSDPEngineWithValueHead",
        ),
    ),
    # torch.compile on an NPU needs a backend of torch_npu (torchair), which this package does not
    # use. Products of FP8 are CUDA's. The kernel of attention takes documents, and no tree of them.
    # The simulated device has no convolution, so no test has run a vision tower. None has spread
    # experts over several NPUs.
    capabilities=FSDP_ELSEWHERE.capabilities
    - {
        Capability.COMPILE,
        Capability.EP,
        Capability.FP8,
        Capability.SHARED_PREFIXES,
        Capability.VISION,
        Capability.VIDEO,
    },
    options="engine_fsdp.options:SharedOptions",
    variants=FSDP_ELSEWHERE.variants,
    probe=probe_fsdp,
)

# FP8 is computed by Transformer Engine, on NVIDIA's devices only.
_MEGATRON = MEGATRON_ELSEWHERE.capabilities - {Capability.FP8}

MEGATRON = EnginePlugin(
    name="engine-npu-megatron",
    contract="1.4",
    rows=(
        Row(
            model_types=_LM,
            backends=("megatron",),
            devices=_DEVICES,
            target="engine_npu.megatron:MindSpeedEngineWithLMHead",
        ),
        Row(
            model_types=_VALUE,
            backends=("megatron",),
            devices=_DEVICES,
            target="engine_npu.megatron:MindSpeedEngineWithValueHead",
        ),
    ),
    capabilities=_MEGATRON,
    options=MEGATRON_ELSEWHERE.options,
    variants=MEGATRON_ELSEWHERE.variants,
    one_layout=MEGATRON_ELSEWHERE.one_layout,
    probe=probe_megatron,
)

MINDSPEED = EnginePlugin(
    name="engine-npu-mindspeed",
    contract="1.4",
    rows=(
        Row(
            model_types=_LM,
            backends=("mindspeed_megatron",),
            devices=_DEVICES,
            target="engine_npu.megatron:MindSpeedMegatronEngineWithLMHead",
        ),
    ),
    capabilities=_MEGATRON - {Capability.VALUE_HEAD},
    options="engine_npu.options:MindSpeedOptions",
    one_layout=MEGATRON_ELSEWHERE.one_layout,
    probe=probe_megatron,
)

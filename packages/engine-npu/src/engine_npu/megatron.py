"""engine-megatron's engines on NPUs, over MindSpeed. Importing this module applies MindSpeed's adaptor first of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine_api.config import EngineConfig
from engine_api.registry import Resolution
from engine_npu import mindspeed
from engine_npu.options import mindspeed_options

_adaptor = mindspeed.adapt()  # before Megatron-core is imported, which the next line does

from engine_megatron.engine import (
    MegatronEngine,
    MegatronEngineWithLMHead,
    MegatronEngineWithValueHead,
)

__all__ = [
    "MindSpeedMegatronEngineWithLMHead",
    "MindspeedEngine",
    "MindspeedEngineWithLMHead",
    "MindspeedEngineWithValueHead",
]


class MindspeedEngine(MegatronEngine):
    """What the engines share: MindSpeed is told of the layout before a group or a layer is made."""

    # The least that MindSpeed does: its level 0 is what makes Megatron-core run on an NPU.
    features: Mapping[str, Any] = {"optimization_level": 0}

    def _build(self) -> None:
        mindspeed.configure(_adaptor, {**layout_of(self.config, self.options), **self.features})
        super()._build()


def layout_of(config: EngineConfig, options: Any) -> dict[str, Any]:
    """The layout in MindSpeed's words, which are Megatron's arguments.

    MindSpeed's own context parallelism stays off: engine-megatron's layers gather keys and values, and know of no ring.
    """
    parallelism = config.parallelism
    return {
        "tensor_model_parallel_size": parallelism.tp,
        "pipeline_model_parallel_size": parallelism.pp,
        "context_parallel_size": 1,
        "expert_model_parallel_size": parallelism.ep,
        "sequence_parallel": options.sequence_parallel,
        "transformer_impl": "local",
    }


class MindspeedEngineWithLMHead(MindspeedEngine, MegatronEngineWithLMHead):
    """Log-probs and entropy of a causal language model, on the least of MindSpeed."""


class MindspeedEngineWithValueHead(MindspeedEngine, MegatronEngineWithValueHead):
    """A scalar a token, on the least of MindSpeed."""


class MindSpeedMegatronEngineWithLMHead(MindspeedEngine, MegatronEngineWithLMHead):
    """Log-probs and entropy of a causal language model, with those of MindSpeed's features that the options name."""

    def __init__(self, config: EngineConfig, *, resolution: Resolution) -> None:
        own = mindspeed_options(config.options)
        self.features = own.features()
        super().__init__(replace(config, options=own.megatron()), resolution=resolution)

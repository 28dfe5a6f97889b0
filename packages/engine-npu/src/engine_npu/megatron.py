"""Megatron engines on NPUs, which are engine-megatron's over MindSpeed.

Importing this module first applies MindSpeed's adaptor, which replaces parts of torch and
Megatron-core. The engines are therefore not in ``engine.py``, which FSDP rows import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine_api.config import EngineConfig
from engine_api.errors import ConfigError
from engine_api.registry import Resolution
from engine_npu import mindspeed
from engine_npu.options import mindspeed_options

# The next statement imports Megatron-core, which must come after the adaptor.
_adaptor = mindspeed.adapt()

from engine_megatron.engine import (
    MegatronEngine,
    MegatronEngineWithLMHead,
    MegatronEngineWithValueHead,
)

__all__ = [
    "MindSpeedEngine",
    "MindSpeedEngineWithLMHead",
    "MindSpeedEngineWithValueHead",
    "MindSpeedMegatronEngineWithLMHead",
]


class MindSpeedEngine(MegatronEngine):
    """The common part of these engines, which configures MindSpeed before anything is built.

    MindSpeed must receive the layout before a group or a layer is created.
    """

    features: Mapping[str, Any] = {"optimization_level": 0}
    """MindSpeed's settings apart from the layout.

    Level 0, MindSpeed's lowest, is what makes Megatron-core run on an NPU.
    """

    def __init__(self, config: EngineConfig, *, resolution: Resolution) -> None:
        super().__init__(config, resolution=resolution)
        if self.options.balance_loss:
            raise ConfigError(
                "options.balance_loss",
                f"expected 0 with MindSpeed, got {self.options.balance_loss}",
                why="MindSpeed replaces parts of Megatron's routers, and no test has compared "
                "their balance loss",
                remedy="set options.balance_loss: 0, or use backend fsdp2",
            )

    def _build(self) -> None:
        layout = layout_of(self.config, self.options)
        mindspeed.configure(_adaptor, {**layout, **self.features})
        super()._build()


def layout_of(config: EngineConfig, options: Any) -> dict[str, Any]:
    """Return the layout under MindSpeed's names, which are those of Megatron's arguments.

    MindSpeed's own context parallelism stays off, because engine-megatron's layers gather keys and
    values and have no ring.
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


class MindSpeedEngineWithLMHead(MindSpeedEngine, MegatronEngineWithLMHead):
    """The engine for log-probs and entropy of a causal language model, at MindSpeed's level 0."""


class MindSpeedEngineWithValueHead(MindSpeedEngine, MegatronEngineWithValueHead):
    """The engine for a scalar per token, at MindSpeed's level 0."""


class MindSpeedMegatronEngineWithLMHead(MindSpeedEngine, MegatronEngineWithLMHead):
    """The engine for log-probs and entropy, with those features of MindSpeed that options name."""

    def __init__(self, config: EngineConfig, *, resolution: Resolution) -> None:
        own = mindspeed_options(config.options)
        self.features = own.features()
        super().__init__(replace(config, options=own.megatron()), resolution=resolution)

"""FSDP engines on NPUs: engine-fsdp's, with the device and its attention made known before anything is built."""

from __future__ import annotations

from engine_api.devices import npu_is_simulated
from engine_fsdp.engine import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead
from engine_npu import attention
from engine_npu.device import Npu, load

__all__ = ["NPUFSDPEngine", "NPUFSDPEngineWithLMHead", "NPUFSDPEngineWithValueHead"]

attention.register()


class NPUFSDPEngine(FSDPEngine):
    """What the language and the value engine share."""

    def _build(self) -> None:
        if self.device_type == Npu.name and not npu_is_simulated():
            load()  # torch knows neither the device nor HCCL before
        super()._build()


class NPUFSDPEngineWithLMHead(NPUFSDPEngine, FSDPEngineWithLMHead):
    """Log-probs and entropy of a causal language model."""


class NPUFSDPEngineWithValueHead(NPUFSDPEngine, FSDPEngineWithValueHead):
    """A scalar a token, from a linear head on the model's last hidden states."""

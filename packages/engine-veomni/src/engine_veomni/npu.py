"""The engines on Ascend NPUs, with engine-npu's fused attention registered before use.

engine-npu brings the device, so that without it these rows cannot be used.
"""

from __future__ import annotations

from typing import ClassVar

from engine_npu import attention
from engine_torch.options import DTensorOptions
from engine_veomni.engine import VeOmniEngineWithLMHead, VeOmniEngineWithValueHead
from engine_veomni.options import NPUVeOmniOptions

__all__ = ["NPUVeOmniEngineWithLMHead", "NPUVeOmniEngineWithValueHead"]

attention.register()


class NPUVeOmniEngineWithLMHead(VeOmniEngineWithLMHead):
    """The engine for log-probs and entropy of a causal language model."""

    options_class: ClassVar[type[DTensorOptions]] = NPUVeOmniOptions


class NPUVeOmniEngineWithValueHead(VeOmniEngineWithValueHead):
    """The engine for a scalar per token, from a linear head on the last hidden states."""

    options_class: ClassVar[type[DTensorOptions]] = NPUVeOmniOptions

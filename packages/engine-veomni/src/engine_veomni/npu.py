"""The engines on Ascend NPUs, with engine-npu's fused attention registered before use.

engine-npu brings the device, so that without it these rows cannot be used.
"""

from __future__ import annotations

from engine_npu import attention
from engine_veomni.engine import VeOmniEngineWithLMHead, VeOmniEngineWithValueHead

__all__ = ["NPUVeOmniEngineWithLMHead", "NPUVeOmniEngineWithValueHead"]

attention.register()


class NPUVeOmniEngineWithLMHead(VeOmniEngineWithLMHead):
    """The engine for log-probs and entropy of a causal language model."""


class NPUVeOmniEngineWithValueHead(VeOmniEngineWithValueHead):
    """The engine for a scalar per token, from a linear head on the last hidden states."""

"""FSDP engines on NPUs: engine-fsdp's, with the fused attention made known before anything is built."""

from __future__ import annotations

from engine_fsdp.engine import FSDPEngineWithLMHead, FSDPEngineWithValueHead
from engine_npu import attention

__all__ = ["NPUFSDPEngineWithLMHead", "NPUFSDPEngineWithValueHead"]

attention.register()


class NPUFSDPEngineWithLMHead(FSDPEngineWithLMHead):
    """Log-probs and entropy of a causal language model."""


class NPUFSDPEngineWithValueHead(FSDPEngineWithValueHead):
    """A scalar a token, from a linear head on the model's last hidden states."""

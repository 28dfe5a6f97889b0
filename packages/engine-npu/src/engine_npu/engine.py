"""FSDP engines on NPUs, which are engine-fsdp's with the fused attention registered before use.

The Megatron engines are in ``megatron.py``. Their base class needs Megatron-core at import, after
MindSpeed's adaptor has replaced parts of it and of torch, which must not happen where only FSDP is
used.
"""

from __future__ import annotations

from typing import ClassVar

from engine_fsdp.engine import FSDPEngineWithLMHead, FSDPEngineWithValueHead
from engine_fsdp.options import SharedOptions
from engine_npu import attention
from engine_torch.options import DTensorOptions

__all__ = ["NPUFSDPEngineWithLMHead", "NPUFSDPEngineWithValueHead"]

attention.register()


class NPUFSDPEngineWithLMHead(FSDPEngineWithLMHead):
    """The engine for log-probs and entropy of a causal language model."""

    options_class: ClassVar[type[DTensorOptions]] = SharedOptions


class NPUFSDPEngineWithValueHead(FSDPEngineWithValueHead):
    """The engine for a scalar per token, from a linear head on the last hidden states."""

    options_class: ClassVar[type[DTensorOptions]] = SharedOptions

"""The options that this engine has in addition to those of every engine over DTensor."""

from __future__ import annotations

from dataclasses import dataclass

from engine_torch.options import Float8Options

__all__ = ["TorchTitanOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchTitanOptions(Float8Options):
    """The options of engine-torchtitan (``EngineConfig.options``)."""

    sequence_parallel: bool = True
    """True divides the activations between the layers over the tensor-parallel ranks.

    This saves memory at the same volume of communication. Each rank's tokens of a micro-batch are
    then padded to a multiple of ``tp``.
    """

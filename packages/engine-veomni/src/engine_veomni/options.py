"""The options that this engine has in addition to those of engine-fsdp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine_api.capabilities import Capability
from engine_fsdp.options import FSDPOptions, SharedOptions

# The options that choose a kernel, which have VeOmni's names of the operators.
KERNELS = ("rms_norm", "rotary_pos_emb", "swiglu_mlp")

EAGER = "eager"


# Python refuses a class of two bases with slots.
@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """The choice of VeOmni's kernels, a mix-in for the options of its engines.

    Kernels other than ``eager`` exclude ``memory.compile``.
    """

    rms_norm: str = EAGER
    """VeOmni's kernel for RMSNorm.

    ``eager`` computes in transformers' own order, ``liger_kernel`` needs the package liger-kernel
    and a GPU, and ``npu`` an Ascend NPU.
    """

    rotary_pos_emb: str = EAGER
    """VeOmni's kernel for rotary positions: ``eager``, ``liger_kernel`` or ``npu``."""

    swiglu_mlp: str = EAGER
    """VeOmni's kernel for gated dense layers: ``eager`` or ``liger_kernel``."""

    @property
    def excluded(self) -> frozenset[Capability]:
        """The capabilities that the engine lacks with these kernels.

        No test has compared compiled blocks that hold one of VeOmni's.
        """
        kernels = set(self.list_kernels().values())
        return frozenset() if kernels == {EAGER} else frozenset({Capability.COMPILE})

    def list_kernels(self) -> Mapping[str, str]:
        """Return the chosen kernel of each operator."""
        return {name: getattr(self, name) for name in KERNELS}


@dataclass(frozen=True, kw_only=True, slots=True)
class VeOmniOptions(KernelOptions, FSDPOptions):
    """The options of engine-veomni (``EngineConfig.options``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NPUVeOmniOptions(KernelOptions, SharedOptions):
    """The options of engine-veomni on Ascend NPUs, which neither compiles nor computes in FP8."""

"""The options that only the MindSpeed rows have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from engine_api.config import build_options
from engine_api.errors import ConfigError
from engine_megatron.options import MegatronOptions

_LEVELS = (0, 1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class MindSpeedOptions(MegatronOptions):
    """The options of backend ``mindspeed_megatron``, in addition to those of engine-megatron."""

    optimization_level: int = 2
    """MindSpeed's level of optimization.

    At 0 it does what makes Megatron-core run on an NPU, at 1 it adds fused operators, and at 2 its
    algorithms.
    """

    fused_moe_permute: bool = False
    """True sends tokens to experts and back by one fused operator each, which needs level 2."""

    hccl_group_buffer: str = ""
    """Size of HCCL's buffer per group of ranks in MiB, in MindSpeed's form ``dp:200;tp:300``.

    Empty for HCCL's default. It needs level 2.
    """

    def __post_init__(self) -> None:
        # super() fails here, because with slots the decorator creates a new class.
        MegatronOptions.__post_init__(self)
        if self.optimization_level not in _LEVELS:
            raise ConfigError(
                "options.optimization_level",
                f"expected one of MindSpeed's levels, got {self.optimization_level}",
                remedy="give 0, 1 or 2",
            )
        for name in ("fused_moe_permute", "hccl_group_buffer"):
            if getattr(self, name) and self.optimization_level < _LEVELS[-1]:
                raise ConfigError(
                    f"options.{name}",
                    f"given, with optimization_level {self.optimization_level}",
                    why="MindSpeed applies it at level 2 only",
                    remedy=f"leave out optimization_level or {name}",
                )

    def megatron(self) -> MegatronOptions:
        """Return the options that are engine-megatron's."""
        names = [field.name for field in fields(MegatronOptions)]
        return MegatronOptions(**{name: getattr(self, name) for name in names})

    def features(self) -> Mapping[str, Any]:
        """Return the options that are MindSpeed's, under the names of its own arguments."""
        return {
            "optimization_level": self.optimization_level,
            "moe_permute_fusion": self.fused_moe_permute,
            "use_fused_moe_token_permute_and_unpermute": self.fused_moe_permute,
            "hccl_group_buffer": self.hccl_group_buffer or None,
        }


def mindspeed_options(options: Any) -> MindSpeedOptions:
    """Return the options, given the configuration's value (None, a mapping or the dataclass)."""
    result: MindSpeedOptions = build_options(options, MindSpeedOptions)
    return result

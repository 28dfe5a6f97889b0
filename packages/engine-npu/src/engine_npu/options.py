"""What only the MindSpeed rows know."""

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
    """Options of backend ``mindspeed_megatron`` (``EngineConfig.options``), beside engine-megatron's."""

    # MindSpeed's own levels. 0: what makes Megatron-core run on an NPU. 1: fused operators. 2: its algorithms as well.
    optimization_level: int = 2
    # Tokens are sent to experts and back by one fused operator each; needs level 2.
    fused_moe_permute: bool = False
    # HCCL's buffer a group of ranks, in MiB, as MindSpeed takes it: "dp:200;tp:300". Empty: HCCL's default.
    hccl_group_buffer: str = ""

    def __post_init__(self) -> None:
        # Not super(): with slots the decorator makes another class than this function's.
        MegatronOptions.__post_init__(self)
        if self.optimization_level not in _LEVELS:
            raise ConfigError(
                "options.optimization_level",
                f"{self.optimization_level} is none of MindSpeed's levels",
                remedy="give 0, 1 or 2",
            )
        for name in ("fused_moe_permute", "hccl_group_buffer"):
            if getattr(self, name) and self.optimization_level < _LEVELS[-1]:
                raise ConfigError(
                    f"options.{name}",
                    f"given, with optimization_level {self.optimization_level}",
                    why="MindSpeed applies it at level 2 only",
                    remedy="leave the level out, or this",
                )

    def megatron(self) -> MegatronOptions:
        """The part that is engine-megatron's."""
        return MegatronOptions(
            **{field.name: getattr(self, field.name) for field in fields(MegatronOptions)}
        )

    def features(self) -> Mapping[str, Any]:
        """The part that MindSpeed is told, under the names of its own arguments."""
        return {
            "optimization_level": self.optimization_level,
            "moe_permute_fusion": self.fused_moe_permute,
            "use_fused_moe_token_permute_and_unpermute": self.fused_moe_permute,
            "hccl_group_buffer": self.hccl_group_buffer or None,
        }


def mindspeed_options(options: Any) -> MindSpeedOptions:
    """The options from what the configuration holds (None, a mapping or the dataclass)."""
    result: MindSpeedOptions = build_options(options, MindSpeedOptions)
    return result

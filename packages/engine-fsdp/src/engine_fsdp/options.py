"""What only this engine knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine_api.config import build_options, near_matches
from engine_api.errors import ConfigError

_COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDPOptions:
    """Options of engine-fsdp (``EngineConfig.options``)."""

    # Reduce-scatter after every micro-batch: less memory than one unsharded gradient, more communication.
    reduce_each_micro_batch: bool = False
    # Blocks whose weights are gathered ahead of the one that computes.
    prefetch_blocks: int = 1
    # torch.compile mode of each block, when memory.compile is on.
    compile_mode: str = "default"
    # At start, compare packed log-probs with the model's own forward, document by document.
    verify_model: bool = True
    timeout_s: int = 600
    """Seconds that a rank may keep the others waiting in a collective, or be silent (stopped, its host lost), after which the
    call ends with ``RankFailure`` on them. A rank whose process is gone is noticed within seconds."""

    def __post_init__(self) -> None:
        if self.prefetch_blocks < 0:
            raise ConfigError(
                "options.prefetch_blocks",
                f"{self.prefetch_blocks} is negative",
                remedy="give 0 or more",
            )
        if self.compile_mode not in _COMPILE_MODES:
            raise ConfigError(
                "options.compile_mode",
                f"{self.compile_mode!r} is not a mode of torch.compile",
                remedy=near_matches(self.compile_mode, _COMPILE_MODES),
            )
        if self.timeout_s < 1:
            raise ConfigError(
                "options.timeout_s", f"{self.timeout_s} is not positive", remedy="give seconds"
            )


def fsdp_options(options: Any) -> FSDPOptions:
    """The options from what the configuration holds (None, a mapping or the dataclass)."""
    result: FSDPOptions = build_options(options, FSDPOptions)
    return result

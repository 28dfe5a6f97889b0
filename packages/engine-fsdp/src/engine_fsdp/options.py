"""The options that only this engine has."""

from __future__ import annotations

from dataclasses import dataclass

from engine_api.config import near_matches
from engine_api.errors import ConfigError

_COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDPOptions:
    """The options of engine-fsdp (``EngineConfig.options``)."""

    reduce_each_micro_batch: bool = False
    """True reduces gradients after every micro-batch instead of once a step.

    This avoids the memory of an unsharded gradient, and costs more communication.
    """

    prefetch_blocks: int = 1
    """Number of blocks whose weights are gathered ahead of the block that computes."""

    compile_mode: str = "default"
    """Mode of torch.compile for each block, used when ``memory.compile`` is on."""

    verify_model: bool = True
    """True checks packed log-probs against the model's own forward at the start.

    The model's own forward computes one document at a time.
    """

    timeout_s: int = 600
    """Seconds that a rank may delay a collective, or be silent (stopped, or its host lost).

    After that the call ends with ``RankFailure`` on the other ranks. A rank whose process has ended
    is noticed within seconds.
    """

    def __post_init__(self) -> None:
        if self.prefetch_blocks < 0:
            raise ConfigError(
                "options.prefetch_blocks",
                f"expected 0 or more, got {self.prefetch_blocks}",
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
                "options.timeout_s",
                f"expected at least 1 second, got {self.timeout_s}",
                remedy="give a positive number of seconds",
            )

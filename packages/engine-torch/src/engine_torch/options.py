"""The options that every engine over DTensor has."""

from __future__ import annotations

from dataclasses import dataclass

from engine_api.errors import ConfigError

__all__ = ["DTensorOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DTensorOptions:
    """The options of an engine over DTensor, from which it derives its own."""

    reduce_each_micro_batch: bool = False
    """True reduces gradients after every micro-batch instead of once a step.

    This avoids the memory of an unsharded gradient, and costs more communication.
    """

    prefetch_blocks: int = 1
    """Number of blocks whose weights are gathered ahead of the block that computes."""

    cast_each_pass: bool | None = None
    """True casts the weights anew for each pass where one rank computes in another dtype than that
    of the masters. False keeps a copy of them in that dtype, which is faster and takes 2 bytes a
    weight, and computes the same numbers.

    Null is false where the copy takes at most a sixteenth of the device's free memory. Several
    ranks and offloaded weights cast in each pass.
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
        if self.timeout_s < 1:
            raise ConfigError(
                "options.timeout_s",
                f"expected at least 1 second, got {self.timeout_s}",
                remedy="give a positive number of seconds",
            )

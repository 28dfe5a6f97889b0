"""The options that every engine over DTensor has, and those of engines that compute in FP8."""

from __future__ import annotations

from dataclasses import dataclass

from engine_api.config import near_matches
from engine_api.errors import ConfigError

__all__ = ["FLOAT8_RECIPES", "DTensorOptions", "Float8Options"]

FLOAT8_RECIPES = ("rowwise", "tensorwise")


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
    """True casts the weights in each pass where one rank computes in a dtype other than that of the
    masters. False keeps a copy of them in that dtype, which is faster, takes 2 bytes a weight and 2
    more in a backward pass, and computes the same numbers.

    Null is false where the copy takes at most a sixteenth of the device's free memory. Several
    ranks, offloaded weights and gradients that are reduced in a dtype other than that of the
    masters (``precision.reduce``) leave only casts in each pass, and refuse false.
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


# Python refuses a class of two bases with slots.
@dataclass(frozen=True, kw_only=True)
class Float8Options:
    """The options of products in FP8, a mix-in for the options of an engine that has them."""

    float8_recipe: str = "rowwise"
    """Scales of the matrices that ``precision.compute: float8`` casts.

    ``rowwise`` has a scale for each row, so that an outlier costs precision in its row alone, and
    a token's log-prob does not depend on other tokens. ``tensorwise`` has one for each matrix,
    whose products are faster.
    """

    float8_emulate: bool = False
    """True rounds to FP8 as ``precision.compute: float8`` says, and multiplies in bfloat16.

    It is slow, and needs no device with products of FP8. It is for tests, and for the effect of FP8
    on a loss.
    """

    def __post_init__(self) -> None:
        if self.float8_recipe not in FLOAT8_RECIPES:
            raise ConfigError(
                "options.float8_recipe",
                f"expected {' or '.join(FLOAT8_RECIPES)}, got {self.float8_recipe!r}",
                remedy=near_matches(str(self.float8_recipe), FLOAT8_RECIPES),
            )

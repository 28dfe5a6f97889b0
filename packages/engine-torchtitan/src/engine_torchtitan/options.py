"""The options that this engine has in addition to those of every engine over DTensor."""

from __future__ import annotations

from dataclasses import dataclass

from engine_api.config import near_matches
from engine_api.errors import ConfigError
from engine_torch.options import DTensorOptions

__all__ = ["FLOAT8_RECIPES", "TorchTitanOptions"]

FLOAT8_RECIPES = ("rowwise", "tensorwise")


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchTitanOptions(DTensorOptions):
    """The options of engine-torchtitan (``EngineConfig.options``)."""

    sequence_parallel: bool = True
    """True divides the activations between the layers over the tensor-parallel ranks.

    This saves memory at the same volume of communication. Each rank's tokens of a micro-batch are
    then padded to a multiple of ``tp``.
    """

    float8_recipe: str = "rowwise"
    """Scales of the matrices that ``precision.compute: float8`` casts.

    ``rowwise`` has a scale for each row, so that an outlier costs precision in its row alone.
    ``tensorwise`` has one for each matrix, whose products are faster.
    """

    def __post_init__(self) -> None:
        # Slots give the class another identity, which super() without arguments does not know.
        DTensorOptions.__post_init__(self)
        if self.float8_recipe not in FLOAT8_RECIPES:
            raise ConfigError(
                "options.float8_recipe",
                f"expected {' or '.join(FLOAT8_RECIPES)}, got {self.float8_recipe!r}",
                remedy=near_matches(str(self.float8_recipe), FLOAT8_RECIPES),
            )

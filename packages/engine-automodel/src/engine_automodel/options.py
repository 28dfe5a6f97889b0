"""The options that this engine has in addition to those of every engine over DTensor."""

from __future__ import annotations

from dataclasses import dataclass

from engine_api.errors import ConfigError
from engine_torch.options import DTensorOptions, Float8Options

__all__ = ["AutomodelOptions"]

_PRODUCTS = ("auto", "loop", "grouped")


@dataclass(frozen=True, kw_only=True, slots=True)
class AutomodelOptions(Float8Options, DTensorOptions):
    """The options of engine-automodel (``EngineConfig.options``)."""

    experts: str = "auto"
    """Automodel's way to compute the experts of a rank.

    ``loop`` computes one expert after the other, and ``grouped`` all of them by torch's grouped
    matrix products. ``auto`` takes ``grouped`` in bfloat16, for which GPUs have kernels, and
    ``loop`` in other dtypes.
    """

    def __post_init__(self) -> None:
        # Slots give the class another identity, which super() without arguments does not know.
        DTensorOptions.__post_init__(self)
        Float8Options.__post_init__(self)
        if self.experts not in _PRODUCTS:
            raise ConfigError(
                "options.experts",
                f"expected {' or '.join(_PRODUCTS)}, got {self.experts!r}",
                remedy="leave it out for auto",
            )

    def choose_experts(self, compute: str) -> str:
        """Return ``loop`` or ``grouped`` for a dtype of the computation, by its name."""
        if self.experts != "auto":
            return self.experts
        return "grouped" if compute == "bfloat16" else "loop"

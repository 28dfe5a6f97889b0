"""The options that only this engine has."""

from __future__ import annotations

from dataclasses import dataclass

from engine_api.config import near_matches
from engine_api.errors import ConfigError
from engine_torch.options import Float8Options

_COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDPOptions(Float8Options):
    """The options of engine-fsdp (``EngineConfig.options``)."""

    compile_mode: str = "default"
    """Mode of torch.compile for each block, used when ``memory.compile`` is on."""

    verify_model: bool = True
    """True checks packed log-probs against the model's own forward at the start.

    The model's own forward computes one document at a time.
    """

    def __post_init__(self) -> None:
        # A dataclass with slots is a second class, which super() without arguments does not know.
        Float8Options.__post_init__(self)
        if self.compile_mode not in _COMPILE_MODES:
            raise ConfigError(
                "options.compile_mode",
                f"{self.compile_mode!r} is not a mode of torch.compile",
                remedy=near_matches(self.compile_mode, _COMPILE_MODES),
            )

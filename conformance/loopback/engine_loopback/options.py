"""Options that only this engine has."""

from __future__ import annotations

from dataclasses import dataclass

from engine_api.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopbackOptions:
    """Options of the loopback engine (``EngineConfig.options``)."""

    timeout_s: int = 600
    """Seconds after which a collective that does not end fails."""

    flat_norm: bool = False
    """True computes the gradient's norm over one flat tensor instead of weight by weight."""

    def __post_init__(self) -> None:
        if self.timeout_s < 1:
            raise ConfigError(
                "options.timeout_s", f"{self.timeout_s} is not positive", remedy="give seconds"
            )

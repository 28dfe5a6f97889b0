"""The engines on VeOmni's model classes, which are engine-fsdp's with these classes in them."""

from __future__ import annotations

from typing import Any, ClassVar

from engine_api.capabilities import Capability
from engine_api.config import EngineConfig
from engine_api.errors import ConfigError
from engine_api.registry import Resolution
from engine_fsdp.engine import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead
from engine_torch.model import BuiltModel, ModelClasses
from engine_torch.options import DTensorOptions
from engine_veomni.library import Hold
from engine_veomni.model import VeOmniClasses
from engine_veomni.options import EAGER, KernelOptions, VeOmniOptions

__all__ = ["VeOmniEngine", "VeOmniEngineWithLMHead", "VeOmniEngineWithValueHead"]


class VeOmniEngine(FSDPEngine):
    """The common part of the language-model and value-model engines."""

    options_class: ClassVar[type[DTensorOptions]] = VeOmniOptions
    classes: ClassVar[ModelClasses] = VeOmniClasses()
    float8_install: ClassVar[str] = "pip install 'engine-veomni[core,float8]'"

    _hold: Hold | None = None

    def __init__(self, config: EngineConfig, *, resolution: Resolution) -> None:
        super().__init__(config, resolution=resolution)
        if config.memory.compile and Capability.COMPILE in self.options.excluded:
            chosen = {name: one for name, one in self._list_kernels().items() if one != EAGER}
            raise ConfigError(
                "memory.compile",
                "expected false with "
                + ", ".join(f"options.{name} {one}" for name, one in chosen.items())
                + ", got true",
                why="no test has compared compiled blocks that hold one of VeOmni's kernels",
                remedy=f"turn it off, or use {EAGER} kernels, which are compiled",
            )

    def _build(self) -> None:
        try:
            super()._build()
        # Ctrl-C included: an engine that was not built holds nothing.
        except BaseException:
            self._let_go()
            raise

    def build_model(self) -> BuiltModel:
        """Build the model of VeOmni's classes (see ``FSDPEngine.build_model``).

        Raises:
            ConfigError: another engine of this process has another layout or other kernels, or
                VeOmni has no class or no kernel for this model.
        """
        self._hold = Hold(self.topology.sizes, self._list_kernels())
        built = super().build_model()
        self._hold.bind(type(built.lm))
        return built

    def _list_kernels(self) -> dict[str, str]:
        assert isinstance(self.options, KernelOptions)
        return dict(self.options.list_kernels())

    def _choices(self) -> dict[str, Any]:
        return {
            **super()._choices(),
            **{f"options.{name}": kernel for name, kernel in self._list_kernels().items()},
        }

    def _release(self) -> None:
        try:
            super()._release()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._hold is not None:
            self._hold.release()
            self._hold = None


class VeOmniEngineWithLMHead(VeOmniEngine, FSDPEngineWithLMHead):
    """The engine for log-probs and entropy of a causal language model."""


class VeOmniEngineWithValueHead(VeOmniEngine, FSDPEngineWithValueHead):
    """The engine for a scalar per token, from a linear head on the last hidden states."""

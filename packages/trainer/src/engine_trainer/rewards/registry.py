"""The registry of reward functions by name, from entry points and from this process."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine_api.config import near_matches
from engine_api.errors import ConfigError, EngineError, PluginConflict, PluginLoadError
from engine_trainer.extensions.functions import load_function, require_arguments
from engine_trainer.rewards.sample import RewardFn

REWARD_GROUP = "engine_trainer.rewards"

Factory = Callable[..., RewardFn]

_in_process: dict[str, Factory] = {}


def register(name: str) -> Callable[[Factory], Factory]:
    """Return a decorator that registers a factory under ``name`` in this process.

    It takes precedence over an installed one.
    """

    def add(factory: Factory) -> Factory:
        _in_process[name] = factory
        return factory

    return add


def known() -> list[str]:
    """Return every name that ``create`` accepts, sorted."""
    return sorted(
        {entry.name for entry in importlib.metadata.entry_points(group=REWARD_GROUP)}
        | set(_in_process)
    )


def create(name: str, kwargs: Mapping[str, Any] | None = None) -> RewardFn:
    """Create the reward function ``name`` with ``kwargs``.

    Raises:
        ConfigError: unknown name, or arguments that the factory does not take.
        PluginConflict: two distributions offer the name.
        PluginLoadError: its module cannot be imported.
    """
    factory = _in_process.get(name) or _installed(name)
    try:
        return factory(**(kwargs or {}))
    except EngineError:
        raise
    # A third-party factory may raise anything.
    except (Exception, SystemExit) as error:
        place = f"{getattr(factory, '__module__', '')}.{getattr(factory, '__qualname__', name)}"
        raise ConfigError(
            "reward.kwargs",
            f"{name!r} cannot be created with {{{', '.join(f'{key}: …' for key in kwargs or {})}}}",
            why=f"{type(error).__name__}: {error}",
            remedy=f"see help({place})",
        ) from error


def module_of(name: str) -> str | None:
    """Return the module that registered ``name`` in this process.

    None for an installed function.
    """
    factory = _in_process.get(name)
    return None if factory is None else str(getattr(factory, "__module__", ""))


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSpec:
    """A reward as a configuration names it, either by ``name`` or by ``function``.

    A function is called as ``function(sample, **kwargs)``, without a factory.
    """

    name: str | None = None
    """Registered name of the reward's factory."""
    function: str | None = None
    """The user's own function, as ``file.py:name``."""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the factory, or of the function."""
    timeout_s: float | None = 10.0
    """Time limit of a call, in seconds.

    None sets no limit.
    """
    module: str | None = None
    """Module that another process imports first, for a name registered in this process only."""

    @property
    def title(self) -> str:
        """The reward's name in metrics and errors."""
        return self.name or (self.function or "").rpartition(":")[2]

    def make(self) -> RewardFn:
        """Return the reward function.

        Errors of ``create`` and ``load_function`` propagate.
        """
        if self.function is None:
            if self.module is not None:
                self._register()
            return create(self.name or "", self.kwargs)
        loaded = load_function(self.function, "reward.function")
        require_arguments(loaded, "reward.function", ["sample"], self.kwargs)
        return functools.partial(loaded, **self.kwargs) if self.kwargs else loaded

    def _register(self) -> None:
        """Import the module that registers the name.

        Raises:
            ConfigError: the name is still not registered after the import.
        """
        problem = f"{self.module} does not register it when it is imported"
        if self.name not in _in_process and self.module != "__main__":
            try:
                importlib.import_module(self.module or "")
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a third-party module may raise anything
                problem = f"{type(error).__name__}: {error}"
        if self.name not in _in_process:
            raise ConfigError(
                "reward.name",
                f"a reward process cannot create {self.name!r}, which was registered in the "
                "process that started it",
                why=problem,
                remedy="register it at the top of a module that can be imported, "
                "name it as reward.function, or set reward.workers: 0 and reward.timeout_s: null",
            )


def _installed(name: str) -> Factory:
    entries = [e for e in importlib.metadata.entry_points(group=REWARD_GROUP) if e.name == name]
    # An editable install in addition to a stale copy lists the same entry twice.
    values = sorted({entry.value for entry in entries})
    if not entries:
        raise ConfigError(
            "reward.name",
            f"no reward is called {name!r}",
            why=f"looked in the entry points of {REWARD_GROUP}",
            remedy=near_matches(name, known()),
        )
    if len(values) > 1:
        raise PluginConflict(
            f"reward {name!r} is offered by {' and '.join(values)}",
            where=REWARD_GROUP,
            remedy="uninstall one of them",
        )
    try:
        return entries[0].load()
    # A third-party module may raise anything.
    except Exception as error:
        raise PluginLoadError(
            f"reward {name!r} could not be imported",
            where=values[0],
            why=str(error),
            remedy="fix or uninstall it",
        ) from error

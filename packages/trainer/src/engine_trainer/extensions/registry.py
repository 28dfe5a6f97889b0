"""The one door for functions that a configuration names: losses, advantages, losses of preferences.

A name is a built-in one, that of an entry point, or ``file.py:function``. Built-in functions are
called as every other one, and are imported as late: a configuration is read without torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from engine_api.config import near_matches
from engine_api.errors import ConfigError, PluginConflict, PluginLoadError, kind_of
from engine_trainer.extensions.functions import load_function
from engine_trainer.extensions.traits import TRAITS

Traits = TypeVar("Traits")
OWN = "engine-trainer (built in)"


@dataclass(frozen=True, kw_only=True)
class BuiltIn(Generic[Traits]):
    """A function of this package.

    Attributes:
        target: ``module:function``.
        traits: see ``engine_trainer.extensions.traits``.
        reads: keys of ``algorithm`` that the function has parameters for.
    """

    target: str
    traits: Traits
    reads: tuple[str, ...] = ()


class FunctionRegistry(Generic[Traits]):
    """The functions of one kind.

    Args:
        kind: their name in errors, such as ``loss``.
        key: the configuration's key that names one.
        group: the entry points of packages.
        argument: name and type of the function's only positional argument.
        defaults: traits of a function without a decorator.
        built_in: the functions of this package, by name.
    """

    def __init__(
        self,
        *,
        kind: str,
        key: str,
        group: str,
        argument: str,
        defaults: Traits,
        built_in: Mapping[str, BuiltIn[Traits]],
    ) -> None:
        self.kind = kind
        self.key = key
        self.group = group
        self.argument = argument
        self.built_in = built_in
        self._defaults = defaults
        self._loaded: dict[str, Callable[..., Any]] = {}
        self._checked: set[str] = set()

    def names(self) -> list[str]:
        """Return the built-in and the installed names, sorted."""
        installed = importlib.metadata.entry_points(group=self.group)
        return sorted({*self.built_in, *(entry.name for entry in installed)})

    def check(self, name: str) -> None:
        """Raise the error of ``function`` for a name that is not there, or is there twice.

        Nothing is imported for a built-in name.
        """
        if name in self._checked:
            return
        if name not in self.built_in or self._offers(name):
            self.function(name)
        self._checked.add(name)

    def function(self, name: str) -> Callable[..., Any]:
        """Return the function that ``name`` stands for.

        Raises:
            ConfigError: no such name, file or function, or one that cannot be called.
            PluginConflict: two distributions offer the name.
            PluginLoadError: the module of an entry point cannot be imported.
        """
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def traits(self, name: str) -> Traits:
        """Return the traits of a function.

        Errors of ``function`` propagate.
        """
        self.check(name)
        if name in self.built_in:
            return self.built_in[name].traits
        return self.traits_of(self.function(name))

    def traits_of(self, function: Callable[..., Any]) -> Traits:
        """Return the traits that a function's decorator has given it, or the defaults."""
        traits = getattr(function, TRAITS, self._defaults)
        if not isinstance(traits, type(self._defaults)):
            raise ConfigError(
                self.key,
                f"{getattr(function, '__name__', function)!s:.100} is not for a {self.kind}",
                why=f"its decorator gave it {type(traits).__name__}",
                remedy="name it under the key that it is made for",
            )
        return traits

    def reads(self, name: str, option: str) -> bool:
        """Return whether a function has a parameter of the name ``option``."""
        self.check(name)
        if name in self.built_in:
            return option in self.built_in[name].reads
        return option in self.parameters(name)

    def parameters(self, name: str) -> dict[str, inspect.Parameter]:
        """Return the parameters of a function that options may set, by name.

        A parameter ``**options`` is there under its own name, with two asterisks.
        """
        parameters = list(_signature(self.function(name)).values())
        found: dict[str, inspect.Parameter] = {}
        for parameter in parameters[1:]:
            if parameter.kind is parameter.VAR_KEYWORD:
                found[f"**{parameter.name}"] = parameter
            elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                found[parameter.name] = parameter
        return found

    def forget(self) -> None:
        """Forget the functions that were loaded (after an installation in the same process)."""
        self._loaded.clear()
        self._checked.clear()

    # --- inside ---------------------------------------------------------------------------------

    def _load(self, name: str) -> Callable[..., Any]:
        if ":" in name:
            function = load_function(name, self.key)
            self._check_signature(function, name)
            return function
        offers = self._offers(name)
        sources = [f"{source} ({entry.value})" for source, entry in offers]
        if name in self.built_in:
            sources.insert(0, OWN)
        if len(sources) > 1:
            raise PluginConflict(
                f"{self.kind} {name!r} is offered by {' and '.join(sources)}",
                where=self.group,
                remedy="uninstall one of them, or rename its entry point",
            )
        if name in self.built_in:
            module, _, attribute = self.built_in[name].target.partition(":")
            return getattr(importlib.import_module(module), attribute)
        if not offers:
            raise self._unknown(name)
        function = self._load_entry(name, *offers[0])
        self._check_signature(function, sources[0])
        return function

    def _offers(self, name: str) -> list[tuple[str, importlib.metadata.EntryPoint]]:
        """Return the entry points of a name, with the distribution of each."""
        found: dict[tuple[str, str], importlib.metadata.EntryPoint] = {}
        for entry in importlib.metadata.entry_points(group=self.group):
            if entry.name == name:
                # An editable install in addition to a stale copy lists the same entry twice.
                found.setdefault((_distribution(entry), entry.value), entry)
        return [(source, entry) for (source, _), entry in sorted(found.items())]

    def _unknown(self, name: str) -> ConfigError:
        known = self.names()
        if name.endswith(".py") or "/" in name:
            return ConfigError(
                self.key,
                f"expected file.py:function, got {name!r}",
                why="the function's name is missing",
                remedy=f"write {name}:my_{self.kind.replace(' ', '_')}",
            )
        close = near_matches(name, known)
        return ConfigError(
            self.key,
            f"no {self.kind} is called {name!r}",
            why=f"built in or installed ({self.group}): {', '.join(known)}",
            remedy=f"{close} " * close.startswith("did you mean")
            + "choose one of them, or write file.py:function for one of your own",
        )

    def _load_entry(
        self, name: str, source: str, entry: importlib.metadata.EntryPoint
    ) -> Callable[..., Any]:
        where = f"{source} ({entry.value})"
        try:
            function = entry.load()
        # A third-party module may raise anything.
        except (Exception, SystemExit) as error:
            raise PluginLoadError(
                f"{self.kind} {name!r} could not be imported",
                where=where,
                why=f"{type(error).__name__}: {error}",
                remedy="fix or uninstall it",
            ) from error
        if not callable(function):
            raise PluginLoadError(
                f"{self.kind} {name!r} is no function, but {kind_of(function)}",
                where=where,
                remedy=f"let the entry point name a function of ({self.argument}, *, option=…)",
            )
        return cast("Callable[..., Any]", function)

    def _check_signature(self, function: Callable[..., Any], source: str) -> None:
        """Raise ``ConfigError`` unless the first parameter takes the tokens and the rest names."""
        parameters = list(_signature(function).values())
        first = parameters[0] if parameters else None
        positional = (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        )
        if first is None or first.kind not in positional:
            raise self._wrong_signature(function, source, "it takes no positional argument")
        for parameter in parameters[1:]:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise self._wrong_signature(
                    function, source, f"{parameter.name!r} cannot be given by name"
                )

    def _wrong_signature(self, function: Callable[..., Any], source: str, why: str) -> ConfigError:
        name = getattr(function, "__name__", self.kind)
        return ConfigError(
            self.key,
            f"{source} cannot be called with ({self.argument})",
            why=why,
            remedy=f"write it as def {name}({self.argument}, *, option=default)",
        )

    def missing_options(self, name: str, given: Sequence[str]) -> None:
        """Raise ``ConfigError`` for a parameter without a default that is not ``given``."""
        for option, parameter in self.parameters(name).items():
            needed = parameter.default is parameter.empty and not option.startswith("**")
            if needed and option not in given:
                raise ConfigError(
                    f"{self.key}_options.{option}",
                    f"missing, and {name} has no default for it",
                    why=f"a {self.kind} is called with ({self.argument}), "
                    "its other parameters are options",
                    remedy=f"set it, or write the {self.kind} as a function of ({self.argument}, "
                    "*, option=default)",
                )


def _signature(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        # A function in C may have no signature. Its first call shows whether the argument fits.
        only = inspect.Parameter("tokens", inspect.Parameter.POSITIONAL_ONLY)
        return {"tokens": only}


def _distribution(entry: importlib.metadata.EntryPoint) -> str:
    distribution = entry.dist
    return (
        "an unknown package"
        if distribution is None
        else (f"{distribution.name}=={distribution.version}")
    )

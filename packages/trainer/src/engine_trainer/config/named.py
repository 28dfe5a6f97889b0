"""The options of a function that a configuration names, checked against its signature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

from engine_api.config import near_matches
from engine_api.errors import ConfigError
from engine_trainer.config.binding import bind_value
from engine_trainer.extensions.registry import FunctionRegistry


def check_options(
    registry: FunctionRegistry[Any], name: str, given: Mapping[str, Any], keys: tuple[str, ...]
) -> None:
    """Raise ``ConfigError`` unless a function can be called with the options ``given``.

    A built-in function without options is not imported.

    Args:
        registry: the functions of this kind.
        name: of the function.
        given: the options.
        keys: names of options that have keys of their own in the section.
    """
    if name in registry.built_in and not given:
        registry.check(name)
        return
    parameters = registry.parameters(name)
    key = f"{registry.key}_options"
    for option, value in given.items():
        if option in keys:
            section = registry.key.rpartition(".")[0]
            raise ConfigError(
                f"{key}.{option}",
                f"expected it as {section}.{option}",
                why="it has a key of its own",
                remedy=f"set {section}.{option}: {value}",
            )
        if option not in parameters and not any(p.startswith("**") for p in parameters):
            options = sorted(set(parameters) - set(keys))
            raise ConfigError(
                f"{key}.{option}",
                f"{registry.kind} {name} has no such option",
                why=f"its options are {', '.join(options)}" if options else "it has no options",
                remedy=near_matches(option, options) if options else "leave it out",
            )
        if option in parameters:
            _check_value(registry, name, option, value)
    registry.missing_options(name, [*given, *keys])


def _check_value(registry: FunctionRegistry[Any], name: str, option: str, value: Any) -> None:
    """Raise ``ConfigError`` for a value that is not of the parameter's annotated type."""
    hint = _hint(registry.function(name), option)
    if hint is None:
        return
    try:
        bind_value(hint, value, f"{registry.key}_options.{option}")
    except TypeError:
        # The annotation is of a kind that no file can hold: the function has to judge the value.
        return


def _hint(function: Any, option: str) -> Any:
    """Return the annotation of a parameter, or None without one that can be resolved here."""
    try:
        return get_type_hints(function).get(option)
    # An annotation may name a module that is imported for type checkers only.
    except (NameError, AttributeError, TypeError):
        return None

"""The options of a plug-in, and the capabilities of an engine with those that a run gives it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from engine_api.capabilities import Capability
from engine_api.config import build_options
from engine_api.discovery import import_target
from engine_api.plugin import EnginePlugin


def find_capabilities(plugin: EnginePlugin, source: str, options: Any) -> frozenset[Capability]:
    """Return what an engine declares, but for what its options exclude.

    The class of the options may have a property ``excluded``, a set of capabilities.

    Args:
        plugin: the engine's descriptor.
        source: the package that it comes from, for an error.
        options: the engine's own options.

    Raises ``ConfigError`` for an unknown option, and ``PluginLoadError``.
    """
    if plugin.options is None:
        return plugin.capabilities
    built = build_options(options, import_target(plugin.options, source))
    return plugin.capabilities - getattr(built, "excluded", frozenset())


def list_options(plugin: EnginePlugin, source: str) -> set[str]:
    """Return the names of a plug-in's own options, none without a dataclass of them.

    ``source`` names the plug-in in the ``PluginLoadError`` of a dataclass that is not importable.
    """
    if plugin.options is None:
        return set()
    return {one.name for one in fields(import_target(plugin.options, source))}

"""Capabilities of an engine with the options that a run gives it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine_api.capabilities import Capability
from engine_api.errors import ConfigError
from engine_api.plugin import EnginePlugin
from engine_trainer.config.loading import from_tree
from engine_trainer.config.sections import EngineSection
from engine_trainer.placement import spmd
from engine_trainer.utils.plugins import find_capabilities


@dataclass(frozen=True, kw_only=True)
class Options:
    fused: bool = False

    @property
    def excluded(self) -> frozenset[Capability]:
        return frozenset({Capability.COMPILE}) if self.fused else frozenset()


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> EnginePlugin:
    module: Any = ModuleType("engine_with_options")
    module.Options = Options
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return EnginePlugin(
        name="engine-with-options",
        contract="1.4",
        rows=(),
        capabilities=frozenset({Capability.DP, Capability.COMPILE}),
        options="engine_with_options:Options",
    )


def test_what_options_exclude_is_not_declared(plugin: EnginePlugin) -> None:
    for options in (None, {}, {"fused": False}):
        assert find_capabilities(plugin, "here", options) == plugin.capabilities
    assert find_capabilities(plugin, "here", {"fused": True}) == {Capability.DP}


def test_an_engine_without_options_or_exclusions_declares_the_same(plugin: EnginePlugin) -> None:
    plain = replace(plugin, options=None)
    assert find_capabilities(plain, "here", {"fused": True}) == plugin.capabilities
    module: Any = sys.modules["engine_with_options"]
    module.Options = dataclass(type("Options", (), {}))
    assert find_capabilities(plugin, "here", {}) == plugin.capabilities


def test_an_unknown_option_is_refused(plugin: EnginePlugin) -> None:
    with pytest.raises(ConfigError, match="unknown key") as caught:
        find_capabilities(plugin, "here", {"fusde": True})
    assert caught.value.field == "options.fusde"


def test_a_launcher_answers_what_is_left_with_the_options_of_a_run(
    plugin: EnginePlugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(device="cpu", source="here", plugin=plugin)
    monkeypatch.setattr(spmd, "_resolve", lambda _: found)
    section = from_tree(EngineSection, {"model": {"path": "any"}, "options": {"fused": True}})
    launcher = spmd.Spmd()
    assert launcher.resolve(section) == ("cpu", {Capability.DP})

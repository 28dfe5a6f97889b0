"""The probe's answers, and what the engine refuses before anything is built."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from engine_api import EngineConfig, EngineRegistry, ModelSource, Parallelism
from engine_api.capabilities import MECHANISMS, Capability
from engine_api.config import build_options
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_fsdp.plugin import PLUGIN as FSDP
from engine_npu.plugin import FSDP as NPU_FSDP
from engine_veomni import plugin


def state_version(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Let the metadata name a version of VeOmni, or none."""
    actual = importlib.metadata.version

    def answer(name: str) -> str:
        if name != "veomni":
            return actual(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", answer)


def test_without_veomni_the_probe_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state_version(monkeypatch, None)
    answer = plugin.probe("cpu")
    assert (answer.ok, answer.reason) == (False, "veomni is not installed")
    assert answer.remedy == "pip install 'engine-veomni[core]'"


@pytest.mark.parametrize("version", ["0.1.11", "0.1.13", "0.1.12.post1", "0.2.0"])
def test_another_version_of_veomni_is_refused_with_the_tested_one(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    state_version(monkeypatch, version)
    for device in ("cuda", "cpu", "npu"):
        answer = plugin.probe(device)
        assert answer.reason == f"expected veomni 0.1.12, got {version}, which is not tested"
        assert answer.remedy == "pip install 'engine-veomni[core]'"


def test_the_tested_version_runs_on_a_cpu_and_on_no_unknown_device() -> None:
    assert plugin.probe("cpu").ok
    answer = plugin.probe("tpu")
    assert (answer.ok, answer.reason) == (False, "no support for tpu")


def test_without_engine_npu_an_npu_is_refused_with_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from engine_api import devices

    monkeypatch.setattr(devices, "_DEVICES", {"cpu": devices.device_of("cpu")})
    monkeypatch.setattr(devices, "discover", lambda _: [])
    answer = plugin.probe("npu")
    assert (answer.ok, answer.remedy) == (False, "pip install engine-npu")


def test_it_declares_what_engine_fsdp_has_but_videos_and_untested_mechanisms() -> None:
    untested = MECHANISMS - {Capability.SAVED_BUFFERS, Capability.SINKS}
    lacks = untested | {Capability.VIDEO}
    assert lacks == FSDP.capabilities - plugin.PLUGIN.capabilities
    assert plugin.PLUGIN.capabilities < FSDP.capabilities
    assert plugin.PLUGIN.one_layout


def test_on_an_npu_it_declares_what_engine_npu_has_but_sinks() -> None:
    both = plugin.PLUGIN.capabilities & NPU_FSDP.capabilities
    assert plugin.NPU.capabilities == both - {Capability.SINKS}
    served = {device for row in plugin.PLUGIN.rows for device in row.devices}
    assert served == {"cuda", "cpu"}
    assert {device for row in plugin.NPU.rows for device in row.devices} == {"npu"}
    assert plugin.NPU.one_layout


@pytest.mark.parametrize(
    ("asked", "capability"),
    [
        ({"parallelism": Parallelism(tp=2)}, "tp"),
        ({"parallelism": Parallelism(pp=2)}, "pp"),
        ({"parallelism": Parallelism(cp=2)}, "cp"),
    ],
)
def test_what_is_not_declared_is_refused_by_name(asked: dict[str, Any], capability: str) -> None:
    config = EngineConfig(model=ModelSource(path="any"), **asked)
    with pytest.raises(UnsupportedCapability, match=rf"\b{capability}\b"):
        EngineRegistry.create(backend="veomni", device="cpu", config=config)


@pytest.mark.parametrize("option", ["float8_recipe", "float8_emulate", "compile_mode"])
def test_options_of_what_an_npu_lacks_are_unknown_there(option: str) -> None:
    module, _, name = plugin.NPU.options.partition(":")
    with pytest.raises(ConfigError, match=f"{option}.*unknown key"):
        build_options({option: "any"}, getattr(importlib.import_module(module), name))


def test_an_unknown_option_is_refused_with_the_near_ones(tmp_path: Path) -> None:
    config = EngineConfig(model=ModelSource(path=str(tmp_path)), options={"rms_nrm": "eager"})
    with pytest.raises(ConfigError, match="rms_nrm") as caught:
        EngineRegistry.create(backend="veomni", device="cpu", config=config)
    assert "rms_norm" in caught.value.remedy

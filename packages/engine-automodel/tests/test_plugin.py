"""The probe's answers, and what the engine refuses before anything is built."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from engine_api import EngineConfig, EngineRegistry, ModelSource, Parallelism
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_automodel import plugin
from engine_automodel.options import AutomodelOptions


def state_version(monkeypatch: pytest.MonkeyPatch, distribution: str, version: str | None) -> None:
    """Let the metadata name a version of a distribution, or none."""
    actual = importlib.metadata.version

    def answer(name: str) -> str:
        if name != distribution:
            return actual(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", answer)


@pytest.mark.parametrize(
    ("distribution", "remedy"),
    [
        ("nemo-automodel", "pip install 'engine-automodel[core]'"),
        ("transformers", "pip install 'transformers>=5.18,<5.24'"),
    ],
)
def test_without_a_package_the_probe_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, distribution: str, remedy: str
) -> None:
    state_version(monkeypatch, distribution, None)
    answer = plugin.probe("cpu")
    assert (answer.ok, answer.reason) == (False, f"{distribution} is not installed")
    assert answer.remedy == remedy


@pytest.mark.parametrize("version", ["0.6.2", "0.7.1", "0.7.0.post1", "1.0"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_another_version_of_automodel_is_refused_with_the_tested_one(
    monkeypatch: pytest.MonkeyPatch, version: str, device: str
) -> None:
    state_version(monkeypatch, "nemo-automodel", version)
    answer = plugin.probe(device)
    assert answer.reason == f"expected nemo-automodel 0.7.0, got {version}, which is not tested"
    assert answer.remedy == "pip install 'engine-automodel[core]'"


@pytest.mark.parametrize("version", ["5.17.0", "4.57.3"])
def test_an_older_transformers_is_refused_with_the_least_one(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    state_version(monkeypatch, "transformers", version)
    answer = plugin.probe("cpu")
    assert answer.reason == f"nemo-automodel 0.7.0 needs transformers 5.18 or later, got {version}"
    assert answer.remedy == "pip install 'transformers>=5.18,<5.24'"


def test_the_tested_version_runs_on_a_cpu_and_on_no_unknown_device() -> None:
    assert plugin.probe("cpu").ok
    answer = plugin.probe("tpu")
    assert (answer.ok, answer.reason) == (False, "no support for tpu")


@pytest.mark.parametrize(
    ("asked", "capability"),
    [
        ({"parallelism": Parallelism(pp=2)}, "pp"),
        ({"parallelism": Parallelism(ulysses=2)}, "ulysses"),
        ({"router_replay": True}, "router_replay"),
    ],
)
def test_what_is_not_declared_is_refused_by_name(asked: dict[str, Any], capability: str) -> None:
    config = EngineConfig(model=ModelSource(path="any"), **asked)
    with pytest.raises(UnsupportedCapability, match=rf"\b{capability}\b"):
        EngineRegistry.create(backend="automodel", device="cpu", config=config)


def test_an_unknown_way_to_compute_experts_is_refused(tmp_path: Path) -> None:
    config = EngineConfig(model=ModelSource(path=str(tmp_path)), options={"experts": "deepep"})
    with pytest.raises(ConfigError, match="expected auto or loop or grouped") as caught:
        EngineRegistry.create(backend="automodel", device="cpu", config=config)
    assert caught.value.field == "options.experts"


@pytest.mark.parametrize(
    ("asked", "compute", "chosen"),
    [
        ("auto", "float32", "loop"),
        ("auto", "bfloat16", "grouped"),
        ("loop", "bfloat16", "loop"),
        ("grouped", "float32", "grouped"),
    ],
)
def test_experts_are_computed_by_the_dtype_unless_asked_for(
    asked: str, compute: str, chosen: str
) -> None:
    assert AutomodelOptions(experts=asked).choose_experts(compute) == chosen


def test_an_unknown_option_is_refused_with_the_near_ones(tmp_path: Path) -> None:
    config = EngineConfig(model=ModelSource(path=str(tmp_path)), options={"prefetch_block": 2})
    with pytest.raises(ConfigError, match="prefetch_block") as caught:
        EngineRegistry.create(backend="automodel", device="cpu", config=config)
    assert "prefetch_blocks" in caught.value.remedy

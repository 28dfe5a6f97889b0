"""The probe's answers, and what the engine refuses before anything is built."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from engine_api import EngineConfig, EngineRegistry, ModelSource, Parallelism, Precision
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_torchtitan import plugin


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


def test_without_torchtitan_the_probe_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state_version(monkeypatch, "torchtitan", None)
    answer = plugin.probe("cpu")
    assert (answer.ok, answer.reason) == (False, "torchtitan is not installed")
    assert answer.remedy == "pip install 'engine-torchtitan[core]'"


@pytest.mark.parametrize("version", ["0.2.2", "0.3.1", "0.3.0.post1", "1.0"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_another_version_of_torchtitan_is_refused_with_the_tested_one(
    monkeypatch: pytest.MonkeyPatch, version: str, device: str
) -> None:
    state_version(monkeypatch, "torchtitan", version)
    answer = plugin.probe(device)
    assert answer.reason == f"expected torchtitan 0.3.0, got {version}, which is not tested"
    assert answer.remedy == "pip install 'engine-torchtitan[core]'"


@pytest.mark.parametrize("version", ["2.10.0+cu128", "2.9.1", "1.13.1"])
def test_an_older_torch_is_refused_with_the_least_one(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    state_version(monkeypatch, "torch", version)
    answer = plugin.probe("cpu")
    assert answer.reason == f"torchtitan 0.3.0 needs torch 2.11 or later, got {version}"
    assert answer.remedy == "pip install 'torch>=2.11'"


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.0+cpu", "2.14.1", "3.0.0a0"])
def test_a_torch_that_is_new_enough_is_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    state_version(monkeypatch, "torch", version)
    assert plugin.find_problem() is None


def test_the_tested_version_runs_on_a_cpu_and_on_no_unknown_device() -> None:
    assert plugin.probe("cpu").ok
    answer = plugin.probe("tpu")
    assert (answer.ok, answer.reason) == (False, "no support for tpu")


@pytest.mark.parametrize(
    ("asked", "capability"),
    [
        ({"parallelism": Parallelism(ulysses=2)}, "ulysses"),
        ({"precision": Precision(compute="float8")}, "fp8"),
    ],
)
def test_what_is_not_declared_is_refused_by_name(asked: dict[str, Any], capability: str) -> None:
    config = EngineConfig(model=ModelSource(path="any"), **asked)
    with pytest.raises(UnsupportedCapability, match=rf"\b{capability}\b"):
        EngineRegistry.create(backend="torchtitan", device="cpu", config=config)


def test_an_unknown_option_is_refused_with_the_near_ones(tmp_path: Path) -> None:
    config = EngineConfig(
        model=ModelSource(path=str(tmp_path)), options={"sequence_paralel": False}
    )
    with pytest.raises(ConfigError, match="sequence_paralel") as caught:
        EngineRegistry.create(backend="torchtitan", device="cpu", config=config)
    assert "sequence_parallel" in caught.value.remedy

"""FP8 in matrix products: what is refused by name, its options, padding and compilation.

Tests with torchao itself are engine-fsdp's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_api import EngineConfig, ModelSource, Precision
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_torch import float8, versions
from engine_torch.options import Float8Options


def ask(**precision: Any) -> EngineConfig:
    return EngineConfig(model=ModelSource(path="any"), precision=Precision(**precision))


def refuse(config: EngineConfig, device: str = "cuda", *, emulate: bool = False) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        float8.check_float8(config, device, emulate=emulate)
    return caught.value


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("name", ["master", "reduce"])
def test_float8_is_no_precision_of_weights_or_of_their_gradients(name: str, emulate: bool) -> None:
    error = refuse(ask(**{name: "float8"}), emulate=emulate)
    assert error.field == f"precision.{name}"
    assert error.what == "expected another dtype, got float8"


def test_a_device_without_products_of_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "(cpu)" in refuse(ask(compute="float8"), "cpu").what
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "compute capability 8.9" in refuse(ask(compute="float8")).why


def test_a_device_with_products_of_float8_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    float8.check_float8(ask(compute="float8"), "cuda", emulate=False)


def test_emulated_products_need_no_device_of_their_own() -> None:
    float8.check_float8(ask(compute="float8"), "cpu", emulate=True)


@pytest.mark.parametrize("found", [None, "0.9.0"])
def test_torchao_that_is_absent_or_untested_is_named_with_its_installation(
    monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    def version(name: str) -> str:
        if found is None:
            raise versions_of.PackageNotFoundError(name)
        return found

    from engine_api import devices

    versions_of = devices.importlib.metadata
    monkeypatch.setattr(versions_of, "version", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert not versions.has_torchao()
    for device, emulate in (("cuda", False), ("cpu", True)):
        with pytest.raises(UnsupportedCapability, match=found or "not installed") as caught:
            demand_torchao("float8", device, emulate=emulate)
        assert caught.value.capability == "fp8"
        assert caught.value.remedy == "pip install it, or compute in bfloat16"
    demand_torchao("bfloat16", "cpu", emulate=False)


def test_a_device_without_float8_is_named_before_the_torchao_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(float8, "find_torchao_problem", lambda: "torchao is not installed")
    with pytest.raises(UnsupportedCapability) as caught:
        demand_torchao("float8", "cpu", emulate=False)
    assert caught.value.why.startswith("products of FP8 need CUDA's compute capability 8.9")
    assert "this device is cpu; torchao is not installed" in caught.value.why
    assert caught.value.remedy.startswith("use an Ada, Hopper or newer GPU with torchao (pip")


@pytest.mark.parametrize(("device", "emulate"), [("cuda", False), ("cpu", True)])
def test_the_tested_torchao_is_taken(
    monkeypatch: pytest.MonkeyPatch, device: str, emulate: bool
) -> None:
    from engine_api import devices

    monkeypatch.setattr(devices.importlib.metadata, "version", lambda _: versions.TESTED_TORCHAO)
    assert versions.has_torchao()
    demand_torchao("float8", device, emulate=emulate)


def demand_torchao(compute: str, device: str, *, emulate: bool) -> None:
    asked = ask(compute=compute)
    float8.refuse_without_torchao(asked, device, "an engine", "pip install it", emulate=emulate)


def test_sides_that_float8_does_not_take_are_refused_by_layer() -> None:
    float8.check_sides("a", 16, 4096)
    with pytest.raises(ConfigError, match=r"layers\.3\.up of 64 x 120, got float8"):
        float8.check_sides("layers.3.up", 64, 120)


@pytest.mark.parametrize(("multiple", "rounded"), [(1, 16), (16, 16), (24, 48), (128, 128)])
def test_a_ranks_tokens_are_padded_to_what_float8_takes(multiple: int, rounded: int) -> None:
    assert float8.round_up(multiple) == rounded


def test_an_unknown_recipe_is_refused_with_the_near_ones() -> None:
    with pytest.raises(ConfigError, match="got 'rowise'") as caught:
        Float8Options(float8_recipe="rowise")
    assert "rowwise" in caught.value.remedy

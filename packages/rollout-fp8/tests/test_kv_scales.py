"""Scales of an FP8 cache and its refusals, on stand-ins for layers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_api.errors import ConfigError, RolloutError
from rollout_fp8.fp8 import kv_scales
from rollout_fp8.fp8.kv_scales import KINDS, NEUTRAL, CacheScales, fixed_tokens, scale_of
from rollout_fp8.vllm import cache


class _Layer:
    """Layer that runs on given queries, keys and values."""

    def __init__(self) -> None:
        self.scales = dict.fromkeys(KINDS, 1.0)
        self._note: Callable[[str, Tensor], None] | None = None

    def observe(self, note: Callable[[str, Tensor], None]) -> None:
        self._note = note

    def forget(self) -> None:
        self._note = None

    def set_scale(self, kind: str, scale: float) -> None:
        self.scales[kind] = scale

    @property
    def observed(self) -> bool:
        return self._note is not None

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if self._note is not None:
            for kind, numbers in zip(KINDS, (query, key, value), strict=True):
                self._note(kind, numbers)


def rows(*largest: float) -> Tensor:
    return torch.tensor([[[number, -0.5]] for number in largest])


def test_a_scale_is_a_power_of_two_that_leaves_room_for_larger_numbers() -> None:
    for largest in (1e-6, 0.3, 1.0, 224.0, 225.0, 1e5):
        scale = scale_of(largest)
        assert torch.frexp(torch.tensor(scale)).mantissa == 0.5
        assert 2.0 <= 448 / (largest / scale) < 4.0
    assert scale_of(0.0) == 1.0


def test_the_tokens_are_the_same_at_every_sync_and_fit_the_model() -> None:
    tokens = fixed_tokens(1000, 4096)
    assert tokens == fixed_tokens(1000, 4096)
    assert len(tokens) == kv_scales.TOKENS
    assert 0 <= min(tokens) <= max(tokens) < 1000
    assert len(fixed_tokens(1000, 64)) == 63


def test_scales_follow_the_largest_numbers_of_all_passes() -> None:
    layer = _Layer()
    scales = CacheScales({"layer": layer})
    scales.observe()
    assert set(layer.scales.values()) == {NEUTRAL}
    for numbers in (rows(1.0, -3.0), rows(2.0)):
        layer.run(numbers, numbers * 10, numbers * 100)
    found = scales.compute(3)
    assert found == {f"layer.{kind}": scale_of(3.0 * 10**i) for i, kind in enumerate(KINDS)}
    assert list(layer.scales.values()) == list(found.values())
    assert not layer.observed


def test_the_scales_depend_on_no_earlier_ones() -> None:
    layer = _Layer()
    scales = CacheScales({"layer": layer})
    found: list[dict[str, float]] = []
    for factor in (1.0, 1000.0, 1.0):
        scales.observe()
        numbers = rows(1.0, 2.0, 3.0) * factor
        layer.run(numbers, numbers, numbers)
        found.append(scales.compute(3))
    assert found[0] == found[2] != found[1]


def test_a_layer_that_computed_other_tokens_is_refused_by_name() -> None:
    seen = _Layer()
    scales = CacheScales({"seen": seen, "unseen": _Layer()})
    scales.observe()
    numbers = rows(1.0, 2.0, 3.0)
    seen.run(numbers, numbers, numbers)
    with pytest.raises(RolloutError, match="expected 3 tokens in unseen, got 0") as caught:
        scales.compute(3)
    assert "kv_cache_dtype=auto" in caught.value.remedy
    assert not seen.observed


def test_numbers_that_are_not_finite_are_refused_by_name() -> None:
    layer = _Layer()
    scales = CacheScales({"layer": layer})
    scales.observe()
    numbers = rows(1.0, float("nan"), 3.0)
    layer.run(numbers, numbers, numbers)
    with pytest.raises(RolloutError, match="expected finite numbers in layer, got nan in q"):
        scales.compute(3)


def model_config(**values: Any) -> Any:
    given = dict.fromkeys(("is_attention_free", "use_mla", "is_hybrid", "has_inner_state"), False)
    own_class = values.pop("own_class", True)
    return SimpleNamespace(
        **given | values,
        architectures=["SomeForCausalLM"],
        using_transformers_backend=lambda: not own_class,
    )


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"is_attention_free": True, "has_inner_state": True}, "no attention"),
        ({"use_mla": True}, "latent attention"),
        ({"is_hybrid": True}, "linear attention"),
        ({"own_class": False}, "no class of its own"),
    ],
)
def test_a_model_without_such_a_cache_is_refused_by_name(values: dict[str, bool], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cache.check_model(model_config(**values), has_vision=False)
    assert "SomeForCausalLM" in str(caught.value)
    assert why in caught.value.why
    assert "kv_cache_dtype=auto" in caught.value.remedy


def test_images_are_refused_and_a_plain_model_is_not() -> None:
    with pytest.raises(ConfigError, match="images"):
        cache.check_model(model_config(), has_vision=True)
    cache.check_model(model_config(), has_vision=False)


@pytest.mark.parametrize(("capability", "fits"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_without_e4m3_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fits: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    device = torch.device("cuda", 0)
    if fits:
        cache.check_device(device)
        return
    with pytest.raises(RolloutError, match=r"8\.9, cuda:0 has 8\.0"):
        cache.check_device(device)


def test_a_cpu_without_kernels_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_FLAGS", ("no_cpu_has_it",))
    with pytest.raises(RolloutError, match="AVX-512") as caught:
        cache.check_device(torch.device("cpu"))
    assert "kv_cache_dtype=auto" in caught.value.remedy


def test_layers_whose_scales_cannot_be_set_are_named() -> None:
    def layer(backend: str, shared: str | None = None) -> Any:
        return SimpleNamespace(
            attn_backend=SimpleNamespace(get_name=lambda: backend),
            kv_sharing_target_layer_name=shared,
        )

    assert cache.refusals({"a": layer("FLASH_ATTN"), "b": layer("TRITON_ATTN")}) == []
    assert "no layer" in cache.refusals({})[0]
    found = cache.refusals({"a": layer("FLASHINFER"), "b": layer("FLASH_ATTN", "a")})
    assert "a is computed by FLASHINFER" in found[0]
    assert "b reads the cache of a" in found[1]
    with pytest.raises(RolloutError, match="FLASHINFER"):
        cache.require_served(found)
    cache.require_served([])

"""Scales of vLLM's attention layers, on stand-ins that have their attributes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rollout_fp8.fp8.kv_scales import KINDS, NEUTRAL, CacheScales, scale_of
from rollout_fp8.vllm.private import CachedAttention

METADATA = SimpleNamespace(num_actual_tokens=3)


class _Impl:
    """Computation of a layer, which returns its queries."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any = None,
    ) -> Tensor:
        del layer, key, value, kv_cache, attn_metadata, output
        return query


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for kind in KINDS:
            self.register_buffer(f"_{kind}_scale", torch.tensor(1.0))
        # vLLM has it for keys and values alone.
        self._k_scale_cpu = torch.tensor(1.0)
        self.impl = _Impl()

    def run(self, query: Tensor, key: Tensor, value: Tensor, metadata: Any = METADATA) -> Tensor:
        return self.impl.forward(self, query, key, value, None, metadata, output=None)


def scales_of(layer: _Layer) -> list[float]:
    return [float(getattr(layer, f"_{kind}_scale")) for kind in KINDS]


def test_padding_and_passes_without_tokens_count_in_no_scale() -> None:
    layer = _Layer()
    places = [getattr(layer, f"_{kind}_scale").data_ptr() for kind in KINDS]
    scales = CacheScales({"layer": CachedAttention(layer)})
    scales.observe()
    assert scales_of(layer) == [NEUTRAL] * 3
    padded = torch.tensor([[1.0], [2.0], [-3.0], [999.0]])
    assert layer.run(padded, padded * 10, padded * 100) is padded
    layer.run(padded * 1e6, padded * 1e6, padded * 1e6, None)
    found = scales.compute(3)
    assert found == {f"layer.{kind}": scale_of(3.0 * 10**i) for i, kind in enumerate(KINDS)}
    assert scales_of(layer) == list(found.values())
    assert layer._k_scale_float == float(layer._k_scale_cpu) == found["layer.k"]
    # CUDA graphs read them there.
    assert [getattr(layer, f"_{kind}_scale").data_ptr() for kind in KINDS] == places
    assert "forward" not in vars(layer.impl)


def test_quantized_queries_count_with_their_scale() -> None:
    layer = _Layer()
    scales = CacheScales({"layer": CachedAttention(layer)})
    scales.observe()
    queries = torch.tensor([[1.0], [2.0], [1000.0]])
    layer.run((queries / NEUTRAL).to(torch.float8_e4m3fn), queries, queries)
    assert scales.compute(3)["layer.q"] == scale_of(1000.0)

"""Sources of a plan, by the boxes that an engine's ranks hold."""

from __future__ import annotations

import torch

from engine_api.weights import ShardSpec
from rollout_fp8.export.plan import Source


def rows(shape: tuple[int, int], world: int, chunk: int | None = None) -> tuple[ShardSpec, ...]:
    """Return FSDP2's boxes: equal rows, of which the last ranks may hold fewer or none."""
    size = chunk or -(-shape[0] // world)
    parts = [(min(r * size, shape[0]), min((r + 1) * size, shape[0])) for r in range(world)]
    return tuple(
        ShardSpec(global_shape=shape, offset=(a if b > a else 0, 0), shape=(b - a, shape[1]))
        for a, b in parts
    )


def source(name: str, boxes: tuple[ShardSpec, ...], *, quantized: bool = True) -> Source:
    return Source(name=name, boxes=boxes, stored=torch.float32, quantized=quantized)

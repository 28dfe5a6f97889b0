"""How long the phases of a sync take: device events where there are streams, so that measuring waits for nothing; a clock elsewhere."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from engine_api.devices import device_of


class Phases:
    """Times by name, each the sum over its uses. Phases on different streams may overlap."""

    def __init__(self, device: torch.device) -> None:
        kind = device_of(device.type)
        self._module: Any = kind.module if kind.has_streams else None
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the work that is queued inside on the current stream."""
        if self._module is None:
            begin = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - begin
            return
        first, last = self._module.Event(enable_timing=True), self._module.Event(enable_timing=True)
        first.record()
        yield
        last.record()
        self._spans[name].append((first, last))

    def seconds(self) -> Mapping[str, float]:
        """By phase; waits until the device is through with them."""
        found = dict(self._seconds)
        for name, spans in self._spans.items():
            spans[-1][1].synchronize()
            found[name] = found.get(name, 0.0) + sum(a.elapsed_time(b) for a, b in spans) / 1e3
        return found

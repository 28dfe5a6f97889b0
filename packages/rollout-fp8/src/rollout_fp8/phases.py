"""Durations of the phases of a sync.

They are device events where there are streams, so that measuring waits for nothing, and clock times
where there are none.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from engine_api.devices import device_of


class Phases:
    """Durations by name, each the sum over its uses. Phases on different streams may overlap."""

    def __init__(self, device: torch.device) -> None:
        kind = device_of(device.type)
        self._module: Any = kind.module if kind.has_streams else None
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the work that is queued inside the context on the current stream."""
        if self._module is None:
            begin = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - begin
            return
        first = self._module.Event(enable_timing=True)
        last = self._module.Event(enable_timing=True)
        first.record()
        yield
        last.record()
        self._spans[name].append((first, last))

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of each phase, after waiting for the device to finish them."""
        found = dict(self._seconds)
        for name, spans in self._spans.items():
            for _, last in spans:
                # They may lie on different streams.
                last.synchronize()
            found[name] = found.get(name, 0.0) + sum(a.elapsed_time(b) for a, b in spans) / 1e3
        return found

"""How long the phases of a sync take: device events on CUDA, so that measuring waits for nothing; a clock elsewhere."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


class Phases:
    """Times by name, each the sum over its uses. Phases on different streams may overlap."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the work that is queued inside on the current stream."""
        if not self._cuda:
            begin = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - begin
            return
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
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

"""The time that each worker worked, and the time that it waited."""

from __future__ import annotations

import threading
import time


class Meter:
    """Seconds per worker and method since the last ``take``."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[str, float]] = {}
        self._since = time.monotonic()
        self._lock = threading.Lock()  # generation may run during training

    def add(self, worker: str) -> None:
        """Add a worker, which is idle from now on."""
        with self._lock:
            self._seconds.setdefault(worker, {})

    def note(self, worker: str, method: str, seconds: float) -> None:
        """Record ``seconds`` that a worker spent in ``method``."""
        with self._lock:
            spent = self._seconds[worker]
            spent[method] = spent.get(method, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return ``worker/<name>/<method>_s`` and ``worker/<name>/idle`` since the last call.

        ``idle`` is a fraction of the time, 0 to 1; ``worker/idle`` is its mean over workers.
        """
        with self._lock:
            now = time.monotonic()
            wall = max(now - self._since, 1e-9)
            self._since = now
            taken = self._seconds
            self._seconds = {name: {} for name in taken}
        idle = {name: max(0.0, 1.0 - sum(spent.values()) / wall) for name, spent in taken.items()}
        figures = {f"worker/{n}/{m}_s": s for n, spent in taken.items() for m, s in spent.items()}
        figures |= {f"worker/{name}/idle": fraction for name, fraction in idle.items()}
        if idle:
            figures["worker/idle"] = sum(idle.values()) / len(idle)
        return figures

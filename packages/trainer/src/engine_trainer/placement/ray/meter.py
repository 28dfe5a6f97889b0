"""How long each worker worked, and how long it waited."""

from __future__ import annotations

import threading
import time


class Meter:
    """Seconds a worker and method since the last ``take``."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[str, float]] = {}
        self._since = time.monotonic()
        self._lock = threading.Lock()  # generation may run beside training

    def add(self, worker: str) -> None:
        """A worker that is idle from now on."""
        with self._lock:
            self._seconds.setdefault(worker, {})

    def note(self, worker: str, method: str, seconds: float) -> None:
        """It spent ``seconds`` in ``method``."""
        with self._lock:
            spent = self._seconds[worker]
            spent[method] = spent.get(method, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """``worker/<name>/<method>_s``, ``worker/<name>/idle`` (share of the time, 0 to 1), and the mean of it, ``worker/idle``."""
        with self._lock:
            now = time.monotonic()
            wall, self._since = max(now - self._since, 1e-9), now
            taken, self._seconds = self._seconds, {name: {} for name in self._seconds}
        idle = {name: max(0.0, 1.0 - sum(spent.values()) / wall) for name, spent in taken.items()}
        figures = {f"worker/{n}/{m}_s": s for n, spent in taken.items() for m, s in spent.items()}
        figures |= {f"worker/{name}/idle": share for name, share in idle.items()}
        return figures | ({"worker/idle": sum(idle.values()) / len(idle)} if idle else {})

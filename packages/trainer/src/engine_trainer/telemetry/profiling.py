"""A trace of torch's profiler a process, for chosen steps (``run.profile_steps``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Trace:
    """What one process does between ``begin`` and ``end``; both in the same thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._profiler: Any = None
        self._folder = Path()

    def begin(self, folder: Path) -> None:
        """Record from now on; ``end`` writes ``folder/<name>.json.gz``, for Perfetto or chrome://tracing."""
        from torch.profiler import ProfilerActivity, profile, supported_activities

        wanted = supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA}
        self._folder, self._profiler = folder, profile(activities=sorted(wanted, key=str))
        self._profiler.__enter__()

    def end(self) -> None:
        """Idempotent."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.__exit__(None, None, None)
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._folder / f"{self._name}.json.gz"))

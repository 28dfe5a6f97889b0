"""Traces of torch's profiler, one for each process, of chosen steps (``run.profile_steps``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Trace:
    """A trace of one process between ``begin`` and ``end``, which the same thread must call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._profiler: Any = None
        self._folder = Path()

    def begin(self, folder: Path) -> None:
        """Start recording.

        ``end`` writes ``folder/<name>.json.gz``, which Perfetto and chrome://tracing read.
        """
        from torch.profiler import ProfilerActivity, profile, supported_activities

        wanted = supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA}
        self._folder, self._profiler = folder, profile(activities=sorted(wanted, key=str))
        self._profiler.__enter__()

    def end(self) -> None:
        """Stop recording and write the trace.

        Without ``begin``, or a second time, it does nothing.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.__exit__(None, None, None)
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._folder / f"{self._name}.json.gz"))

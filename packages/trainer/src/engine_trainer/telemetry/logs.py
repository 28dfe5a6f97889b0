"""Logs of a running run (``metrics.jsonl``, TensorBoard, trackers, the progress bar), its clocks.

Names of metrics are grouped by a slash: ``train/loss``, ``eval/accuracy``, ``time/generate``,
``perf/mfu``.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

from engine_api.errors import ConfigError
from engine_api.folders import write_text
from engine_trainer.config.sections import RunSection
from engine_trainer.telemetry.samples import (
    COLUMNS,
    ShownSample,
    code_block,
    markdown,
    terminal_text,
)

METRICS = "metrics.jsonl"
# The figure with the seconds that the run took so far, without interruptions.
ELAPSED = "perf/elapsed_s"
# Seconds between two lines about the progress where there is no terminal.
LINE_S = 10.0
Metrics = Mapping[str, float]


class Timers:
    """Seconds by phase, as in ``with timers.phase("generate"): …``.

    The times of phases with the same name add up.

    Args:
        show: function that is called with the name of each phase that begins; None for none.
    """

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        self._show = show
        self._seconds: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._spent: dict[str, float] = {}
        self._lock = threading.Lock()  # generation may overlap with training

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's wall time under ``name``."""
        if self._show is not None:
            self._show(name)
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - begin)

    def add(self, name: str, seconds: float) -> None:
        """Add a time that was measured elsewhere, such as in a different process."""
        with self._lock:
            self._last[name] = seconds
            for sums in (self._seconds, self._spent):
                sums[name] = sums.get(name, 0.0) + seconds

    def last(self, name: str) -> float:
        """Return the seconds of the newest block of ``name``, 0 without one."""
        return self._last.get(name, 0.0)

    def take_spent(self, name: str) -> float:
        """Return the seconds of all blocks of ``name`` since the last call for that name.

        ``take`` does not change them.
        """
        with self._lock:
            return self._spent.pop(name, 0.0)

    def running(self) -> dict[str, float]:
        """Return the seconds by phase since the last ``take``, and leave the clocks as they are."""
        with self._lock:
            return dict(self._seconds)

    def take(self) -> dict[str, float]:
        """Return ``time/<phase>`` in seconds since the last ``take``, and reset these clocks."""
        with self._lock:
            taken, self._seconds = self._seconds, {}
        return {f"time/{name}": value for name, value in taken.items()}


@dataclass(frozen=True, kw_only=True)
class _Tracker:
    """A run on Weights & Biases, or on trackio, which has the same functions."""

    name: str
    """Name of the package, ``wandb`` or ``trackio``."""
    module: ModuleType
    run: Any

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self.run.log(dict(values), step=step)

    def table(self, samples: Sequence[ShownSample], step: int) -> Any:
        """Return a table of samples.

        trackio takes a text for Markdown.
        """
        rows = [sample.row(step) for sample in samples]
        if self.name == "trackio":
            rows = [[code_block(v) if isinstance(v, str) else v for v in row] for row in rows]
        return self.module.Table(columns=list(COLUMNS), data=rows)


class RunLog:
    """The log of rank 0.

    On other ranks (``active=False``) every call does nothing.
    """

    def __init__(
        self,
        folder: Path,
        section: RunSection,
        *,
        active: bool,
        total_steps: int,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.section, self.active, self.total_steps = (
            folder,
            section,
            active,
            total_steps,
        )
        self._config = dict(config or {})
        self._bar: Any = None
        self._board: Any = None
        self._trackers: list[_Tracker] = []
        self._file: Any = None
        self._begin = 0.0  # of the monotonic clock, such that the run's time is counted from it
        self._last_line_at = -math.inf  # when the last line about the progress was printed
        # A missing package is an error on every rank now, not after the model is loaded.
        self._projects = [
            (name, _import(name), project)
            for name, project in (("wandb", section.wandb), ("trackio", section.trackio))
            if project is not None
        ]

    def describe(self, config: Mapping[str, Any]) -> None:
        """Take the configuration that trackers show, before the logs are opened."""
        self._config = dict(config)

    def open(self, step: int) -> None:
        """Open the logs to continue after ``step``.

        Rows of later steps, which a run that died has left, are removed.
        """
        if not self.active:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        truncate(self.folder / METRICS, step)
        rows = read_metrics(self.folder / METRICS) if (self.folder / METRICS).is_file() else []
        self._begin = time.monotonic() - max((row.get(ELAPSED, 0.0) for row in rows), default=0.0)
        self._file = (self.folder / METRICS).open("a", encoding="utf-8")
        if self.section.tensorboard:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._board = SummaryWriter(
                str(self.folder / "tensorboard"), purge_step=step + 1 if step else 0
            )
        for name, module, project in self._projects:
            self._trackers.append(self._start(name, module, project, step))
        if self.section.progress and sys.stderr.isatty():
            self._bar = tqdm(total=self.total_steps, initial=step, unit="step", dynamic_ncols=True)

    def write(self, step: int, metrics: Metrics) -> None:
        """Write one row ``{"step": …, "time": unix seconds, name: value, …}``.

        A value that is not finite is written as null. The row also has the seconds that the run
        took so far (``ELAPSED``).
        """
        if self._file is None:
            return
        row = {"step": step, "time": round(time.time(), 3)}
        row[ELAPSED] = round(time.monotonic() - self._begin, 3)
        row |= {name: float(v) if math.isfinite(v) else None for name, v in metrics.items()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def show_samples(self, name: str, step: int, samples: Sequence[ShownSample]) -> None:
        """Print completions of the evaluation ``name``, and add them to TensorBoard and trackers.

        Their name there is ``samples/<name>``.
        """
        if not samples:
            return
        self.say(terminal_text(name, step, samples))
        if self._board is not None:
            self._board.add_text(f"samples/{name}", markdown(samples), step)
        for tracker in self._trackers:
            tracker.log({f"samples/{name}": tracker.table(samples, step)}, step)

    def progress(self, step: int, metrics: Metrics, show: Sequence[str]) -> None:
        """Move the bar to ``step``, or without a terminal print a line every ten seconds.

        ``show`` names the figures that are shown.
        """
        if self._file is None or not self.section.progress:
            return
        figures = {
            name.removeprefix("train/"): f"{metrics[name]:.4g}" for name in show if name in metrics
        }
        if self._bar is not None:
            self._bar.set_postfix(figures, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if step == self.total_steps or now - self._last_line_at >= LINE_S:
            self._last_line_at = now
            shown = "".join(f", {name} {value}" for name, value in figures.items())
            took = format_seconds(now - self._begin)
            sys.stderr.write(f"step {step} of {self.total_steps}, {took}{shown}\n")

    def show_phase(self, name: str) -> None:
        """Show in the bar what the run does."""
        if self._bar is not None:
            self._bar.set_description_str(name)

    def say(self, text: str) -> None:
        """Print a line to the terminal without breaking the progress bar."""
        if self.active:
            tqdm.write(text)

    def close(self) -> None:
        """Flush and close all logs (idempotent)."""
        parts = (self._bar, self._board, self._file)
        trackers = self._trackers
        self._bar = self._board = self._file = None
        self._trackers = []
        for part in parts:
            if part is not None:
                part.close()
        for tracker in trackers:
            tracker.run.finish()

    def _start(self, name: str, module: ModuleType, project: str, step: int) -> _Tracker:
        known = {"project": project, "resume": "allow", "config": self._config}
        # A run that starts again from step 0 is a new run there, too, because wandb drops rows of
        # steps that it already has.
        if name == "trackio":
            # trackio finds a run by its name.
            note = self.folder / "trackio.name"
            run = module.init(**known, name=_noted(note, step))
            write_text(note, run.name)
        else:
            note = self.folder / "wandb.id"
            run = module.init(**known, dir=str(self.folder), id=_noted(note, step))
            write_text(note, run.id)
        return _Tracker(name=name, module=module, run=run)


def _noted(note: Path, step: int) -> str | None:
    return note.read_text().strip() if step and note.is_file() else None


def format_seconds(seconds: float) -> str:
    """Return a time as hours, minutes and seconds, such as 0:01:12."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def truncate(path: Path, step: int) -> int:
    """Remove the rows after ``step`` atomically, and return the number of removed rows.

    For a new run (``step == 0``) all rows are removed.
    """
    if not path.is_file():
        return 0
    text = path.read_text(encoding="utf-8", errors="replace")  # a kill may cut a character in two
    rows = text.splitlines()
    kept = [row for row in rows if step > 0 and _step_of(row) <= step]
    whole = "".join(row + "\n" for row in kept)
    if whole != text:  # true also where a kill cut off only the end of the last line
        write_text(path, whole)
    return len(rows) - len(kept)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a ``metrics.jsonl``.

    A last line that a killed process left incomplete is skipped.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if _step_of(line) < math.inf]


def last_step(path: Path) -> int:
    """Return the step of the last row of a ``metrics.jsonl``, or 0 without a row."""
    rows = read_metrics(path) if path.is_file() else []
    return int(rows[-1]["step"]) if rows else 0


def _step_of(row: str) -> float:
    try:
        return float(json.loads(row)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # a kill cut the row off


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"run.{name}",
            f"{name} is not installed",
            remedy=f"pip install 'engine-trainer[{name}]', or run.{name}: null",
        ) from error

"""The metrics of a run over its steps, read from ``metrics.jsonl``, and a summary as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_trainer.errors import DataError
from engine_trainer.telemetry.logs import ELAPSED, METRICS, format_seconds, read_metrics
from engine_trainer.telemetry.metrics import HEADLINES, LESS_IS_BETTER, matching

PHASE = "time/"
TINY = 1e-9
"""Values up to this size are rounding noise."""
ROUNDING = 1e-6
"""Differences up to this share of the values are rounding noise of float32."""


@dataclass(kw_only=True)
class Series:
    """One metric over the run."""

    name: str
    steps: list[int] = field(default_factory=list[int])
    values: list[float] = field(default_factory=list[float])
    lost: list[int] = field(default_factory=list[int])
    """Steps at which the value was not finite."""

    @property
    def group(self) -> str:
        """Part of the name before the last slash."""
        return self.name.rpartition("/")[0]

    @property
    def is_flat(self) -> bool:
        """True if two values or more differ by rounding noise only, or all are that small."""
        if len(self.values) < 2 or self.lost:
            return False
        low, high = min(self.values), max(self.values)
        largest = max(abs(low), abs(high))
        return largest <= TINY or high - low <= ROUNDING * largest

    @property
    def best(self) -> float:
        """Lowest value of a loss, a norm and the like, else the highest one."""
        less = any(word in self.name for word in LESS_IS_BETTER)
        return min(self.values) if less else max(self.values)


def load_series(path: Path) -> dict[str, Series]:
    """Return every metric of a ``metrics.jsonl`` by name, each with its steps in order.

    Of two values for a step the later one counts. Raises ``DataError`` when the file does not
    exist.
    """
    if not path.is_file():
        raise DataError(
            "there is no metrics file", file=str(path), remedy="name the output_dir of a run"
        )
    found: dict[str, dict[int, float]] = {}
    for row in read_metrics(path):
        for name, value in row.items():
            if name not in ("step", "time", ELAPSED):
                number = math.nan if value is None else float(value)
                found.setdefault(name, {})[int(row["step"])] = number
    return {name: _series(name, values) for name, values in found.items()}


def summary(folder: Path) -> str:
    """Return a text of the run's length and of the first, last and best values of its headlines."""
    rows = read_metrics(folder / METRICS)
    series = load_series(folder / METRICS)
    shown = [series[name] for name in headlines(series)]
    took = duration(rows)
    head = f"{folder}: {count_steps(rows)} steps" + (f", {took}" if took else "")
    lines = (
        [f"  {'':<28}{'first':>12}{'last':>12}{'best':>12}"]
        if shown
        else ["  no metrics were logged"]
    )
    lines += [
        f"  {s.name:<28}{s.values[0]:>12.4g}{s.values[-1]:>12.4g}{s.best:>12.4g}" for s in shown
    ]
    return "\n".join([head, *lines])


def headlines(series: Mapping[str, Series]) -> list[str]:
    """Return the names of the most important metrics that have a value."""
    return [name for name in matching(HEADLINES, series) if series[name].values]


def phases(series: Mapping[str, Series]) -> list[Series]:
    """Return the times of the phases, ordered from the largest total to the smallest."""
    names = [name for name in matching([PHASE + "*"], series) if series[name].values]
    return sorted((series[name] for name in names), key=lambda one: -sum(one.values))


def phase_name(series: Series) -> str:
    """Return the name of a phase, such as ``generate`` for ``time/generate``."""
    return series.name.removeprefix(PHASE)


def count_steps(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the last step of these rows of metrics, 0 without one."""
    return max((int(row["step"]) for row in rows), default=0)


def duration(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the time that the run took, without interruptions.

    It is empty where the time is not known.
    """
    return format_seconds(rows[-1][ELAPSED]) if rows and ELAPSED in rows[-1] else ""


def _series(name: str, values: Mapping[int, float]) -> Series:
    one = Series(name=name)
    for step in sorted(values):
        if math.isfinite(values[step]):
            one.steps.append(step)
            one.values.append(values[step])
        else:
            one.lost.append(step)
    return one

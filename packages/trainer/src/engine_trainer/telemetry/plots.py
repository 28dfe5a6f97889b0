"""Plots of a run's metrics as PNG files, one for each group of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from engine_trainer.telemetry.logs import METRICS
from engine_trainer.telemetry.metrics import matching
from engine_trainer.telemetry.series import Series, headlines, load_series

PHASE = "time/"
COLUMNS = 3


def write_plots(run: Path) -> None:
    """Write ``plots/*.png`` into a run's folder.

    They are an overview, one plot for each group of metrics, and the time by phase. Raises
    ``DataError`` without metrics.
    """
    series = load_series(run / METRICS)
    folder = run / "plots"
    groups = {"overview": headlines(series)}
    for name in sorted(series):
        if series[name].values:
            groups.setdefault(series[name].group, []).append(name)
    folder.mkdir(exist_ok=True)
    for title, names in groups.items():
        if names:
            path = folder / f"{title.replace('/', '-')}.png"
            _plot(path, [series[name] for name in names])
    if found := phases(series):
        _plot_phases(folder / "phases.png", found)


def phases(series: Mapping[str, Series]) -> list[Series]:
    """Return the times of the phases, ordered from the largest total to the smallest."""
    names = [name for name in matching([PHASE + "*"], series) if series[name].values]
    return sorted((series[name] for name in names), key=lambda one: -sum(one.values))


def phase_name(series: Series) -> str:
    """Return the name of a phase, such as ``generate`` for ``time/generate``."""
    return series.name.removeprefix(PHASE)


def _plot(path: Path, series: Sequence[Series]) -> Path:
    # A separate Figure avoids pyplot's global state and its choice of a window system.
    from matplotlib.figure import Figure

    rows = (len(series) + COLUMNS - 1) // COLUMNS
    figure = Figure(figsize=(4.5 * min(COLUMNS, len(series)), 2.8 * rows), layout="constrained")
    for index, one in enumerate(series):
        axes = figure.add_subplot(rows, min(COLUMNS, len(series)), index + 1)
        axes.plot(one.steps, one.values, marker="." if len(one.steps) < 40 else None, linewidth=1.2)
        axes.set_title(one.name, fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=110)
    return path


def _plot_phases(path: Path, phases: Sequence[Series]) -> Path:
    """Plot the seconds of every phase, stacked, at each step.

    Phases inside other phases (those of an evaluation) count twice.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.add_subplot()
    steps = sorted({step for s in phases for step in s.steps})
    rows = [dict(zip(s.steps, s.values, strict=True)) for s in phases]
    axes.stackplot(
        steps,
        [[row.get(step, 0.0) for step in steps] for row in rows],
        labels=[phase_name(s) for s in phases],
    )
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel("seconds", fontsize=8)
    axes.tick_params(labelsize=8)
    figure.legend(fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=110)
    return path

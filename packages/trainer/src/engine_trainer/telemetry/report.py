"""Reports of a run: a summary, plots, and one HTML file, all from ``metrics.jsonl`` alone."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any

from engine_trainer.errors import DataError
from engine_trainer.telemetry.logs import ELAPSED, METRICS, format_seconds, read_metrics

# The most important metrics come first, where a run has them (* stands for any text). All
# metrics are in the plots of their groups.
HEADLINES = (
    "eval/accuracy",
    "eval/*/accuracy",
    "eval/maj@*",
    "eval/*/maj@*",
    "train/reward",
    "train/loss",
    "eval/loss",
    "eval/*/loss",
    "train/grad_norm",
    "mismatch/kl_k3",
    "rollout/staleness",
    "rollout/response_length",
    "perf/tokens_per_s",
    "perf/generated_tokens_per_s",
    "perf/mfu",
)
# A metric is better when it is smaller if its name contains one of these words.
LESS_IS_BETTER = ("loss", "norm", "perplexity", "mismatch", "staleness")
PHASE = "time/"
COLUMNS = 3


@dataclass(kw_only=True)
class Series:
    """One metric over the run."""

    name: str
    steps: list[int] = field(default_factory=list[int])
    values: list[float] = field(default_factory=list[float])

    @property
    def group(self) -> str:
        """Part of the name before the last slash."""
        return self.name.rpartition("/")[0]


def load_series(path: Path) -> dict[str, Series]:
    """Return every metric of a ``metrics.jsonl`` by name.

    Raises ``DataError`` when the file does not exist.
    """
    if not path.is_file():
        raise DataError(
            "there is no metrics file", file=str(path), remedy="name the output_dir of a run"
        )
    series: dict[str, Series] = {}
    for row in read_metrics(path):
        for name, value in row.items():
            if name not in ("step", "time", ELAPSED) and value is not None:
                one = series.setdefault(name, Series(name=name))
                one.steps.append(int(row["step"]))
                one.values.append(float(value))
    return series


def summary(folder: Path) -> str:
    """Return a text of the run's length and of the first, last and best values of its headlines."""
    rows, series = read_metrics(folder / METRICS), load_series(folder / METRICS)
    shown = [series[n] for n in _headlines(series)]
    wall = _duration(rows)
    head = f"{folder}: {max((int(r['step']) for r in rows), default=0)} steps" + (
        f", {wall}" if wall else ""
    )
    lines = (
        [f"  {'':<28}{'first':>12}{'last':>12}{'best':>12}"]
        if shown
        else ["  no metrics were logged"]
    )
    lines += [
        f"  {s.name:<28}{s.values[0]:>12.4g}{s.values[-1]:>12.4g}{_best(s):>12.4g}" for s in shown
    ]
    return "\n".join([head, *lines])


def write_report(folder: Path) -> Path:
    """Write ``plots/*.png`` and ``report.html`` into a run's folder, and return the HTML's path.

    The HTML file contains the plots.
    """
    series = load_series(folder / METRICS)
    plots = {"overview": _headlines(series)}
    for name in sorted(series):
        plots.setdefault(series[name].group, []).append(name)
    (folder / "plots").mkdir(exist_ok=True)
    images = {
        title: _plot(
            folder / "plots" / f"{title.replace('/', '-')}.png", [series[n] for n in names]
        )
        for title, names in plots.items()
        if names
    }
    if phases := _phases(series):
        images = {**images, "phases": _plot_phases(folder / "plots" / "phases.png", phases)}
    page = folder / "report.html"
    page.write_text(_page(folder, series, images), encoding="utf-8")
    return page


def _headlines(series: Mapping[str, Series]) -> list[str]:
    found = (sorted(n for n in series if fnmatchcase(n, pattern)) for pattern in HEADLINES)
    return list(dict.fromkeys(name for names in found for name in names))


def _phases(series: Mapping[str, Series]) -> list[Series]:
    """Return the times of the phases, ordered from the largest total to the smallest."""
    return sorted(
        (s for n, s in series.items() if n.startswith(PHASE)), key=lambda s: -sum(s.values)
    )


def _duration(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the time that the run took, without interruptions."""
    return format_seconds(rows[-1][ELAPSED]) if rows and ELAPSED in rows[-1] else ""


def _best(series: Series) -> float:
    return (
        min(series.values)
        if any(word in series.name for word in LESS_IS_BETTER)
        else max(series.values)
    )


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
        labels=[_phase(s) for s in phases],
    )
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel("seconds", fontsize=8)
    axes.tick_params(labelsize=8)
    figure.legend(fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=110)
    return path


def _phase(series: Series) -> str:
    return series.name.removeprefix(PHASE)


def _phase_table(phases: Sequence[Series]) -> str:
    """Return an HTML table of the phases with their total seconds, share and median.

    The share is that of all phases; the median is over the steps that had the phase.
    """
    if not phases:
        return ""
    whole = sum(sum(s.values) for s in phases) or 1.0
    rows = "".join(
        f"<tr><td>{html.escape(_phase(s))}</td><td>{sum(s.values):.4g}</td>"
        f"<td>{sum(s.values) / whole:.1%}</td>"
        f"<td>{median(s.values):.4g}</td></tr>"
        for s in phases
    )
    return (
        "<h2>phases</h2><table><tr><th>phase<th>seconds<th>share<th>median of a step</tr>"
        f"{rows}</table>"
    )


def _page(folder: Path, series: Mapping[str, Series], images: Mapping[str, Path]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(s.name)}</td><td>{s.values[0]:.5g}</td><td>{s.values[-1]:.5g}</td>"
        f"<td>{min(s.values):.5g}</td><td>{max(s.values):.5g}</td></tr>"
        for s in (series[n] for n in sorted(series))
    )
    pictures = "".join(
        f"<h2>{html.escape(title)}</h2>{_image(path, title)}" for title, path in images.items()
    )
    config = folder / "config.yaml"
    settings = (
        "<details><summary>configuration</summary>"
        f"<pre>{html.escape(config.read_text())}</pre></details>"
        if config.is_file()
        else ""
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f"<title>{html.escape(folder.name)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(folder.name)}</h1><pre>{html.escape(summary(folder))}</pre>"
        f"{_phase_table(_phases(series))}{pictures}<h2>all metrics</h2>"
        f"<table><tr><th>name<th>first<th>last<th>lowest<th>highest</tr>{rows}</table>"
        f"{settings}</html>\n"
    )


def _image(path: Path, title: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;"
    "max-width:1100px;margin:2em auto;padding:0 1em;color:#222}"
    "img{max-width:100%}table{border-collapse:collapse}"
    "td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}pre{background:#f6f6f6;padding:1em;overflow:auto}"
)

"""The page of a run for a colleague: one HTML file that needs no network.

It has the curves that matter for the task, samples, the held-out problems, the time by phase, the
environment and the configuration, of what the run has recorded. Without scripts it can be read as a
whole; the script only shows values beneath the curves.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from engine_trainer.telemetry.environment import Start, read_starts
from engine_trainer.telemetry.logs import METRICS, read_metrics
from engine_trainer.telemetry.metrics import CURVES, CURVES_OF, explain, matching
from engine_trainer.telemetry.pages.charts import histogram_over_steps
from engine_trainer.telemetry.pages.document import document, resource, write_page
from engine_trainer.telemetry.pages.evaluations import (
    Problem,
    evaluation_files,
    problem_table,
    read_problems,
)
from engine_trainer.telemetry.report.curves import curve
from engine_trainer.telemetry.report.samples import (
    count_changes,
    evaluation_samples,
    training_samples,
)
from engine_trainer.telemetry.series import (
    Series,
    count_steps,
    duration,
    load_series,
    phase_name,
    phases,
)
from engine_trainer.telemetry.view.content import Overview, read_overview

NAME = "report.html"
TASKS = {
    "sft": "Supervised fine-tuning",
    "rl": "Reinforcement learning",
    "dpo": "Direct preference optimization",
    "kto": "Kahneman-Tversky optimization",
    "rm": "Reward model",
}


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The records of a run that a report is made of."""

    name: str
    task: str
    steps: int
    duration: str
    series: Mapping[str, Series]
    starts: Sequence[Start]
    overview: Overview
    configuration: str
    """Text of ``config.yaml``, empty without one."""

    @property
    def span(self) -> tuple[int, int]:
        """First and last step with a figure."""
        steps = [s for one in self.series.values() for s in [*one.steps, *one.lost]]
        return min(steps, default=0), max(steps, default=0)

    @property
    def resumed(self) -> list[int]:
        """Steps after which the run was resumed."""
        return sorted({start.after for start in self.starts if start.after})


def write_report(run: Path, task: str) -> Path:
    """Write ``report.html`` into a run's folder, and return its path.

    ``task`` is sft, rl, dpo, kto or rm. A kill leaves the former page or the new one.

    Raises ``DataError`` without metrics, and where a file of the run cannot be read.
    """
    path = run / NAME
    write_page(path, page(run, read_run(run, task)))
    return path


def read_run(run: Path, task: str) -> Recorded:
    """Return the records of the run in the folder ``run`` (see ``write_report``)."""
    series = load_series(run / METRICS)
    rows = read_metrics(run / METRICS)
    config = run / "config.yaml"
    return Recorded(
        name="/".join(run.resolve().parts[-2:]),
        task=task,
        steps=count_steps(rows),
        duration=duration(rows),
        series=series,
        starts=read_starts(run),
        overview=read_overview(run),
        configuration=config.read_text(encoding="utf-8") if config.is_file() else "",
    )


def page(run: Path, recorded: Recorded) -> str:
    """Return the page as HTML."""
    body = (
        f"{_header(recorded)}<main>{_curves(recorded)}{_training(recorded)}"
        f"{_evaluations(run, recorded)}{_phases(recorded.series)}{_environment(recorded)}"
        f"{_configuration(recorded.configuration)}</main>"
    )
    return document(
        recorded.name,
        body,
        style=resource("report", "page.css"),
        script=resource("report", "page.js"),
    )


def _header(recorded: Recorded) -> str:
    parts = [TASKS[recorded.task], *_setting(recorded.configuration)]
    wanted = recorded.starts[-1].steps if recorded.starts else recorded.steps
    steps = f"{recorded.steps} of {wanted} steps" if recorded.steps < wanted else ""
    parts.append(steps or f"{recorded.steps} steps")
    if recorded.duration:
        parts.append(f"in {recorded.duration}")
    if recorded.starts:
        last = recorded.starts[-1]
        parts.append(f"{last.backend} on {_counted(last.ranks, 'rank')} ({last.device})")
        parts.append(recorded.starts[0].date[:10])
    # A part stays on a line where it fits.
    shown = " · ".join(f"<span>{html.escape(part)}</span>" for part in parts)
    return f"<header><h1>{html.escape(recorded.name)}</h1><p>{shown}</p></header>"


def _setting(configuration: str) -> list[str]:
    """Return the model and, for RL, the kind of advantage."""
    tree: Any = yaml.safe_load(configuration) or {}
    keys = (("algorithm", "advantage"), ("engine", "model", "path"))
    return [str(value) for path in keys if (value := _at(tree, path)) is not None]


def _at(tree: Any, path: Sequence[str]) -> Any:
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _curves(recorded: Recorded) -> str:
    """Return the curves of the task, and everything else folded away."""
    series = recorded.series
    drawable = {n: s for n, s in series.items() if s.values and not s.is_flat}
    chosen: list[tuple[str, list[str]]] = []
    for candidate in CURVES_OF[recorded.task]:
        names = matching(candidate.metrics, drawable)
        if names and len(chosen) < CURVES:
            chosen.append((candidate.title, names))
    shown = {name for _, names in chosen for name in names}
    figures = "".join(
        curve(title, [series[n] for n in names], recorded.span, recorded.resumed)
        for title, names in chosen
    )
    if not figures:
        figures = "<p>The run has logged no metric that changes.</p>"
    others = [name for name in sorted(drawable) if name not in shown]
    flat = [name for name in sorted(series) if name not in drawable]
    return (
        f'<section class="curves">{figures}</section>{_important_flat(recorded, flat)}'
        f"{_others(recorded, others)}{_flat([series[name] for name in flat])}"
        f"{_numbers(series)}"
    )


def _important_flat(recorded: Recorded, flat: Sequence[str]) -> str:
    """Return a sentence on curves of the task that are flat: an accuracy of 0 is worth a look."""
    wanted = [pattern for c in CURVES_OF[recorded.task][:CURVES] for pattern in c.metrics]
    parts = [f"{name} ({_flat_value(recorded.series[name])})" for name in matching(wanted, flat)]
    if not parts:
        return ""
    return f"<p>Flat, and therefore not drawn: {html.escape(', '.join(parts))}.</p>"


def _others(recorded: Recorded, names: Sequence[str]) -> str:
    if not names:
        return ""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(recorded.series[name].group, []).append(name)
    parts = "".join(
        f'<h3>{html.escape(group)}</h3><div class="curves small">'
        + "".join(
            curve(n, [recorded.series[n]], recorded.span, recorded.resumed) for n in groups[group]
        )
        + "</div>"
        for group in sorted(groups)
    )
    return (
        f"<details><summary>All other metrics that change ({len(names)})</summary>{parts}</details>"
    )


def _flat(flat: Sequence[Series]) -> str:
    if not flat:
        return ""
    entries = "".join(
        f"<dt>{html.escape(one.name)} <b>{html.escape(_flat_value(one))}</b></dt>"
        f"<dd>{html.escape(explain(one.name))}</dd>"
        for one in flat
    )
    return (
        f"<details><summary>Flat metrics ({len(flat)})</summary>"
        "<p>They have the same value at every step, up to rounding.</p>"
        f'<dl class="flat">{entries}</dl></details>'
    )


def _flat_value(one: Series) -> str:
    if not one.values:
        return "never finite"
    low, high = min(one.values), max(one.values)
    texts = dict.fromkeys((f"{low:.4g}", f"{high:.4g}"))
    return f"{low:.10g}" if low == high else " to ".join(texts)


def _numbers(series: Mapping[str, Series]) -> str:
    found = [series[name] for name in sorted(series) if series[name].values]
    rows = "".join(
        f'<tr><th scope="row">{_term(s.name)}</th>'
        + "".join(
            f"<td>{value:.5g}</td>"
            for value in (s.values[0], s.values[-1], min(s.values), max(s.values))
        )
        + "</tr>"
        for s in found
    )
    if not rows:
        return ""
    return (
        "<details><summary>Numbers</summary>"
        '<div class="table" tabindex="0"><table><thead><tr><th>metric</th><th>first</th>'
        "<th>last</th><th>lowest</th><th>highest</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div></details>"
    )


def _term(name: str) -> str:
    """Return a metric's name with its meaning, which a browser shows on hover."""
    return f'<abbr title="{html.escape(explain(name))}">{html.escape(name)}</abbr>'


def _training(recorded: Recorded) -> str:
    """Return the distributions of rewards and lengths over the steps of RL."""
    if recorded.task != "rl":
        return ""
    overview = recorded.overview
    if not len(overview.steps):
        return (
            "<section><h2>Rewards over the steps</h2><p>The run kept no completions of its "
            "training. run.rollouts keeps them: a number for each step, or all.</p></section>"
        )
    about = "by step; the line is the mean"
    rewards = histogram_over_steps("Reward", overview.steps, overview.rewards, about)
    lengths = histogram_over_steps("Tokens", overview.steps, overview.lengths, about)
    return (
        f"<section><h2>Rewards over the steps</h2><p>{len(overview.steps)} completions that the "
        "run has kept. engine-train view shows each of them with its tokens.</p>"
        f'<div class="charts">{rewards}{lengths}</div></section>'
    )


def _evaluations(run: Path, recorded: Recorded) -> str:
    """Return samples and problems of each held-out set that has completions."""
    found = evaluation_files(run)
    if not found:
        return _without_evaluations(run, recorded.task)
    parts: list[str] = []
    for name, files in found.items():
        steps = list(files)
        first, last = steps[0], steps[-1]
        problems = read_problems(files, keep={first, last})
        title = f"Held-out problems of {name}" if name else "Held-out problems"
        table = problem_table(problems)
        parts.append(
            f"<section><h2>{html.escape(title)}</h2>{_changes(problems, first, last)}"
            f"{evaluation_samples(problems, first, last)}"
            f"<details><summary>Each problem over the evaluations ({len(problems)})</summary>"
            f"{table}</details></section>"
        )
    return "".join(parts)


def _without_evaluations(run: Path, task: str) -> str:
    if task in ("dpo", "kto", "rm"):
        return ""  # their evaluations make no completions
    keys = "eval" if task == "rl" else "eval and reward"
    return (
        "<section><h2>Samples</h2><p>The run has no completions to held-out problems. "
        f"The configuration's {keys} makes them.</p>{training_samples(run)}</section>"
    )


def _changes(problems: Sequence[Problem], first: int, last: int) -> str:
    if first == last:
        return f"<p>One evaluation, after step {last}, of {len(problems)} problems.</p>"
    counts = count_changes(problems, first, last)
    return (
        f"<p>Between the evaluations after step {first} and after step {last}, "
        f"{_counted(counts.better, 'problem')} became better, {counts.worse} became worse, and "
        f"{counts.same} stayed the same.</p>"
    )


def _phases(series: Mapping[str, Series]) -> str:
    """Return the total seconds, the share and the median of each phase.

    The share is that of all phases; the median is over the rows that had the phase.
    """
    found = phases(series)
    if not found:
        return ""
    whole = sum(sum(s.values) for s in found) or 1.0
    rows = "".join(
        f'<tr><th scope="row"><abbr title="{html.escape(explain(s.name))}">'
        f"{html.escape(phase_name(s))}</abbr></th><td>{sum(s.values):.4g}</td>"
        f'<td class="share" style="--share:{sum(s.values) / whole:.4f}">'
        f"{sum(s.values) / whole:.1%}</td><td>{median(s.values):.4g}</td></tr>"
        for s in found
    )
    return (
        '<section><h2>Where the time went</h2><div class="table" tabindex="0"><table><thead><tr>'
        "<th>phase</th><th>seconds</th><th>share</th><th>median of a row</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _environment(recorded: Recorded) -> str:
    if not recorded.starts:
        return ""
    last = recorded.starts[-1]
    where = " (the controller's machine)" if last.launcher == "ray" else ""
    versions = ", ".join(f"{name} {version}" for name, version in last.versions.items())
    entries = [
        ("command", last.command),
        ("started", _time(last)),
        ("commit", last.commit or "not known: the run was not started in a git repository"),
        ("engine", f"{last.backend} on {last.device}, {_counted(last.ranks, 'rank')}"),
        *_options(last),
        (f"hardware{where}", ", ".join(last.hardware)),
        ("versions", versions),
    ]
    rows = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in entries
    )
    return f"<section><h2>Environment</h2><dl>{rows}</dl>{_starts(recorded.starts)}</section>"


def _options(start: Start) -> list[tuple[str, str]]:
    """Return what the engine does of what decides on speed and memory, where it could tell."""
    shown = ("model.attention", "precision.compute", "memory.recompute", "memory.compile")
    named = [f"{key} {start.resolved[key]}" for key in shown if key in start.resolved]
    return [("engine does", ", ".join(named))] if named else []


def _starts(starts: Sequence[Start]) -> str:
    """Return a table of the starts of a run that was resumed."""
    if len(starts) == 1:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(_time(one))}</td><td>{one.after}</td>"
        f'<td>{one.ranks}</td><td class="text">{html.escape(_short_commit(one))}</td>'
        f'<td class="text">{html.escape(_changed_versions(one, starts[-1]))}</td>'
        f'<td class="text command">{html.escape(one.command)}</td></tr>'
        for one in starts
    )
    return (
        f"<h3>{_counted(len(starts), 'start')}</h3>"
        '<div class="table" tabindex="0"><table><thead><tr><th>date</th><th>after step</th>'
        '<th>ranks</th><th class="text">commit</th><th class="text">other versions</th>'
        f'<th class="text">command</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _time(start: Start) -> str:
    return start.date.replace("T", " ").replace("+00:00", " UTC")


def _short_commit(start: Start) -> str:
    commit, _, rest = (start.commit or "").partition(" ")
    return f"{commit[:10]} {rest}".strip()


def _changed_versions(one: Start, last: Start) -> str:
    names = sorted(one.versions.keys() | last.versions.keys())
    return ", ".join(
        f"{name} {one.versions.get(name, 'absent')}"
        for name in names
        if one.versions.get(name) != last.versions.get(name)
    )


def _configuration(text: str) -> str:
    if not text:
        return ""
    return (
        "<section><h2>Configuration</h2><details><summary>config.yaml, defaults included</summary>"
        f"<pre>{html.escape(text)}</pre></details></section>"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

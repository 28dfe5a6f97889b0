"""The table and the picture of runs that run.py made.

``python recipes/fp8_reproduction/plot.py [runs/fp8-reproduction] [--picture FILE.png]`` makes them,
the picture by default in docs/images.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from engine_trainer.telemetry.series import Series, load_series

WAYS = {
    "bf16": "bf16 rollout",
    "fp8_tis": "FP8 rollout, token TIS (C = 2)",
    "fp8": "FP8 rollout, no correction",
}
COLORS = {"bf16": "black", "fp8_tis": "tab:blue", "fp8": "tab:red"}
PANELS = {
    "eval/accuracy": "held-out accuracy",
    "mismatch/kl_k3": "mismatch KL(rollout ‖ engine), nats a token",
    "mismatch/ess_token": "effective sample size, tokens",
    "mismatch/ess_sequence": "effective sample size, sequences",
}
SECONDS = {"generate": "time/generate", "sync": "time/sync"}

Run = Mapping[str, Series]
Runs = Mapping[str, Mapping[str, Run]]
"""The metrics of runs, by way and then by seed."""


def main() -> None:
    """Print the table and write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="?", default=Path("runs/fp8-reproduction"))
    parser.add_argument("--picture", type=Path, default=Path("docs/images/fp8_reproduction.png"))
    options = parser.parse_args()
    runs = read(options.runs)
    print(table(runs))
    print(f"picture: {draw(runs, options.picture)}")


def read(folder: Path) -> Runs:
    """Return every run below ``folder``, such as ``seed-0/bf16/metrics.jsonl``.

    Raises ``SystemExit`` where there is none.
    """
    runs = {
        way: {
            path.parent.parent.name.removeprefix("seed-"): load_series(path)
            for path in sorted(folder.glob(f"seed-*/{way}/metrics.jsonl"))
        }
        for way in WAYS
    }
    if not any(runs.values()):
        raise SystemExit(f"no metrics.jsonl below {folder}: run.py makes them")
    return {way: seeds for way, seeds in runs.items() if seeds}


def table(runs: Runs) -> str:
    """Return a Markdown table, a row per way: mean ± standard deviation over seeds.

    With one seed there is no standard deviation.
    """
    columns: dict[str, Callable[[Run], float]] = {
        "accuracy before": lambda run: run["eval/accuracy"].values[0],
        "accuracy after": lambda run: run["eval/accuracy"].values[-1],
        "accuracy, last 3": lambda run: fmean(run["eval/accuracy"].values[-3:]),
        "mismatch KL": lambda run: fmean(run["mismatch/kl_k3"].values),
        "ESS, tokens": lambda run: fmean(run["mismatch/ess_token"].values),
        "ESS, sequences": lambda run: fmean(run["mismatch/ess_sequence"].values),
        **{f"{name}, s a step": _seconds(metric) for name, metric in SECONDS.items()},
    }
    lines = [f"| rollout | seeds | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    for way, seeds in runs.items():
        cells = [_cell([value(run) for run in seeds.values()]) for value in columns.values()]
        lines.append(f"| {WAYS[way]} | {', '.join(seeds)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _seconds(metric: str) -> Callable[[Run], float]:
    def mean(run: Run) -> float:
        # The first step warms up, and a step with an evaluation generates and syncs twice.
        measured = set(run["eval/accuracy"].steps) | {1}
        rest = [
            v
            for s, v in zip(run[metric].steps, run[metric].values, strict=True)
            if s not in measured
        ]
        return fmean(rest or run[metric].values)

    return mean


def _cell(values: Sequence[float]) -> str:
    return f"{fmean(values):.4g}" + (f" ± {stdev(values):.2g}" if len(values) > 1 else "")


def draw(runs: Runs, path: Path) -> Path:
    """Write the picture.

    It has a panel per figure, with a thick line for the mean of a way and thin lines for its seeds.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    for index, (metric, title) in enumerate(PANELS.items()):
        axes = figure.add_subplot(2, 2, index + 1)
        for way, seeds in runs.items():
            _lines(axes, way, [run[metric] for run in seeds.values() if metric in run])
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step", fontsize=9)
        axes.grid(visible=True, alpha=0.3)
        if metric == "mismatch/kl_k3":
            axes.set_yscale("log")
        if index == 0:
            axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def _lines(axes: Any, way: str, series: Sequence[Series]) -> None:
    for one in series:
        axes.plot(one.steps, one.values, color=COLORS[way], linewidth=0.7, alpha=0.45)
    by_seed = [dict(zip(one.steps, one.values, strict=True)) for one in series]
    steps = (
        [step for step in by_seed[0] if all(step in seed for seed in by_seed)] if by_seed else []
    )
    means = [fmean(seed[step] for seed in by_seed) for step in steps]
    axes.plot(steps, means, color=COLORS[way], linewidth=2, label=WAYS[way])


if __name__ == "__main__":
    main()

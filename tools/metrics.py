"""Write docs/metrics.md from the table of metrics that the report explains them with.

With ``--check``, check that the page is current instead.
"""

from __future__ import annotations

import sys

from matrix import ROOT, table, write_or_check

from engine_trainer.telemetry.metrics import CURVES, CURVES_OF, MEANINGS, Curve

PAGE = ROOT / "docs" / "metrics.md"
INTRODUCTION = f"""\
# Metrics

<!-- Generated from engine_trainer/telemetry/metrics.py by tools/metrics.py: change the table \
there. -->

A run writes one row a step to `metrics.jsonl`, and the same figures to TensorBoard and trackers.
A value that is not finite is `null`. `*` stands for a name (of a reward, a phase or a worker) or a
number of samples. The figures of a held-out set with a name are `eval/NAME/…`.

`report.html` in `run.output_dir` explains each metric with the same words. It draws {CURVES} curves
first, from the list of the task below: those that the run has and that are not flat, in this order.
The formulas of `mismatch/…` and `correction/…` are in
[rollout-correction.md](rollout-correction.md#figures).
"""
GROUPS = {
    "train": "Training",
    "critic": "The critic of PPO",
    "rollout": "Completions of training",
    "reward": "Rewards",
    "agent": "Conversations with tools",
    "mismatch": "Mismatch of rollout and engine",
    "correction": "Rollout correction",
    "eval": "Held-out problems, rows and pairs",
    "data": "Data",
    "perf": "Speed",
    "time": "Time by phase",
    "sync": "Weight syncs",
    "replicas": "Replicas of an elastic run",
    "worker": "Workers of a Ray cluster",
}


def render() -> str:
    """Return the whole page: the curves of each task, and one table for each group."""
    tasks: dict[tuple[Curve, ...], list[str]] = {}
    for task, found in CURVES_OF.items():
        tasks.setdefault(found, []).append(f"`{task}`")
    curves = [
        (", ".join(names), curve.title, ", ".join(f"`{name}`" for name in curve.metrics))
        for found, names in tasks.items()
        for curve in found
    ]
    head = ("task", "curve", "metrics")
    parts = [INTRODUCTION, f"## The curves of a report\n\n{table(head, curves)}"]
    groups: dict[str, list[tuple[str, str]]] = {name: [] for name in GROUPS}
    for name, meaning in MEANINGS.items():
        groups[name.partition("/")[0]].append((f"`{name}`", meaning))
    parts += [
        f"## {GROUPS[group]}\n\n{table(('metric', 'meaning'), rows)}"
        for group, rows in groups.items()
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, render(), "metrics.py"))

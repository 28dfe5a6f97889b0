"""Runs that learn from pairs or labelled rows of sums, and the files that they write."""

import json
import re
from pathlib import Path

import torch

from engine_trainer.data import SampleOrder

SEED = 3


def tree(model: Path, rows: Path, out: Path, **sections) -> dict:
    base = {
        "engine": {
            "model": {"path": str(model)},
            "device": "cpu",
            "optimizer": {"lr": 0.003},
        },
        "data": {"source": str(rows / "train.jsonl")},
        "batch_size": 10,
        "run": {
            "output_dir": str(out),
            "steps": 4,
            "seed": SEED,
            "progress": False,
            "report": False,
            "tensorboard": False,
        },
    }
    for name, value in sections.items():
        base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
    return base


def write_parts(folder: Path, rows: list[dict]) -> None:
    """Write the first 80 rows as ``train.jsonl``, and the others as ``test.jsonl``."""
    for name, part in {"train": rows[:80], "test": rows[80:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def first_rows(folder: Path, count: int) -> list[dict]:
    """Return the rows that a run sees first."""
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    return [rows[i] for i in SampleOrder(len(rows), seed=SEED).take(0, count)]


def rows_of(out: Path) -> list[dict]:
    """Return the metrics of each step without what depends on the clock."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    clocks = re.compile(r"time$|time/|perf/")
    return [{k: v for k, v in r.items() if not clocks.match(k)} for r in rows]


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {
        k: v
        for path in sorted((out / "hf").glob("*.safetensors"))
        for k, v in load_file(path).items()
    }

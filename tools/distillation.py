"""Train students of three seeds by on-policy distillation, and table what they reach.

Each seed is run with the KL over the vocabulary and with that of sampled tokens. Each run is
``recipes/quickstart/distill.py``; finished ones below ``--output`` are not repeated.
``--write`` puts the table into docs/algorithms.md. The session `nox -s distillation` has the
environment.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

from matrix import ROOT, replace_section, table

PAGE = ROOT / "docs" / "algorithms.md"
RECIPE = ROOT / "recipes" / "quickstart" / "distill.py"
SEEDS = (0, 1, 2)
KINDS = ("full", "sampled")


def main() -> None:
    """Run the seeds, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    options = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    for seed in SEEDS:
        runs = [options.output / f"student-{seed}" / f"distill-{kl}" for kl in KINDS]
        for kl, run in zip(KINDS, runs, strict=True):
            if not (run / "hf").is_dir():
                command = ["--seed", str(seed), "--kl", kl, "--output", str(options.output)]
                command += ["--processes", str(options.processes)]
                subprocess.run([sys.executable, str(RECIPE), *command], check=True)
        before = f"{_values(runs[0], 'eval/accuracy')[0]:.1%}"
        teacher = _last(options.output / "seed-0" / "rl")
        rows.append((str(seed), before, *(_row(run) for run in runs), teacher))
    head = ("seed", "student after SFT", *(f"after `kl: {kl}`" for kl in KINDS), "teacher")
    text = f"{table(head, rows)}\n\n{_measured()}\n"
    if options.write:
        page = replace_section(PAGE.read_text(encoding="utf-8"), "distillation", text)
        PAGE.write_text(page, encoding="utf-8")
    print(text)


def _row(run: Path) -> str:
    """Return the accuracy after the run, and the KL to the teacher in the first and last steps."""
    kl = _values(run, "train/teacher_kl")
    few = min(5, len(kl))
    first, last = sum(kl[:few]) / few, sum(kl[-few:]) / few
    return f"{_last(run)}, {first:.2f} to {last:.2f} nats"


def _last(run: Path) -> str:
    return f"{_values(run, 'eval/accuracy')[-1]:.1%}"


def _values(run: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def _measured() -> str:
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("torch", "transformers"))
    today = datetime.datetime.now(tz=datetime.UTC).date()
    return (
        f"Measured on {today} on a CPU with {versions}.\n`nox -s distillation` measures it again."
    )


if __name__ == "__main__":
    main()

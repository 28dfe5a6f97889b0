"""SFT on drawn pictures from random weights, then GRPO, with held-out accuracy around each.

``python recipes/vision/run.py [--seeds 0 1 2] [--output FOLDER] [KEY=VALUE …]``, where ``KEY`` is a
``section.key`` of rl.yaml. The held-out questions are also asked with their pictures exchanged,
which a model that looks at them cannot answer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from prepare import prepare  # noqa: E402 - the folder has to be on the path first

PROCESSES = 2


def main() -> None:
    """Run both stages of each seed, and print their accuracies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=Path, default=Path("runs/vision"))
    parser.add_argument("overrides", nargs="*", help="of rl.yaml")
    options = parser.parse_args()
    for seed in options.seeds:
        start = time.monotonic()
        folder = options.output / f"seed-{seed}"
        train(folder, seed, options.overrides)
        before, _ = accuracies(folder / "sft")
        middle, after = accuracies(folder / "rl")
        _, exchanged = accuracies(folder / "rl", "eval/shuffled/accuracy")
        print(f"\nSeed {seed}, sampled accuracy on held-out pictures (temperature 1):")
        print(f"  random weights                  {before:6.1%}")
        print(f"  after SFT                       {middle:6.1%}")
        print(f"  after RL                        {after:6.1%}")
        print(f"  after RL, pictures exchanged    {exchanged:6.1%}")
        print(f"  {time.monotonic() - start:.0f} s in all", flush=True)


def train(folder: Path, seed: int, overrides: list[str]) -> None:
    """Draw the pictures, and run both stages; what is finished is not repeated."""
    data = folder / "data"
    if not (data / "shuffled.jsonl").is_file():
        prepare(folder, seed)
    common = [f"run.seed={seed}", f"eval.source={data / 'heldout.jsonl'}"]
    sft, rl = folder / "sft", folder / "rl"
    if not (sft / "hf").is_dir():
        model = f"engine.model.path={folder / 'model'}"
        source = f"data.source={data / 'sft.jsonl'}"
        run_task("sft", model, source, f"run.output_dir={sft}", *common)
    if not (rl / "hf").is_dir():
        model = f"engine.model.path={sft / 'hf'}"
        source = f"data.source={data / 'rl.jsonl'}"
        shuffled = f"eval.sets.shuffled.source={data / 'shuffled.jsonl'}"
        run_task("rl", model, source, shuffled, f"run.output_dir={rl}", *common, *overrides)


def run_task(task: str, *overrides: str) -> None:
    """Run a task with its file, and end with its status if that is not 0."""
    command = [sys.executable, "-m", "engine_trainer", task, str(HERE / f"{task}.yaml")]
    # Each process has one thread: the model is so small that threads only wait for each other.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*command, "--ranks", str(PROCESSES), *overrides], env=environment, check=False
    )
    if done.returncode:
        sys.exit(done.returncode)


def accuracies(stage: Path, name: str = "eval/accuracy") -> tuple[float, float]:
    """Return held-out accuracy before the first and after the last step of a stage."""
    rows = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    measured = [row[name] for row in rows if name in row]
    return measured[0], measured[-1]


if __name__ == "__main__":
    main()

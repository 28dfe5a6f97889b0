"""SFT from random weights, then RL on two processes, with held-out accuracy before and after each.

``python recipes/quickstart/run.py [--seed N] [--output FOLDER] [--device cpu|cuda] [KEY=VALUE …]``,
where ``KEY`` is a ``section.key`` of rl.yaml.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from engine_trainer.config import SFTConfig
from engine_trainer.config.loading import load_config

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from prepare import prepare  # noqa: E402 - the folder has to be on the path first


def main() -> None:
    """Run both stages and print their accuracies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=2, help="of RL")
    parser.add_argument("overrides", nargs="*", help="of rl.yaml")
    options = parser.parse_args()
    # Packages below reasoning-gym cause these warnings.
    warnings.simplefilter("ignore", SyntaxWarning)
    folder = options.output / f"seed-{options.seed}"
    start = time.monotonic()
    model, sft, rl = folder / "model", folder / "sft", folder / "rl"
    sft_overrides = [
        f"engine.model.path={model}",
        f"run.output_dir={sft}",
        *_common(options.device, options.seed),
    ]
    if not (model / "config.json").is_file():
        problems = load_config(SFTConfig, str(HERE / "sft.yaml"), sft_overrides).data.reasoning_gym
        assert problems is not None
        prepare(model, problems)
    # A finished stage is not repeated.
    if not (sft / "hf").is_dir():
        run_python(["-m", "engine_trainer", "sft", str(HERE / "sft.yaml"), *sft_overrides])
    run_python(
        rl_command(
            folder,
            device=options.device,
            seed=options.seed,
            processes=options.processes,
            overrides=options.overrides,
        )
    )
    _report(sft, rl, time.monotonic() - start)


def rl_command(
    folder: Path,
    *,
    device: str,
    seed: int,
    processes: int,
    overrides: Sequence[str],
    trainer: Sequence[str] = ("-m", "engine_trainer"),
) -> list[str]:
    """Return the arguments of Python that start RL below ``folder``, whose SFT has finished."""
    return [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        *trainer,
        "rl",
        str(HERE / "rl.yaml"),
        f"engine.model.path={folder / 'sft' / 'hf'}",
        f"run.output_dir={folder / 'rl'}",
        *_common(device, seed),
        *overrides,
    ]


def _common(device: str, seed: int) -> list[str]:
    """Return the overrides that both stages have."""
    return [
        f"engine.device={device}",
        f"run.seed={seed}",
        f"data.reasoning_gym.seed={seed}",
    ]


def run_python(arguments: list[str]) -> None:
    """Run Python with these arguments, and end with its status if that is not 0."""
    # Each process has one thread: the model is so small that threads only wait for each other. The
    # warnings come from packages below reasoning-gym, when they are compiled for the first time.
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore::SyntaxWarning",
    }
    code = subprocess.run([sys.executable, *arguments], env=environment, check=False).returncode
    if code:
        sys.exit(code)


def accuracies(stage: Path) -> tuple[float, float]:
    """Return held-out accuracy before the first and after the last step of a stage."""
    rows = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    measured = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    return measured[0], measured[-1]


def _report(sft: Path, rl: Path, seconds: float) -> None:
    before, _ = accuracies(sft)
    middle, after = accuracies(rl)
    print("\nSampled accuracy on 512 held-out problems (temperature 1, 2 samples each):")
    print(f"  random weights   {before:6.1%}")
    print(f"  after SFT        {middle:6.1%}")
    print(f"  after RL         {after:6.1%}   ({after - middle:+.1%} by RL)")
    print(f"  {seconds:.0f} s in all; report: {rl / 'report.html'}")


if __name__ == "__main__":
    main()

"""Calculate the phases of an RL step on given numbers of GPUs, from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from engine_api.config import near_matches
from engine_trainer.scaling.phases import Lengths
from engine_trainer.scaling.shapes import SHAPES, Shape
from engine_trainer.scaling.step import NAMES, Job, Step, step_of


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each number of GPUs, and return the exit status.

    The status is 2 for a model that is not known and for a mean length out of range.
    """
    options = _parser().parse_args(argv)
    shape = _shape(options.model)
    if shape is None:
        print(
            f"error: {options.model!r} is no known shape and no config.json\n"
            f"  to do: {near_matches(options.model, list(SHAPES))}",
            file=sys.stderr,
        )
        return 2
    mean = options.mean or options.response / 2
    if not options.response / 2 <= mean <= options.response:
        print(
            f"error: --mean {mean:g} with --response {options.response}\n"
            "  to do: give at least half of it, and at most all",
            file=sys.stderr,
        )
        return 2
    job = Job(
        prompts=options.prompts,
        n=options.n,
        lengths=Lengths(prompt=options.prompt, mean=mean, longest=options.response),
        fp8=options.fp8,
        updates=options.updates,
        reward_s=options.reward_ms / 1e3,
        reward_processes=options.reward_workers,
    )
    print(
        f"{shape.name}: {shape.parameters / 1e9:.2f}e9 parameters, "
        f"{job.completions} completions of {mean:g} tokens, at most {options.response}"
    )
    print(
        f"{'GPUs':>6} {'step s':>9} " + " ".join(f"{name:>10}" for name in NAMES) + "  bottleneck"
    )
    for gpus in options.gpus:
        print(_row(step_of(shape, gpus, job)))
    return 0


def _row(step: Step) -> str:
    if not step.fits:
        return f"{step.gpus:>6} does not fit"
    shares = " ".join(f"{step.phases[name].seconds:>10.3g}" for name in NAMES)
    return f"{step.gpus:>6} {step.seconds:>9.3g} {shares}  {step.bottleneck}"


def _shape(name: str) -> Shape | None:
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    return (
        Shape.from_config(path.parent.name, json.loads(path.read_text()))
        if path.is_file()
        else None
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine_trainer.scaling", description=__doc__)
    parser.add_argument(
        "--model", default="qwen3-8b", help=f"{', '.join(SHAPES)}, or a folder with config.json"
    )
    parser.add_argument(
        "--gpus", type=lambda text: [int(n) for n in text.split(",")], default=[8, 64, 512, 4096]
    )
    parser.add_argument("--prompts", type=int, default=512, help="a step")
    parser.add_argument("--n", type=int, default=16, help="completions a prompt")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument(
        "--response", type=int, default=8192, help="tokens of the longest completion"
    )
    parser.add_argument(
        "--mean",
        type=float,
        help="tokens of a completion on average (default: half of the longest)",
    )
    parser.add_argument("--updates", type=int, default=1, help="optimizer steps a step")
    parser.add_argument("--reward-ms", type=float, default=2.0, help="of one completion")
    parser.add_argument("--reward-workers", type=int, default=1, help="processes a replica")
    parser.add_argument("--fp8", action="store_true", help="serve in FP8")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""A student that SFT left weak learns from the quickstart's model by on-policy distillation.

``python recipes/quickstart/distill.py [--seed N] [--kl full|sampled] [--output FOLDER]
[--device cpu|cuda] [KEY=VALUE …]``, where ``KEY`` is a ``section.key`` of distill.yaml. The teacher
is the model that ``run.py`` leaves in the same folder for the seed 0, which is trained first if it
is not there. The student has its tokenizer and its shape, and begins where the quickstart's SFT
ends, from random weights of its own seed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from run import HERE, accuracies, run_python


def main() -> None:
    """Train teacher and student as far as they are not there, and print their accuracies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the student")
    parser.add_argument(
        "--kl",
        choices=("full", "sampled"),
        default="full",
        help="compare distributions over the whole vocabulary, or the sampled tokens alone",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=2, help="of the distillation")
    parser.add_argument("overrides", nargs="*", help="of distill.yaml")
    options = parser.parse_args()
    teacher = options.output / "seed-0"
    folder = options.output / f"student-{options.seed}"
    if not (teacher / "rl" / "hf").is_dir():
        command = [str(HERE / "run.py"), "--output", str(options.output)]
        command += ["--device", options.device, "--processes", str(options.processes)]
        subprocess.run([sys.executable, *command], check=True)
    # The problems are the teacher's, and so is the tokenizer that was made from them.
    common = [
        f"engine.device={options.device}",
        f"run.seed={options.seed}",
        "data.reasoning_gym.seed=0",
    ]
    sft = folder / "sft"
    if not (sft / "hf").is_dir():
        overrides = [f"engine.model.path={teacher / 'model'}", f"run.output_dir={sft}"]
        run_python(["-m", "engine_trainer", "sft", str(HERE / "sft.yaml"), *overrides, *common])
    distilled = folder / f"distill-{options.kl}"
    overrides = [f"engine.model.path={sft / 'hf'}", f"run.output_dir={distilled}"]
    overrides += [f"algorithm.teacher.engine.model.path={teacher / 'rl' / 'hf'}"]
    overrides += [f"algorithm.teacher.kl={options.kl}", *common]
    ranks = ["--ranks", str(options.processes)]
    command = ["-m", "engine_trainer", "rl", str(HERE / "distill.yaml"), *ranks]
    run_python([*command, *overrides, *options.overrides])
    before, after = accuracies(distilled)
    _, best = accuracies(teacher / "rl")
    print("\nSampled accuracy on 512 held-out problems (temperature 1, 2 samples each):")
    print(f"  student after SFT            {before:6.1%}")
    print(f"  student after distillation   {after:6.1%}")
    print(f"  teacher                      {best:6.1%}")


if __name__ == "__main__":
    main()

"""FP8 training compared with bf16: the loss curve of one SFT recipe, and the log-prob error.

``python -m benchmarks.fp8_training --output DIR`` runs recipes/fp8_reproduction/sft.yaml (25 M
parameters, from random weights, on generated problems) once for each of ``--ways``. Only the
engine's name, spec and precision differ. Then engines in each precision compute the log-probs of
held-out documents under the same trained weights, which are compared token by token with
engine-fsdp's in float32. The output is one JSON line per way: training and held-out loss, and the
error in nats; ``DIR/fp8_training.png`` has the curves.
``--steps 4 --tiny --device cpu --ways fsdp2-bf16`` is a smoke test, and ``--emulate`` computes
engine-fsdp's FP8 on any device.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_api import Batch, EngineConfig, EngineRegistry, Memory, ModelSource, Precision
from engine_torch.options import FLOAT8_RECIPES
from engine_trainer.config import SFTConfig
from engine_trainer.config.loading import load_config
from engine_trainer.telemetry.series import Series, load_series

RECIPE = Path(__file__).parent.parent / "recipes" / "fp8_reproduction"
sys.path[:0] = [str(RECIPE), str(RECIPE.parent / "quickstart")]

# The folders have to be on the path first.
from prepare import prepare  # noqa: E402  # pyright: ignore[reportMissingImports]
from run import SHAPE, TINY, TINY_SFT  # noqa: E402  # pyright: ignore[reportMissingImports]


@dataclass(frozen=True, kw_only=True)
class Way:
    """An engine, its own options and its precision."""

    backend: str = "fsdp2"
    float8: bool = False
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def own(self, *, emulate: bool) -> dict[str, Any]:
        """Return the engine's own options."""
        emulated = emulate and self.float8 and self.backend == "fsdp2"
        return self.options | ({"float8_emulate": True} if emulated else {})

    def overrides(self, *, emulate: bool) -> list[str]:
        """Return the way's overrides of the recipe, whose precision is the device's default."""
        found = [
            f"engine.backend={self.backend}",
            f"engine.options={json.dumps(self.own(emulate=emulate))}",
        ]
        return [*found, "engine.precision.compute=float8"] if self.float8 else found


WAYS = {
    "fsdp2-bf16": Way(),
    "megatron-bf16": Way(backend="megatron"),
    "megatron-local-bf16": Way(backend="megatron", options={"spec": "local"}),
    "megatron-fp8": Way(backend="megatron", float8=True),
    **{
        f"fsdp2-{recipe}-fp8": Way(float8=True, options={"float8_recipe": recipe})
        for recipe in FLOAT8_RECIPES
    },
}
LOSSES = {"train": "train/loss", "held_out": "eval/loss"}
DOCUMENTS, LENGTH = 64, 256


def train(way: str, options: argparse.Namespace) -> Mapping[str, Series]:
    """Run the recipe, unless it has run already, and return its metrics."""
    folder = options.output / way
    if not (folder / "hf").is_dir():
        with (options.output / f"{way}.log").open("w") as log:
            command = [
                sys.executable,
                "-m",
                "engine_trainer",
                "sft",
                str(RECIPE / "sft.yaml"),
                *overrides(options, folder),
                *WAYS[way].overrides(emulate=options.emulate),
            ]
            subprocess.run(
                command,
                stdout=log,
                stderr=log,
                check=True,
                env=os.environ | {"OMP_NUM_THREADS": "4"},
            )
    return load_series(folder / "metrics.jsonl")


def overrides(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the overrides that all ways have in common."""
    return [
        f"engine.model.path={options.output / 'model'}",
        f"engine.device={options.device}",
        f"run.output_dir={folder}",
        *(TINY_SFT if options.tiny else ()),
        f"run.steps={options.steps}",
        f"run.log_every={max(1, options.steps // 60)}",
        f"eval.every={max(1, options.steps // 10)}",
    ]


def log_probs(
    folder: Path,
    backend: str,
    compute: Any,
    batch: Batch,
    options: argparse.Namespace,
    own: Any = None,
) -> Tensor:
    """Return the log-prob of every token under the weights in ``folder``, float64 on the CPU."""
    config = EngineConfig(
        model=ModelSource(path=str(folder)),
        optimizer=None,
        precision=Precision(compute=compute),
        memory=Memory(max_tokens=4096),
        options=own,
    )
    engine = EngineRegistry.create(backend=backend, device=options.device, config=config)
    engine.initialize()
    try:
        values = engine.infer_batch(batch).log_probs
        assert values is not None
        return values.double().cpu()
    finally:
        engine.close()


def documents(folder: Path) -> Batch:
    """Return documents of random tokens.

    They suffice to measure an error of arithmetic. A trained model is far from sure of them, which
    is the hard case.
    """
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    rows = torch.randint(
        0, vocabulary, (DOCUMENTS, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    weight = torch.ones(LENGTH)
    weight[0] = 0.0
    return Batch.pack([{"input_ids": row, "loss_weight": weight} for row in rows])


def errors(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the error of each way's arithmetic on the first way's weights, against float32."""
    folder = options.output / options.ways[0] / "hf"
    batch = documents(folder)
    counted = batch.loss_weight > 0
    want = log_probs(folder, "fsdp2", "float32", batch, options)
    found = {}
    for way in options.ways:
        chosen = WAYS[way]
        precision = "float8" if chosen.float8 else "bfloat16"
        own = chosen.own(emulate=options.emulate)
        got = log_probs(folder, chosen.backend, precision, batch, options, own)
        error = (got - want)[counted]
        found[way] = {
            "rms": float(error.square().mean().sqrt()),
            "max": float(error.abs().max()),
            "mean": float(error.mean()),
        }
    return found


def draw(runs: Mapping[str, Mapping[str, Series]], path: Path) -> None:
    """Draw training and held-out loss by step, one line per way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (title, metric) in zip(figure.subplots(1, 2), LOSSES.items(), strict=True):
        for way, run in runs.items():
            axes.plot(run[metric].steps, run[metric].values, label=way)
        axes.set(
            title=f"{title.replace('_', '-')} loss",
            xlabel="step",
            ylabel="nats a token",
            yscale="log",
        )
        axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train each way, compare them and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--ways", type=lambda text: text.split(","), default=list(WAYS), help=", ".join(WAYS)
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--emulate", action="store_true", help="engine-fsdp's products of FP8 in bfloat16"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/fp8-training"))
    options = parser.parse_args()
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"--ways: {', '.join(sorted(unknown))} is none of {', '.join(WAYS)}")
    model = options.output / "model"
    if not (model / "config.json").is_file():
        problems = load_config(
            SFTConfig, RECIPE / "sft.yaml", overrides(options, options.output)
        ).data.reasoning_gym
        prepare(model, problems, TINY if options.tiny else SHAPE)
    runs = {way: train(way, options) for way in options.ways}
    found = errors(options)
    for way, run in runs.items():
        row: dict[str, Any] = {"way": way, "steps": options.steps}
        row |= {name: round(run[metric].values[-1], 5) for name, metric in LOSSES.items()}
        row |= {f"log_prob_{name}": value for name, value in found[way].items()}
        print(json.dumps(row), flush=True)
    draw(runs, options.output / "fp8_training.png")


if __name__ == "__main__":
    main()

"""Run the quickstart's RL with every engine on a CPU, and table what each one reaches.

``python tools/quickstart_engines.py`` trains the SFT stage once and then RL with each backend from
the same weights: ``recipes/quickstart/run.py engine.backend=NAME``, and nothing else is changed.
``fsdp2`` is run with more seeds of RL too, whose spread is the noise. Finished runs below
``--output`` are not repeated. ``--write`` puts the table into docs/quickstart.md.

Megatron-core knows only CUDA. Its ranks simulate CUDA by the conformance suite's shim, and the
trainer that runs in them is the same.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from matrix import ROOT, replace_section, table

from engine_trainer.telemetry.logs import read_metrics

PAGE = ROOT / "docs" / "quickstart.md"
RECIPE = ROOT / "recipes" / "quickstart"
REFERENCE = "fsdp2"
# The distribution whose version the table names, by backend.
LIBRARIES = {
    REFERENCE: "torch",
    "veomni": "veomni",
    "torchtitan": "torchtitan",
    "automodel": "nemo-automodel",
    "megatron": "megatron-core",
}
SIMULATED = ("megatron",)
# Of sampling; the problems stay those of seed 0, because SFT has seen the earlier ones.
SEEDS = (1, 2)
# Of a step, compared with the reference.
FIGURES = ("train/loss", "train/entropy", "train/grad_norm")


def main() -> None:
    """Run what is missing, and print or write the table."""
    if sys.argv[1:2] == ["rank"]:
        _simulate(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart-engines"))
    parser.add_argument("--backends", default=",".join(LIBRARIES))
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    options = parser.parse_args()
    backends = options.backends.split(",")
    if unknown := [name for name in backends if name not in LIBRARIES]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(LIBRARIES)}")
    runs = {name: options.output / name / "seed-0" for name in backends}
    for name in [REFERENCE, *backends]:
        train(options.output / name, name)
    seeds = [options.output / f"{REFERENCE}-{seed}" / "seed-0" for seed in SEEDS]
    for seed, folder in zip(SEEDS, seeds, strict=True):
        train(folder.parent, REFERENCE, f"run.seed={seed}")
    text = render({REFERENCE: options.output / REFERENCE / "seed-0", **runs}, seeds)
    if options.write:
        page = replace_section(PAGE.read_text(encoding="utf-8"), "quickstart by engine", text)
        PAGE.write_text(page, encoding="utf-8")
    print(text)


def train(output: Path, backend: str, *overrides: str) -> None:
    """Run the recipe below ``output`` with a backend, from the SFT stage of the reference."""
    folder = output / "seed-0"
    if (folder / "rl" / "hf").is_dir():
        return
    given = [f"engine.backend={backend}", *overrides]
    shared = output.parent / REFERENCE / "seed-0"
    if folder != shared:
        # The recipe repeats neither a finished stage nor the model's folder.
        for stage in ("model", "sft"):
            shutil.copytree(shared / stage, folder / stage, dirs_exist_ok=True)
    if backend in SIMULATED:
        sys.path.insert(0, str(RECIPE))
        from run import rl_command, run_python

        run_python(
            rl_command(
                folder,
                device="cpu",
                seed=0,
                processes=2,
                overrides=given,
                trainer=(str(Path(__file__).absolute()), "rank"),
            )
        )
        return
    command = [sys.executable, str(RECIPE / "run.py"), "--output", str(output), *given]
    subprocess.run(command, check=True)


def _simulate(arguments: list[str]) -> None:
    """Run ``engine-train`` in this process, with CUDA simulated, and end with its status."""
    from engine_conformance.shim import install

    # Before any engine is imported.
    install()
    from engine_trainer.cli import main as engine_train

    sys.exit(engine_train(arguments))


# --- the table ----------------------------------------------------------------------------------


def render(runs: dict[str, Path], seeds: list[Path]) -> str:
    """Return the table of all engines, and the spread over seeds."""
    reference = steps_of(runs[REFERENCE])
    rows = [row_of(name, folder, reference) for name, folder in runs.items()]
    head = (
        "engine",
        "after SFT",
        "after RL",
        "gain by RL",
        "step 1 against fsdp2",
        "all steps",
        "same rewards",
    )
    gains = [gain_of(folder) for folder in (runs[REFERENCE], *seeds)]
    noise = (
        f"With {len(gains)} seeds of RL from the same weights fsdp2 gains "
        f"{', '.join(f'{gain:+.3f}' for gain in gains)} (standard deviation "
        f"{statistics.stdev(gains):.3f})."
    )
    versions = ", ".join(
        f"{library} {importlib.metadata.version(library)}"
        for library in ("transformers", *(LIBRARIES[name] for name in runs))
    )
    today = datetime.datetime.now(tz=datetime.UTC).date()
    return (
        f"{table(head, rows)}\n{noise} Measured on {today} on a CPU with two ranks ({versions}).\n"
    )


def row_of(name: str, folder: Path, reference: list[dict[str, float]]) -> tuple[str, ...]:
    """Return an engine's row."""
    before, after = accuracies_of(folder)
    own = steps_of(folder)
    compared = ("", "", "")
    if name != REFERENCE:
        pairs = zip(own, reference, strict=True)
        equal = sum(one["train/reward"] == other["train/reward"] for one, other in pairs)
        compared = (
            shown(difference(own[:1], reference[:1])),
            shown(difference(own, reference)),
            f"{equal} of {len(reference)} steps",
        )
    simulated = " (simulated CUDA)" if name in SIMULATED else ""
    return (
        f"`{name}`{simulated}",
        f"{before:.3f}",
        f"{after:.3f}",
        f"{after - before:+.3f}",
        *compared,
    )


def shown(fraction: float) -> str:
    """Return a difference as the table has it."""
    return f"{fraction:.0e}" if fraction else "0"


def difference(own: list[dict[str, float]], reference: list[dict[str, float]]) -> float:
    """Return the largest difference of a figure, relative to its largest value in the reference."""
    pairs = list(zip(own, reference, strict=True))
    return max(
        max(abs(one[name] - other[name]) for one, other in pairs)
        / max(abs(other[name]) for other in reference)
        for name in FIGURES
    )


def gain_of(folder: Path) -> float:
    """Return the held-out accuracy that RL adds."""
    before, after = accuracies_of(folder)
    return after - before


def accuracies_of(folder: Path) -> tuple[float, float]:
    """Return the held-out accuracy before the first and after the last step of RL."""
    rows = read_metrics(folder / "rl" / "metrics.jsonl")
    measured = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    return measured[0], measured[-1]


def steps_of(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of each training step."""
    return [row for row in read_metrics(folder / "rl" / "metrics.jsonl") if row["step"] > 0]


if __name__ == "__main__":
    main()

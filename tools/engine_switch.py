"""Change the engine in the middle of an RL run, and write docs/engine-switch.md from the curves.

``python tools/engine_switch.py measure`` trains a tiny model by GRPO for 60 steps twice: once with
FSDP2 alone, and once with the engine changed every 20 steps, from FSDP2 to Megatron-core, and from
there to FSDP2 on two ranks. On a CPU, Megatron-core simulates CUDA; ``--device cuda`` needs two
GPUs. The figures go to docs/images/engine_switch.json. ``python tools/engine_switch.py`` writes the
page and its pictures from that file, and with ``--check`` says whether they are current. It imports
no torch then.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matrix import replace_section, table, write_or_check

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "engine-switch.md"
RECORD = ROOT / "docs" / "images" / "engine_switch.json"
DEVICES = ("cpu", "cuda")

LENGTH = 20
"""Number of steps of each part."""
PARTS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("FSDP2, one rank", 1, ("engine.backend=fsdp2",)),
    ("Megatron-core", 1, ("engine.backend=megatron",)),
    ("FSDP2, two ranks", 2, ("engine.backend=fsdp2",)),
)
METRICS = {
    "train/reward": "reward",
    "train/loss": "loss",
    "train/entropy": "entropy, nats a token",
    "train/grad_norm": "gradient norm",
}
SHOWN = ("train/reward", "train/entropy")
PAD, EOS = "<pad>", "<eos>"
CHARACTERS = [PAD, EOS, "+", "=", "#", " ", *"0123456789"]
REWARD = """
def count_sevens(sample):
    return sample.completion.count("7") / 4
"""


# --- measuring ----------------------------------------------------------------------------------


def measure(device: str) -> dict[str, Any]:
    """Train both runs, and return their figures by step and the largest difference of weights."""
    import pytest
    import torch

    from engine_api.devices import SIMULATED_CUDA
    from engine_conformance.ranks import RankPool

    with (
        tempfile.TemporaryDirectory(prefix="engine-switch-") as scratch,
        pytest.MonkeyPatch.context() as patch,
    ):
        if device == "cpu":
            # The ranks simulate CUDA before any engine is imported.
            patch.setenv(SIMULATED_CUDA, "1")
        folder = Path(scratch)
        write_model(folder)
        file = write_config(folder, device)
        pools = {
            world: RankPool(world, device=device, deadline=3600.0, group_timeout=7200.0)
            for world in (1, 2)
        }

        def train(name: str, end: int, world: int, overrides: Sequence[str]) -> None:
            given = [f"run.output_dir={folder / name}", f"run.steps={end}", *overrides]
            pools[world].run("engine_switch:train", file=str(file), overrides=given)

        try:
            _, world, overrides = PARTS[0]
            train("unbroken", LENGTH * len(PARTS), world, overrides)
            for number, (_, world, overrides) in enumerate(PARTS, start=1):
                train("switched", LENGTH * number, world, overrides)
        finally:
            for pool in pools.values():
                pool.close()
        return {
            "versions": _versions(),
            "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
            "unbroken": _curves(folder / "unbroken"),
            "switched": _curves(folder / "switched"),
            "weights": _difference(folder / "switched", folder / "unbroken"),
        }


def train(file: str, overrides: list[str]) -> int:
    """Run ``engine-train rl`` in a rank, and return the last step."""
    from engine_trainer.config import RLConfig
    from engine_trainer.config.loading import load_config
    from engine_trainer.rl.loop import train_rl

    return train_rl(load_config(RLConfig, file, overrides)).step


def write_model(folder: Path) -> None:
    """Write a two-layer Qwen3 of random weights, its tokenizer of 16 characters, and prompts."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {character: number for number, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS
    ).save_pretrained(folder / "model")
    config = Qwen3Config(
        vocab_size=len(CHARACTERS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=8,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
        # transformers drops the gradient of this token's embedding, and Megatron does not.
        pad_token_id=None,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_config(folder: Path, device: str) -> Path:
    """Write the configuration of both runs."""
    (folder / "reward.py").write_text(REWARD)
    config = {
        "engine": {
            "model": {"path": str(folder / "model")},
            "device": device,
            "precision": {"compute": "float32"},
            "memory": {"compile": False},
            "optimizer": {"lr": 3e-4, "eps": 1e-5},
        },
        "data": {"source": str(folder / "rows.jsonl")},
        "reward": {
            "function": f"{folder / 'reward.py'}:count_sevens",
            "workers": 0,
            "timeout_s": None,
        },
        "rollout": {"n": 4, "max_new_tokens": 4},
        "algorithm": {"prompts_per_step": 16, "mini_batches": 2},
        "run": {
            "output_dir": "?",
            "steps": LENGTH,
            "progress": False,
            "tensorboard": False,
            "report": False,
            "rollouts": "none",
        },
    }
    path = folder / "switch.yaml"
    path.write_text(json.dumps(config))
    return path


def _curves(folder: Path) -> dict[str, list[float]]:
    from engine_trainer.telemetry.logs import read_metrics

    # Figures of the data come before the first step.
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]
    # A step whose groups all have equal rewards updates nothing, and has no loss.
    return {name: [row.get(name, 0.0) for row in rows] for name in METRICS}


def _difference(left: Path, right: Path) -> float:
    """Return the largest difference of two models' weights, relative to a tensor's largest."""
    from safetensors.torch import load_file

    one, other = (load_file(folder / "hf" / "model.safetensors") for folder in (left, right))
    return max(
        float((one[name] - whole).abs().max() / whole.abs().max()) for name, whole in other.items()
    )


def _versions() -> str:
    from importlib.metadata import version

    return ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core"))


# --- the page -----------------------------------------------------------------------------------


def picture(device: str) -> Path:
    """Return the file of a device's picture."""
    return RECORD.with_name(f"engine_switch_{device}.svg")


def render(record: dict[str, Any], device: str, page: str) -> str:
    """Return the page with a device's table of differences."""
    rows: list[tuple[str, ...]] = []
    for number, (name, _, _) in enumerate(PARTS):
        part = slice(LENGTH * number, LENGTH * (number + 1))
        worst = (
            f"{_worst(record['switched'][metric][part], record['unbroken'][metric][part]):.1e}"
            for metric in METRICS
        )
        rows.append((f"{part.start + 1} to {part.stop}", name, *worst))
    head = ("steps", "engine", *METRICS.values())
    end = record["unbroken"]["train/reward"]
    text = (
        f"{table(head, rows)}\nThe reward rises from {end[0]:.2f} to {end[-1]:.2f}. After the last "
        f"step no weight differs by more than {record['weights']:.1e} of its tensor's largest "
        f"({record['device']}, {record['versions']}).\n"
    )
    return replace_section(page, f"differences on {device}", text)


def _worst(got: Sequence[float], want: Sequence[float]) -> float:
    """Return the largest difference, relative to the largest value of the part."""
    largest = max(abs(value) for value in want) or 1.0
    return max(abs(one - other) for one, other in zip(got, want, strict=True)) / largest


WIDTH, HEIGHT, LEFT, TOP = 620, 200, 56, 34
COLORS = ("#4269d0", "#d1495b", "#3ca951")


def draw(record: dict[str, Any]) -> str:
    """Return the picture as SVG: a panel for each shown metric, a color for each part."""
    total = LENGTH * len(PARTS)
    height = len(SHOWN) * (HEIGHT + 50) + 40
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 80} {height}" '
            'font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{WIDTH + 80}" height="{height}" fill="white"/>',
    ]
    for number, metric in enumerate(SHOWN):
        parts += _panel(record, metric, TOP + number * (HEIGHT + 50), total)
    for number, (name, _, _) in enumerate(PARTS):
        x = LEFT + 8 + number * LENGTH * WIDTH / total
        parts.append(f'<text x="{x:.0f}" y="{height - 14}" fill="{COLORS[number]}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(record: dict[str, Any], metric: str, top: int, total: int) -> list[str]:
    both = [*record["unbroken"][metric], *record["switched"][metric]]
    low, high = min(0.0, *both), max(both)

    def points(values: Sequence[float], first: int) -> str:
        return " ".join(
            f"{LEFT + (first + i) * WIDTH / (total - 1):.1f},"
            f"{top + HEIGHT - (value - low) / (high - low) * HEIGHT:.1f}"
            for i, value in enumerate(values)
        )

    lines = [
        f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{METRICS[metric]}</text>',
        f'<path d="M{LEFT},{top}V{top + HEIGHT}H{LEFT + WIDTH}" fill="none" stroke="#888"/>',
        f'<text x="{LEFT - 6}" y="{top + 10}" text-anchor="end">{high:.2g}</text>',
        f'<text x="{LEFT - 6}" y="{top + HEIGHT}" text-anchor="end">{low:.2g}</text>',
        f'<text x="{LEFT + WIDTH}" y="{top + HEIGHT + 16}" text-anchor="end">step {total}</text>',
        (
            f'<polyline points="{points(record["unbroken"][metric], 0)}" fill="none" '
            'stroke="#bbb" stroke-width="7" stroke-linejoin="round"><title>unbroken</title>'
            "</polyline>"
        ),
    ]
    for number, (name, _, _) in enumerate(PARTS):
        # A part begins at the last point of the part before, so that the line is whole.
        first = max(0, LENGTH * number - 1)
        values = record["switched"][metric][first : LENGTH * (number + 1)]
        lines.append(
            f'<polyline points="{points(values, first)}" fill="none" stroke="{COLORS[number]}" '
            f'stroke-width="2"><title>{name}</title></polyline>'
        )
    return lines


def write_pages(records: dict[str, Any]) -> int:
    """Write or check the page and its pictures, and return the exit status."""
    page = PAGE.read_text()
    status = 0
    for device, record in records.items():
        page = render(record, device, page)
        drawn = write_or_check(picture(device), draw(record), "engine_switch.py")
        status = max(status, drawn)
    return max(status, write_or_check(PAGE, page, "engine_switch.py"))


def main() -> int:
    """Measure, or write or check the page and its pictures, and return the exit status."""
    records = json.loads(RECORD.read_text())
    if sys.argv[1:] in ([], ["--check"]):
        return write_pages(records)
    parser = argparse.ArgumentParser(prog="engine_switch.py", description=__doc__)
    parser.add_argument("command", choices=["measure"], help="train, and write the record")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    options = parser.parse_args()
    records[options.device] = measure(options.device)
    RECORD.write_text(json.dumps(records, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Accuracy lost by an FP8 rollout and regained by token TIS: a model from scratch, then DAPO.

Each seed has one SFT run; from its result DAPO runs three ways: with a bf16 rollout, an FP8 rollout
with token TIS (C = 2), and an FP8 rollout without correction, side by side on one GPU.

``python recipes/fp8_reproduction/run.py --rollout vllm --device cuda --seeds 0,1 --steps 100
--parallel 6``

A finished run is not repeated. ``--tiny`` is a smoke test for a CPU: ``--rollout local --device cpu
--tiny`` (the local rollout has bf16 only). Further ``key=value`` arguments go to every RL run.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_trainer.config import SFTConfig
from engine_trainer.config.loading import load_config

HERE = Path(__file__).parent
# `prepare` is recipes/quickstart/prepare.py.
sys.path[:0] = [str(HERE), str(HERE.parent / "quickstart")]

from plot import WAYS, draw, read, table  # noqa: E402 - the folders have to be on the path first
from prepare import MODEL, prepare  # noqa: E402  # pyright: ignore[reportMissingImports]

# The shape is Qwen3's architecture with 25 M parameters. Every linear layer is made of whole
# 128×128 blocks.
SHAPE: dict[str, Any] = MODEL | {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "initializer_range": 0.03,
}
TINY: dict[str, Any] = SHAPE | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
TINY_SFT = (
    "run.steps=20",
    "batch_size=16",
    "data.reasoning_gym.size=512",
    "data.reasoning_gym.heldout_size=32",
    "run.log_every=10",
)
TINY_RL = (
    "data.reasoning_gym.skip=512",
    "data.reasoning_gym.size=256",
    "data.reasoning_gym.heldout_size=32",
    "rollout.n=4",
    "rollout.max_new_tokens=24",
    "algorithm.prompts_per_step=8",
    "algorithm.dynamic_sampling.enabled=false",
)
QUANTIZED = "rollout.quantization=fp8"
SETTINGS: dict[str, Sequence[str]] = {
    "bf16": (),
    "fp8_tis": (QUANTIZED, "algorithm.correction={weight: token, cap: 2.0}"),
    "fp8": (QUANTIZED,),
}
KEY_VALUE_BYTES = 2 << 30
"""Bytes of each rollout's KV cache: 512 completions of 160 tokens take 0.7 GB."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of ``engine-train``, which is done when ``finished`` exists."""

    name: str
    arguments: Sequence[str]
    finished: Path
    log: Path


def main() -> None:
    """Run SFT for each seed and RL for each seed and way, then make the table and the picture."""
    options = _options()
    # Packages below reasoning-gym cause these warnings.
    warnings.simplefilter("ignore", SyntaxWarning)
    start = time.monotonic()
    for seed in options.seeds:
        _prepare(options, seed)
    _run_all([_sft(options, seed) for seed in options.seeds], options.parallel)
    print(f"SFT: {time.monotonic() - start:.0f} s", flush=True)
    _run_all(
        [_rl(options, seed, way) for way in options.ways for seed in options.seeds],
        options.parallel,
    )
    print(f"in all: {time.monotonic() - start:.0f} s")
    runs = read(options.output)
    print(table(runs))
    print(f"picture: {draw(runs, options.output / 'fp8_reproduction.png')}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollout", default="vllm")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seeds", type=_integers, default=[0, 1])
    parser.add_argument(
        "--ways", type=lambda text: text.split(","), help=f"of {', '.join(WAYS)}; local: bf16 alone"
    )
    parser.add_argument("--steps", type=int, default=100, help="of RL")
    parser.add_argument("--sft-steps", type=int, default=1200, help="of SFT")
    parser.add_argument("--parallel", type=int, default=6, help="runs at the same time")
    parser.add_argument("--output", type=Path, default=Path("runs/fp8-reproduction"))
    parser.add_argument("--tiny", action="store_true", help="small model, few problems, few steps")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of rl.yaml")
    options = parser.parse_intermixed_args()
    options.ways = options.ways or (["bf16"] if options.rollout == "local" else list(WAYS))
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"--ways: {', '.join(sorted(unknown))} is none of {', '.join(WAYS)}")
    return options


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _folder(options: argparse.Namespace, seed: int) -> Path:
    return options.output / f"seed-{seed}"


def _common(options: argparse.Namespace, seed: int) -> list[str]:
    return [
        f"engine.device={options.device}",
        f"run.seed={seed}",
        f"data.reasoning_gym.seed={seed}",
    ]


def _sft_overrides(options: argparse.Namespace, seed: int) -> list[str]:
    folder = _folder(options, seed)
    return [
        f"engine.model.path={folder / 'model'}",
        f"run.output_dir={folder / 'sft'}",
        *_common(options, seed),
        f"run.steps={options.sft_steps}",
        *(TINY_SFT if options.tiny else ()),
    ]


def _prepare(options: argparse.Namespace, seed: int) -> None:
    folder = _folder(options, seed) / "model"
    if not (folder / "config.json").is_file():
        problems = load_config(
            SFTConfig, HERE / "sft.yaml", _sft_overrides(options, seed)
        ).data.reasoning_gym
        assert problems is not None
        prepare(folder, problems, TINY if options.tiny else SHAPE)


def _sft(options: argparse.Namespace, seed: int) -> Job:
    folder = _folder(options, seed)
    return Job(
        name=f"seed {seed}, SFT",
        arguments=["sft", str(HERE / "sft.yaml"), *_sft_overrides(options, seed)],
        finished=folder / "sft" / "hf",
        log=folder / "sft.log",
    )


def _rl(options: argparse.Namespace, seed: int, way: str) -> Job:
    folder = _folder(options, seed)
    rollout = [f"rollout.name={options.rollout}"]
    if options.rollout != "local" and options.device == "cuda":
        rollout.append(f"rollout.options.gpu_memory_utilization={0.6 / options.parallel:.3f}")
    if options.rollout == "vllm":
        # The cache has a fixed size, because the free memory changes while the other runs start.
        # The rollout is eager, because graphs take longer to make than they save here.
        rollout += [
            f"rollout.options.kv_cache_bytes={KEY_VALUE_BYTES}",
            "rollout.options.enforce_eager=true",
            "rollout.options.truncation=false",
            "rollout.options.deterministic=false",
        ]
    arguments = [
        "rl",
        str(HERE / "rl.yaml"),
        f"engine.model.path={folder / 'sft' / 'hf'}",
        f"run.output_dir={folder / way}",
        f"run.steps={options.steps}",
        f"eval.every={max(1, options.steps // 10)}",
        *_common(options, seed),
        *rollout,
        *SETTINGS[way],
        *(TINY_RL if options.tiny else ()),
        *options.overrides,
    ]
    last = folder / way / "checkpoints" / f"step-{options.steps:06d}" / "manifest.json"
    return Job(
        name=f"seed {seed}, {way}", arguments=arguments, finished=last, log=folder / f"{way}.log"
    )


def _run_all(jobs: Sequence[Job], parallel: int) -> None:
    """Run all unfinished jobs.

    Ends the process when one fails, with the end of its log.
    """
    missing = [job for job in jobs if not job.finished.exists()]
    with ThreadPoolExecutor(parallel) as pool:
        codes = list(pool.map(_run, missing))
    failed = [job for job, code in zip(missing, codes, strict=True) if code]
    for job in failed:
        print(f"--- {job.name} failed, {job.log}:\n{job.log.read_text()[-4000:]}", file=sys.stderr)
    if failed:
        sys.exit(1)


def _run(job: Job) -> int:
    # Each process has one thread, because the runs share the cores. The warnings come from packages
    # below reasoning-gym.
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore::SyntaxWarning",
    }
    start = time.monotonic()
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("w") as log:
        command = [sys.executable, "-m", "engine_trainer", *job.arguments]
        code = subprocess.run(
            command, env=environment, stdout=log, stderr=log, check=False
        ).returncode
    print(
        json.dumps({"run": job.name, "seconds": round(time.monotonic() - start), "status": code}),
        flush=True,
    )
    return code


if __name__ == "__main__":
    main()

"""A step of RL on a Ray cluster, phase by phase: the time of each, and how long the GPUs idle.

``python -m benchmarks.rl_step --shape qwen3-0.6b --gpus 4`` runs recipes/rl/dapo.yaml with
``launcher=ray``, engine-fsdp and a vLLM rollout colocated with every engine rank; ``--rollouts 2``
puts replicas on GPUs of their own, and ``--overlap one_step_off`` lets them generate while the
engine's ranks train. The weights are random, so no model is needed: a completion is as long as it
may be (hardly any token ends it), its reward is drawn from its text. The output is one JSON line:
medians over the steps after ``--warmup``.

``step_s`` is the time from step to step. ``phases_s`` are the loop's own clocks; with overlap they
run at the same time. ``other`` is the share of a step that is neither generation nor update
(log-probs count as update), the median of the steps' shares. ``gpu_idle`` is 1 minus NVML's
utilization (the share of time in which a kernel ran), the mean of the run's GPUs over the steps
that count, and ``gpu_idle_each`` that of each GPU. ``worker_idle`` is the share of time in which no
method of a worker ran, by worker in ``worker_idle_each``. With ``--ends-after`` completions have
different lengths.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.rl_work import MAX_TOKENS, NEW, PROMPT, PROMPTS, N, drawn_reward, prepare
from engine_trainer.rewards import Sample
from engine_trainer.telemetry.logs import read_metrics

RECIPES = Path(__file__).parent.parent / "recipes"

GENERATE, UPDATE = ("generate",), ("log_probs", "train")


def score(sample: Sample) -> float:
    """Return the reward."""
    return drawn_reward(sample.completion)


def overrides(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the arguments of ``engine-train rl`` in addition to the recipe."""
    rollout = [
        f"rollout.name={options.server}",
        f"rollout.quantization={options.quantization}",
        f"rollout.sleep={options.sleep}",
        f"rollout.batch_size={options.sequences // (options.rollouts or options.gpus)}",
        f"rollout.n={options.n}",
        f"rollout.max_new_tokens={options.new}",
    ]
    placed = [f"ray.engines={options.gpus - options.rollouts}"]
    if options.rollouts:
        placed += [f"ray.rollouts={options.rollouts}", f"overlap.mode={options.overlap}"]
    if options.server == "vllm":
        rollout += [
            f"rollout.options.gpu_memory_utilization={options.memory}",
            f"rollout.options.max_model_len={options.prompt + options.new}",
            "rollout.options.kv_cache_for_batch=true",
            "rollout.options.deterministic=false",
            "rollout.options.truncation=false",
            f"rollout.options.memory_saver={options.sleep}",
            f"rollout.options.enforce_eager={options.eager}",
        ]
    return [
        "launcher=ray",
        *placed,
        f"engine.model.path={folder / 'model'}",
        f"engine.device={options.device}",
        f"engine.memory.max_tokens={options.max_tokens}",
        f"data.source={folder / 'problems.jsonl'}",
        "eval=null",
        f"algorithm.prompts_per_step={options.sequences // options.n}",
        f"algorithm.mini_batches={options.mini_batches}",
        f"algorithm.overlong.buffer={options.new // 4}",
        f"algorithm.correction.weight={options.correction}",
        "reward.name=null",
        f"reward.function={Path(__file__)}:score",
        f"run.steps={options.warmup + options.steps}",
        "run.save_every=0",
        "run.save_last=false",
        "run.save_hf=false",
        "run.report=false",
        "run.tensorboard=false",
        f"run.output_dir={folder / 'run'}",
        *rollout,
        *options.more,
    ]


@contextlib.contextmanager
def utilization(path: Path, device: str, gpus: int) -> Iterator[None]:
    """Write NVML's samples of the run's GPUs into ``path``, five per second."""
    if device != "cuda":
        path.touch()
        yield
        return
    shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    with path.open("w") as file:
        query = [
            "nvidia-smi",
            f"--id={shown}",
            "--query-gpu=timestamp,index,utilization.gpu",
            "--format=csv,noheader,nounits",
            "-lms",
            "200",
        ]
        process = subprocess.Popen(query, stdout=file)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def idle(path: Path, begin: float, end: float) -> dict[str, float]:
    """Return 1 minus the mean utilization between two times (unix seconds), by GPU."""
    found: dict[str, list[float]] = {}
    for line in path.read_text().splitlines():
        # The last line may be cut.
        with contextlib.suppress(ValueError):
            stamp, index, value = line.split(", ")
            taken = datetime.strptime(stamp, "%Y/%m/%d %H:%M:%S.%f").astimezone().timestamp()
            if begin <= taken <= end:
                found.setdefault(index, []).append(float(value))
    return {index: round(1 - mean(values) / 100, 3) for index, values in sorted(found.items())}


def row_of(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures of a finished run."""
    rows = [r for r in read_metrics(folder / "run" / "metrics.jsonl") if r["step"] > 0]
    seconds = [b["time"] - a["time"] for a, b in pairwise(rows)][options.warmup - 1 :]
    counted = rows[options.warmup :]
    step = median(seconds)
    names = sorted({name for r in counted for name in r if name.startswith("time/")})
    phases = {
        name.removeprefix("time/"): round(median(r.get(name, 0.0) for r in counted), 3)
        for name in names
    }
    spent = [sum(r.get(f"time/{name}", 0.0) for name in (*GENERATE, *UPDATE)) for r in counted]
    others = [1 - own / whole for own, whole in zip(spent, seconds, strict=True)]
    tokens = median(r["rollout/response_length"] for r in counted) * options.sequences
    idle_each = idle(folder / "gpus.csv", rows[options.warmup - 1]["time"], rows[-1]["time"])
    workers = sorted({n for r in counted for n in r if n.startswith("worker/") and "-" in n})
    return {
        "shape": options.shape,
        "server": options.server,
        "quantization": options.quantization,
        "gpus": options.gpus,
        "rollouts": options.rollouts,
        "overlap": options.overlap,
        "sleep": options.sleep,
        "sequences": options.sequences,
        "new": options.new,
        "mini_batches": options.mini_batches,
        "correction": options.correction,
        "steps": len(seconds),
        "step_s": round(step, 2),
        "min_s": round(min(seconds), 2),
        "max_s": round(max(seconds), 2),
        "phases_s": phases,
        "other": round(median(others), 3) if options.overlap == "none" else None,
        "response_tokens_per_s_gpu": round(tokens / step / options.gpus),
        "mfu_update": round(median(r.get("perf/mfu", 0.0) for r in counted), 3),
        "response_length": round(median(r["rollout/response_length"] for r in counted)),
        "gpu_idle": round(mean(idle_each.values()), 3) if idle_each else None,
        "gpu_idle_each": idle_each,
        "worker_idle": round(median(r.get("worker/idle", 0.0) for r in counted), 3),
        "worker_idle_each": {
            name.split("/")[1]: round(median(r.get(name, 0.0) for r in counted), 3)
            for name in workers
            if name.endswith("/idle")
        },
        "paused_s": round(max(r.get("sync/paused_s", 0.0) for r in counted), 4),
        "continued": round(median(r.get("rollout/continued", 0.0) for r in counted), 3),
        "dropped_groups": sum(r.get("rollout/dropped_groups", 0.0) for r in counted),
        "mismatch_kl": median(r.get("mismatch/kl_k3") or 0.0 for r in counted),
        "stale_tokens": median(r.get("rollout/stale_tokens", 0.0) for r in counted),
    }


def main() -> None:
    """Parse the arguments, run, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3-0.6b", help="of benchmarks/shapes.py")
    parser.add_argument("--server", default="vllm")
    parser.add_argument("--quantization", choices=("none", "fp8"), default="none")
    parser.add_argument("--gpus", type=int, default=4, help="workers in all")
    parser.add_argument(
        "--rollouts",
        type=int,
        default=0,
        help="of them replicas of their own; 0: beside the engine",
    )
    parser.add_argument("--overlap", choices=("none", "one_step_off", "full"), default="none")
    parser.add_argument(
        "--sleep",
        choices=("true", "false"),
        default="true",
        help="whether the rollout gives its memory back",
    )
    parser.add_argument("--sequences", type=int, default=N * PROMPTS, help="completions a step")
    parser.add_argument("--n", type=int, default=N, help="completions a prompt")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=NEW, help="tokens of a completion")
    parser.add_argument(
        "--ends-after",
        type=float,
        default=None,
        help="mean tokens of a completion that no limit ends; without it all are --new long",
    )
    parser.add_argument("--mini-batches", type=int, default=1)
    parser.add_argument(
        "--correction", help="algorithm.correction.weight; none, with overlap token"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, help="of a micro-batch on a rank"
    )
    parser.add_argument("--memory", type=float, default=0.5, help="vLLM's share of a GPU")
    parser.add_argument(
        "--eager", choices=("true", "false"), default="false", help="without CUDA graphs"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("more", nargs="*", metavar="key=value", help="of the recipe")
    options = parser.parse_intermixed_args()
    if options.overlap != "none" and not options.rollouts:
        parser.error(f"--overlap {options.overlap} needs --rollouts")
    if options.warmup < 1:
        parser.error("--warmup: a step is measured from the end of the one before it")
    options.correction = options.correction or ("none" if options.overlap == "none" else "token")
    folder = options.output or Path(tempfile.mkdtemp(prefix="rl-step-"))
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    turns = prepare(
        folder / "model",
        options.shape,
        options.sequences // options.n * 2,
        options.prompt,
        options.ends_after,
    )
    (folder / "problems.jsonl").write_text(
        "".join(json.dumps({"prompt": turn, "answer": "0"}) + "\n" for turn in turns)
    )
    command = [
        sys.executable,
        "-m",
        "engine_trainer",
        "rl",
        str(RECIPES / "rl" / "dapo.yaml"),
        *overrides(options, folder),
    ]
    with utilization(folder / "gpus.csv", options.device, options.gpus):
        subprocess.run(command, check=True, stdout=sys.stderr)
    print(json.dumps(row_of(options, folder)), flush=True)


if __name__ == "__main__":
    main()

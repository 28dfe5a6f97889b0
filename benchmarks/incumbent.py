"""A step of verl's GRPO (FSDP2, colocated vLLM) on the work of ``benchmarks.rl_step``.

vLLM shares the GPU of every rank.
``python -m benchmarks.incumbent --shape qwen3-0.6b --gpus 4`` prints one JSON line: medians of
verl's own clocks of each phase (``timing_s/*``) over the steps after ``--warmup``. The weights are
random, completions have exactly ``--new`` tokens, the reward is drawn from the text, and no network
is needed. Packed sequences, dynamic micro-batches, gradient checkpointing and no offload are as in
verl's own GRPO scripts for small dense models (examples/grpo_trainer, 0.9.1); FSDP2, one GPU per
replica and no KL are as in ``benchmarks.rl_step``. CUDA graphs are on; weights and KV cache are
freed while it trains. ``more`` takes any override of verl's and comes last. The benchmark is made
for verl 0.9.1, which takes transformers below 5.11 and flash-attn; it ran to its end on a CPU and
on two H200s. verl's trainer asks every 2 s whether the completions are there (``ReplayBuffer``):
``gen`` comes in whole multiples of that.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.rl_work import MAX_TOKENS, NEW, PROMPT, PROMPTS, N, drawn_reward, prepare


def score(solution_str: str, **_: Any) -> float:
    """Return the reward; verl names every argument."""
    return drawn_reward(solution_str)


def prepare_all(folder: Path, options: argparse.Namespace) -> None:
    """Write ``folder/model`` with random bf16 weights, and ``folder/prompts.parquet``."""
    from datasets import Dataset

    # There is one epoch: at the start of a second one the trainer would fork the workers of its
    # loader again, within a step.
    rows = options.prompts * (options.warmup + options.steps)
    turns = prepare(folder / "model", options.shape, rows, options.prompt)
    Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": turn}],
                "data_source": "random",
                "reward_model": {"style": "rule", "ground_truth": "0"},
                "extra_info": {"index": i},
            }
            for i, turn in enumerate(turns)
        ]
    ).to_parquet(folder / "prompts.parquet")


def overrides(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the arguments of ``verl.trainer.main_ppo``."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/prompts.parquet",
        f"data.val_files={folder}/prompts.parquet",
        f"data.train_batch_size={options.prompts}",
        f"data.max_prompt_length={options.prompt}",
        f"data.max_response_length={options.new}",
        f"actor_rollout_ref.model.path={folder}/model",
        f"{actor}.strategy=fsdp2",
        f"{actor}.optim.lr=1e-6",
        f"{actor}.ppo_mini_batch_size={options.prompts}",
        f"{actor}.use_dynamic_bsz=true",
        f"{actor}.ppo_max_token_len_per_gpu={options.max_tokens}",
        f"{rollout}.name=vllm",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.n={options.n}",
        f"{rollout}.gpu_memory_utilization={options.memory}",
        f"{rollout}.ignore_eos=true",
        f"{rollout}.max_num_seqs={options.prompts * options.n // options.gpus}",
        f"{rollout}.max_model_len={options.prompt + options.new}",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        "reward.custom_reward_function.name=score",
        "trainer.logger=[console,file]",
        f"trainer.n_gpus_per_node={options.gpus}",
        "trainer.val_before_train=false",
        f"trainer.total_training_steps={options.warmup + options.steps}",
        "trainer.total_epochs=1000",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder}/checkpoints",
        # These cores are claimed also where the machine has fewer: three per GPU, nine for verl's
        # queue of data, one for each small actor that is starting.
        f"ray_kwargs.ray_init.num_cpus={16 + 4 * options.gpus}",
        "+ray_kwargs.ray_init.include_dashboard=false",
        *options.more,
    ]


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of the run.

    It works offline, writes the log as a file, has this repository (for the reward) on every
    process's path, and compiles modules once for all processes.
    """
    path = os.pathsep.join(
        [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    )
    said = {
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "HYDRA_FULL_ERROR": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # A machine whose memory grows as it is used looks full to Ray's monitor, which then kills
        # workers.
        "RAY_memory_monitor_refresh_ms": "0",
        "TOKENIZERS_PARALLELISM": "true",
        "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "",
    }
    return os.environ | said


def row_of(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures of a finished run."""
    rows = [
        json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ][options.warmup :]
    asked = options.prompts * options.n * (options.prompt + options.new)
    if found := {row["perf/total_num_tokens"] for row in rows} - {asked}:
        # verl's trainer continues without the completions that failed.
        sys.exit(
            f"verl's steps had {found} tokens, the work has {asked}; see the errors in {folder}/log"
        )
    names = sorted(
        {
            name
            for row in rows
            for name in row
            if name.startswith("timing_s/") and "agent_loop" not in name
        }
    )
    phases = {
        name.removeprefix("timing_s/"): round(median(row.get(name, 0.0) for row in rows), 3)
        for name in names
    }
    step, tokens = phases.pop("step"), options.prompts * options.n * options.new
    kept = (
        "response_length/mean",
        "prompt_length/mean",
        "perf/mfu/actor",
        "actor/perf/max_memory_reserved_gb",
        "training/rollout_probs_diff_mean",
        "actor/grad_norm",
    )
    return {
        "system": f"verl {options.version}",
        "shape": options.shape,
        "gpus": options.gpus,
        "prompts": options.prompts,
        "n": options.n,
        "prompt": options.prompt,
        "new": options.new,
        "max_tokens": options.max_tokens,
        "more": options.more,
        "steps": len(rows),
        "step_s": step,
        "min_s": round(min(row["timing_s/step"] for row in rows), 3),
        "max_s": round(max(row["timing_s/step"] for row in rows), 3),
        "phases_s": phases,
        "response_tokens_per_s_gpu": round(tokens / step / options.gpus),
        **{name: float(f"{median(row[name] for row in rows):.4g}") for name in kept},
    }


def main() -> None:
    """Parse the arguments, run, and print one JSON line."""
    from importlib.metadata import version

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3-0.6b", help="of benchmarks/shapes.py")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="a step")
    parser.add_argument("--n", type=int, default=N, help="completions a prompt")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=NEW, help="tokens of a completion")
    parser.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, help="of a micro-batch on a rank"
    )
    parser.add_argument("--memory", type=float, default=0.5, help="vLLM's share of a GPU")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument(
        "--output", type=Path, default=None, help="kept; the model in it is made anew"
    )
    parser.add_argument("more", nargs="*", metavar="key=value", help="of verl's configuration")
    options = parser.parse_intermixed_args()
    options.version = version("verl")
    folder = (options.output or Path(tempfile.mkdtemp(prefix="incumbent-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prepare_all(folder, options)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(options, folder)]
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            command,
            env=environment(folder),
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            check=False,
        )
    shutil.rmtree(folder / "model")
    if done.returncode:
        sys.exit(
            f"verl ended with {done.returncode}; the end of "
            f"{folder}/log:\n{(folder / 'log').read_text()[-8000:]}"
        )
    print(json.dumps(row_of(options, folder)), flush=True)


if __name__ == "__main__":
    main()

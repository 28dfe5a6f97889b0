"""Steps of RL with generation beside training, compared with generation alone and updates alone.

``python -m benchmarks.in_flight --shape qwen3-0.6b`` needs two GPUs: one for the engine, one for a
replica of vLLM. Answers have up to ``--new`` tokens, with about exponentially distributed lengths.
It runs ``benchmarks.rl_step`` with ``--overlap none``, where a step generates and then updates, and
with ``--overlap full``, and prints a line of JSON for each run and a table:

- *generation* and *update* (log-probs included) alone are the phases of the run without overlap;
- *step / larger* is the time of a step with overlap over the larger of the two;
- *idle* is 1 minus NVML's utilization of each GPU, and the share of time in which no method of the
  worker ran;
- *pause* is the longest time for which completions waited for a weight sync.

A replica generates longer than an engine of the same GPU updates, so that ``--epochs`` passes over
each step's completions load both. ``--slices`` also runs ``overlap.in_flight=false``, and
``--cache keep`` leaves keys and values of old weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

GENERATE = ("generate", "reward")
UPDATE = ("log_probs", "train")


def command(
    options: argparse.Namespace, overlap: str, steps: tuple[int, int], more: Sequence[str]
) -> list[str]:
    """Return the command of one run, of ``steps`` that are measured after others that are not."""
    given: dict[str, Any] = {
        "shape": options.shape,
        "server": options.server,
        "device": options.device,
        "gpus": 2,
        "rollouts": 1,
        "overlap": overlap,
        "sleep": "false",
        "sequences": options.sequences,
        "n": options.n,
        "new": options.new,
        "ends-after": options.ends_after,
        # The same in both runs: an update with a correction computes log-probs of its own.
        "correction": "token",
        "memory": options.memory,
        "steps": steps[0],
        "warmup": steps[1],
    }
    arguments = [f"--{name}={value}" for name, value in given.items()]
    # A cache for a batch of the longest answers would not fit.
    own = ["rollout.options.kv_cache_for_batch=false"] if options.server == "vllm" else []
    epochs = f"algorithm.epochs={options.epochs}"
    return [
        sys.executable,
        "-m",
        "benchmarks.rl_step",
        *arguments,
        *own,
        epochs,
        *more,
        *options.more,
    ]


def measure(command: Sequence[str]) -> dict[str, Any]:
    """Return the figures of one run, and print them."""
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    line = done.stdout.splitlines()[-1]
    print(line, flush=True)
    figures: dict[str, Any] = json.loads(line)
    return figures


def table(alone: dict[str, Any], runs: dict[str, dict[str, Any]]) -> str:
    """Return the comparison as a table of Markdown."""
    generation = sum(alone["phases_s"].get(name, 0.0) for name in GENERATE)
    update = sum(alone["phases_s"].get(name, 0.0) for name in UPDATE)
    larger = max(generation, update)
    heading = (
        f"{alone['shape']}: {alone['response_length']} tokens an answer; generation alone "
        f"{generation:.1f} s, update alone {update:.1f} s, both in turn {alone['step_s']:.1f} s"
    )
    lines = [
        heading,
        "",
        "| | step | step / larger | GPUs idle | workers idle | pause | continued |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        lines.append(
            f"| {name} | {run['step_s']:.1f} s | {run['step_s'] / larger:.2f} "
            f"| {_shares(run['gpu_idle_each'])} | {_shares(run['worker_idle_each'])} "
            f"| {1000 * run['paused_s']:.0f} ms | {run['continued']:.0%} |"
        )
    return "\n".join(lines)


def _shares(by_name: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in by_name.items()) or "unknown"


def main() -> None:
    """Parse the arguments, make the runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3-0.6b", help="of benchmarks/shapes.py")
    parser.add_argument("--server", default="vllm")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sequences", type=int, default=128, help="completions a step")
    parser.add_argument("--n", type=int, default=8, help="completions a prompt")
    parser.add_argument("--new", type=int, default=4096, help="tokens of the longest answer")
    parser.add_argument("--ends-after", type=float, default=2000, help="mean tokens of an answer")
    parser.add_argument("--epochs", type=int, default=3, help="updates on each completion")
    parser.add_argument("--memory", type=float, default=0.85, help="vLLM's share of its GPU")
    parser.add_argument("--cache", choices=("recompute", "keep"), default="recompute")
    parser.add_argument("--slices", action="store_true", help="run slices, too")
    parser.add_argument("--steps", type=int, default=4, help="measured steps with overlap")
    parser.add_argument("--staleness", type=int, default=2, help="overlap.max_staleness")
    parser.add_argument("more", nargs="*", metavar="key=value", help="of the recipe")
    options = parser.parse_intermixed_args()
    bound = f"overlap.max_staleness={options.staleness}"
    ways = {f"in flight, {options.cache}": ["overlap.in_flight=true"]}
    if options.cache != "recompute":
        ways = {
            name: [*given, f"rollout.options.kv_cache_in_flight={options.cache}"]
            for name, given in ways.items()
        }
    if options.server != "vllm" or options.slices:
        slices = {"slices of 64": ["overlap.in_flight=false"]}
        ways = slices if options.server != "vllm" else ways | slices
    alone = measure(command(options, "none", (2, 1), []))
    runs = {
        name: measure(command(options, "full", (options.steps, 2), [bound, *given]))
        for name, given in ways.items()
    }
    print(table(alone, runs), flush=True)


if __name__ == "__main__":
    main()

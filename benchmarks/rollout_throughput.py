"""Generation throughput of a rollout on one GPU, in bf16 and in block FP8: generated tokens/s.

``python -m benchmarks.rollout_throughput --server vllm --shape qwen3-8b --both`` runs bf16 and then
FP8, each in a process of its own, and prints the ratio. The weights are random, so no model is
needed; every prompt is random and of one length, no token ends a completion. The first ``--warmup``
rounds are not counted: kernels are compiled in them. The output is one JSON line per run, with
``tokens_per_s`` as the median over ``--repeats`` rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.shapes import SHAPES, config, model_folder, weights
from engine_api import ModelSource, RolloutRegistry, SamplingParams

# Seeds cost throughput on SGLang (its deterministic mode): neither server follows a seed here.
OPTIONS: dict[str, dict[str, Any]] = {
    "vllm": {"truncation": False},
    "sglang": {"deterministic": False},
}


def prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Return ``[count][length]`` random tokens, where no two prompts begin alike."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[int]] = torch.randint(
        0, vocab_size, (count, length), generator=generator
    ).tolist()
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one run."""
    own = config(options.shape, options.layers)
    arguments = (
        {"gpu_memory_utilization": options.memory}
        | OPTIONS[options.server]
        | json.loads(options.rollout)
    )
    begin = time.perf_counter()
    rollout = RolloutRegistry.create(
        name=options.server,
        device=options.device,
        model=ModelSource(path=str(model_folder(options.shape, options.layers))),
        pad_token_id=0,
        batch_size=options.sequences,
        dtype=options.dtype,
        quantization=options.quantization,
        **arguments,
    )
    started = time.perf_counter() - begin
    try:
        result = rollout.update_weights(weights(options.shape, options.layers, options.device), 0)
        if options.device == "cuda":
            torch.cuda.empty_cache()
        sampling = SamplingParams(max_new_tokens=options.new)
        rates: list[float] = []
        for seed in range(options.warmup + options.repeats):
            asked = prompts(options.sequences, options.prompt, own["vocab_size"], seed)
            begin = time.perf_counter()
            got = rollout.generate(asked, sampling)
            rates.append(sum(len(c.tokens) for c in got) / (time.perf_counter() - begin))
    finally:
        rollout.close()
    counted = sorted(rates[options.warmup :])
    return {
        "server": options.server,
        "shape": options.shape,
        "layers": own["num_hidden_layers"],
        "quantization": options.quantization,
        "dtype": options.dtype,
        "sequences": options.sequences,
        "prompt": options.prompt,
        "new": options.new,
        "tokens_per_s": round(counted[len(counted) // 2]),
        "min": round(counted[0]),
        "max": round(counted[-1]),
        "first": round(rates[0]),
        "weights_gib": round(result.num_bytes / 2**30, 2),
        "start_s": round(started, 1),
        "options": arguments,
        "torch": torch.__version__,
    }


def both(arguments: list[str]) -> None:
    """Run bf16 and then FP8, and print both rows and their ratio."""
    rows: list[dict[str, Any]] = []
    for quantization in ("none", "fp8"):
        command = [
            sys.executable,
            "-m",
            "benchmarks.rollout_throughput",
            *arguments,
            "--quantization",
            quantization,
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    plain, quantized = (row["tokens_per_s"] for row in rows)
    print(
        json.dumps(
            {
                "server": rows[0]["server"],
                "shape": rows[0]["shape"],
                "fp8_over_bf16": round(quantized / plain, 3),
            }
        ),
        flush=True,
    )


def main() -> None:
    """Parse the arguments, measure, and print one JSON line per run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--server", choices=sorted(OPTIONS), default="vllm")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=None, help="cut the shape to so many layers")
    parser.add_argument("--quantization", choices=("none", "fp8"), default="none")
    parser.add_argument(
        "--both", action="store_true", help="none and fp8 in processes of their own, and the ratio"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=256, help="generated tokens of each completion")
    parser.add_argument(
        "--memory",
        type=float,
        default=0.6,
        help="the server's share of the GPU; the export needs some of the rest",
    )
    parser.add_argument("--rollout", default="{}", help="more rollout.options, as JSON")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    options = parser.parse_args()
    if options.both:
        both([argument for argument in sys.argv[1:] if argument != "--both"])
    else:
        print(json.dumps(measure(options)), flush=True)


if __name__ == "__main__":
    main()

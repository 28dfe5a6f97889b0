"""Generation throughput of a rollout on one GPU with two settings: generated tokens/s.

``python -m benchmarks.rollout_throughput --server vllm --shape qwen3-8b --pair quantization`` runs
bf16 and then FP8, each in a process of its own, and prints the ratio (``PAIRS`` has the other
pairs, ``--both`` is this one). The weights are random, so no model is needed; every prompt is
random, no token ends a completion. The first ``--warmup`` rounds are not counted: kernels are
compiled in them. The output is one JSON line per run, with ``tokens_per_s`` as the median over
``--repeats`` rounds.

``--context N`` measures long completions in a part of their time: prompts have evenly spread
lengths of up to N tokens less the new ones, as sequences of up to N tokens have at any one time of
their generation, and the time of a call for one token each is subtracted. ``--judged K`` compares
the log-probs of K completions with those of transformers in bf16 and the same weights, as
``kl_k3``.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.shapes import SHAPES, config, model_folder, weights
from engine_api import ModelSource, RolloutRegistry, SamplingParams
from engine_api.rollout import Completion

# Seeds cost throughput on SGLang (its deterministic mode): neither server follows a seed here.
OPTIONS: dict[str, dict[str, Any]] = {
    "vllm": {"truncation": False},
    "sglang": {"deterministic": False},
}
# Two settings of the arguments ``--quantization`` and ``--rollout``, by the name of the pair.
PAIRS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "quantization": (("none", {}), ("fp8", {})),
    "cache": (("fp8", {}), ("fp8", {"kv_cache_dtype": "fp8"})),
    "ngram": (
        ("none", {"deterministic": False}),
        ("none", {"deterministic": False, "speculative": "ngram"}),
    ),
}
# Rows of logits that the judge has at a time.
CHUNK = 1024


def prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Return ``[count][length]`` random tokens, where no two prompts begin alike."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[int]] = torch.randint(
        0, vocab_size, (count, length), generator=generator
    ).tolist()
    return rows


def cut(rows: list[list[int]], shortest: int) -> list[list[int]]:
    """Return the beginnings of rows, whose lengths are evenly spread from ``shortest`` on."""
    more = len(rows[0]) - shortest
    last = max(1, len(rows) - 1)
    return [row[: shortest + more * i // last] for i, row in enumerate(rows)]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one run."""
    own = config(options.shape, options.layers)
    arguments = (
        {"gpu_memory_utilization": options.memory}
        | OPTIONS[options.server]
        | json.loads(options.rollout)
    )
    if options.context:
        # The call that is subtracted would otherwise compute the prompts of the other one.
        arguments |= {"prefix_caching": False}
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
        sampling = SamplingParams(max_new_tokens=options.new, temperature=options.temperature)
        rates: list[float] = []
        asked: list[list[int]] = []
        got: list[Completion] = []
        if options.context:
            short = prompts(options.sequences, options.prompt, own["vocab_size"], 1 << 20)
            # Kernels are compiled here where there are no rounds to spare.
            rollout.generate(short, replace(sampling, max_new_tokens=32))
        for seed in range(options.warmup + options.repeats):
            length = options.context - options.new if options.context else options.prompt
            asked = prompts(options.sequences, length, own["vocab_size"], seed)
            prefill = 0.0
            if options.context:
                asked = cut(asked, options.prompt)
                begin = time.perf_counter()
                rollout.generate(asked, replace(sampling, max_new_tokens=1))
                prefill = time.perf_counter() - begin
            begin = time.perf_counter()
            got = rollout.generate(asked, sampling)
            seconds = time.perf_counter() - begin - prefill
            rates.append(sum(len(c.tokens) for c in got) / seconds)
    finally:
        rollout.close()
    counted = sorted(rates[options.warmup :])
    passes = sum(c.passes for c in got)
    figures: dict[str, Any] = {}
    if passes:
        figures["accepted_length"] = round(sum(len(c.tokens) for c in got) / passes, 3)
    if options.judged:
        chosen = got[:: max(1, len(got) // options.judged)][: options.judged]
        figures["kl_k3"] = round(judge(options, asked, chosen), 6)
    return {
        "server": options.server,
        "shape": options.shape,
        "layers": own["num_hidden_layers"],
        "quantization": options.quantization,
        "dtype": options.dtype,
        "sequences": options.sequences,
        "prompt": options.prompt,
        "new": options.new,
        "context": options.context,
        **figures,
        "tokens_per_s": round(counted[len(counted) // 2]),
        "min": round(counted[0]),
        "max": round(counted[-1]),
        "first": round(rates[0]),
        "weights_gib": round(result.num_bytes / 2**30, 2),
        "start_s": round(started, 1),
        "options": arguments,
        "torch": torch.__version__,
    }


@torch.no_grad()
def judge(options: argparse.Namespace, asked: list[list[int]], chosen: list[Completion]) -> float:
    """Return k3 of the rollout's log-probs against transformers', a mean over tokens."""
    # Before the model takes its memory, the rollout's must be free.
    gc.collect()
    own = config(options.shape, options.layers)
    if options.device == "cuda":
        torch.cuda.empty_cache()
    served: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**own), dtype=torch.bfloat16
    ).to(options.device)
    parameters = dict(served.named_parameters())
    for name, value in weights(options.shape, options.layers, options.device):
        parameters[name].copy_(value)
    total = 0.0
    count = 0
    for one in chosen:
        prompt = asked[one.prompt_index]
        ids = torch.tensor([[*prompt, *one.tokens]], device=options.device)
        states = served.model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
        tokens = ids[0, len(prompt) :, None]
        judged = torch.cat(
            [
                (served.lm_head(part).float() / (options.temperature or 1.0))
                .log_softmax(-1)
                .gather(1, wanted)[:, 0]
                for part, wanted in zip(states.split(CHUNK), tokens.split(CHUNK), strict=True)
            ]
        )
        change = judged.cpu() - torch.tensor(one.log_probs)
        total += float((change.expm1() - change).sum())
        count += len(one.tokens)
    return total / count


def compare(pair: str, arguments: list[str], rollout: str) -> None:
    """Run both settings of a pair, and print both rows and the ratio of the second to the first."""
    rows: list[dict[str, Any]] = []
    for quantization, extra in PAIRS[pair]:
        command = [
            sys.executable,
            "-m",
            "benchmarks.rollout_throughput",
            *arguments,
            "--quantization",
            quantization,
            "--rollout",
            json.dumps(json.loads(rollout) | extra),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    first, second = (row["tokens_per_s"] for row in rows)
    names = {"quantization": "fp8_over_bf16", "cache": "fp8_cache_over_fp8", "ngram": "ngram_gain"}
    print(
        json.dumps(
            {
                "server": rows[0]["server"],
                "shape": rows[0]["shape"],
                names[pair]: round(second / first, 3),
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
        "--pair", choices=sorted(PAIRS), help="two settings in processes of their own, and a ratio"
    )
    parser.add_argument(
        "--both",
        action="store_const",
        dest="pair",
        const="quantization",
        help="the same as --pair quantization",
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=256, help="generated tokens of each completion")
    parser.add_argument(
        "--context", type=int, default=0, help="prompts of many lengths, up to so many tokens"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--judged", type=int, default=0, help="completions whose log-probs are compared"
    )
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
    if options.pair is None:
        print(json.dumps(measure(options)), flush=True)
        return
    # What follows --pair and --rollout is given again for each setting.
    own = [argument for argument in sys.argv[1:] if argument != "--both"]
    for name in ("--pair", "--rollout"):
        if name in own:
            place = own.index(name)
            del own[place : place + 2]
    compare(options.pair, own, options.rollout)


if __name__ == "__main__":
    main()

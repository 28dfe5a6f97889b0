"""Mismatch of a mixture of experts with and without the rollout's selection of experts.

``python -m benchmarks.router_replay --shape qwen3-30b-a3b --layers 8`` generates with vLLM in bf16
and in FP8, each in a process of its own. engine-fsdp scores the same tokens on the same weights
twice: with experts of its own selection, and with those that served the tokens in the rollout.
The output is one JSON line for each, with the mismatch of the generated tokens.

Weights are random. Their routers choose less clearly than trained ones, so that more tokens have
other experts. On a CPU, in a few seconds:

``python -m benchmarks.router_replay --shape tiny-moe --server local --device cpu --quantization
none --engine-dtype float32 --sequences 32 --prompt 16 --new 64``
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.rollout_throughput import prompts
from benchmarks.shapes import SHAPES, config, whole_folder
from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    Memory,
    ModelSource,
    Precision,
    RolloutRegistry,
    SamplingParams,
)
from engine_api.batch import ROUTED_EXPERTS
from engine_trainer.algorithms.correction import ratios
from engine_trainer.rl.mismatch import largest_of, mismatch_figures, mismatch_sums
from engine_trainer.run.reference import without_experts


def generate(options: argparse.Namespace, engine: Any, model: ModelSource) -> Batch:
    """Return completions with the rollout's log-probs and experts, each as a document."""
    arguments: dict[str, Any] = {"dtype": options.dtype}
    if options.server != "local":
        arguments["quantization"] = options.quantization
    exporter = RolloutRegistry.create_exporter(
        name=options.server, device=options.device, model=model, **arguments
    )
    if options.server != "local":
        arguments |= {"gpu_memory_utilization": options.memory}
    rollout = RolloutRegistry.create(
        name=options.server,
        device=options.device,
        model=model,
        pad_token_id=0,
        batch_size=options.sequences,
        routed_experts=True,
        **arguments,
        **json.loads(options.rollout),
    )
    vocabulary = config(options.shape, options.layers)["vocab_size"]
    rows = prompts(options.sequences, options.prompt, vocabulary, seed=0)
    try:
        rollout.update_weights(exporter.export(engine), 0)
        found = rollout.generate(rows, SamplingParams(max_new_tokens=options.new, seed=0))
    finally:
        exporter.close()
        rollout.close()
    return Batch.pack(
        [
            {
                "input_ids": [*row, *one.tokens],
                "mask": [0.0] * len(row) + [1.0] * len(one.tokens),
                "rollout_log_probs": [0.0] * len(row) + list(one.log_probs),
                ROUTED_EXPERTS: one.routed_experts,
            }
            for row, one in zip(rows, found, strict=True)
        ]
    )


def compare(engine: Any, batch: Batch) -> Iterator[dict[str, Any]]:
    """Yield the mismatch of the generated tokens, without and with the rollout's experts."""
    for name, given in {"off": without_experts(batch), "replay": batch}.items():
        log_probs = engine.infer_batch(given).log_probs.cpu()
        rollout = batch["rollout_log_probs"]
        found = ratios(log_probs, rollout, batch["mask"], batch.cu_seqlens)
        sums = {k: float(v) for k, v in mismatch_sums(found, log_probs, rollout).items()}
        figures = mismatch_figures(sums, [largest_of(found)])
        kept = ("kl_k1", "kl_k3", "rms", "max", "ess_token", "ess_sequence")
        yield {"routed_experts": name} | {k: figures[f"mismatch/{k}"] for k in kept}


def measure(options: argparse.Namespace) -> None:
    """Generate in one precision, score twice, and print both lines."""
    model = ModelSource(path=str(whole_folder(options.shape, options.layers)))
    settings = EngineConfig(
        model=model,
        optimizer=None,
        precision=Precision(compute=options.engine_dtype or options.dtype),
        memory=Memory(max_tokens=options.max_tokens),
        router_replay=True,
    )
    engine = EngineRegistry.create(backend="fsdp2", device=options.device, config=settings)
    engine.initialize()
    try:
        batch = generate(options, engine, model)
        said = {
            "shape": options.shape,
            "layers": config(options.shape, options.layers)["num_hidden_layers"],
            "server": options.server,
            "rollout": options.dtype if options.quantization == "none" else options.quantization,
            "engine": options.engine_dtype or options.dtype,
            "tokens": int(batch["mask"].sum()),
        }
        for row in compare(engine, batch):
            print(json.dumps(said | row), flush=True)
    finally:
        engine.close()


def main() -> None:
    """Measure one precision, or both in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    shapes = sorted(name for name, shape in SHAPES.items() if "num_experts" in shape)
    parser.add_argument("--shape", choices=shapes, required=True)
    parser.add_argument("--layers", type=int, default=None, help="of the shape; default: all")
    parser.add_argument("--server", default="vllm", help="name of the rollout")
    parser.add_argument("--quantization", choices=("none", "fp8", "both"), default="both")
    parser.add_argument("--dtype", default="bfloat16", help="of the rollout")
    parser.add_argument("--engine-dtype", default=None, help="default: the rollout's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=512, help="most tokens of a completion")
    parser.add_argument("--memory", type=float, default=0.4, help="the server's share of the GPU")
    parser.add_argument("--max-tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--rollout", default="{}", help="more rollout.options, as JSON")
    options = parser.parse_args()
    if options.quantization != "both":
        measure(options)
        return
    # vLLM's memory of one precision is not free for the other one in the same process.
    for quantization in ("none", "fp8"):
        command = [sys.executable, "-m", "benchmarks.router_replay", *sys.argv[1:]]
        subprocess.run([*command, "--quantization", quantization], check=True)


if __name__ == "__main__":
    main()

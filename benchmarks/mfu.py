"""Training throughput on GPUs: tokens/s, MFU and peak memory of ``train_batch`` at Qwen3 shapes.

``python -m benchmarks.mfu --shape 0.6b --tokens 8192 --document 4096`` (or under torchrun). Random weights, so no
model is needed. One JSON line a run; ``tools/benchmarks.py`` is not involved, the figures are put into
docs/benchmarks.md with this command.

MFU = (6 N + 6 L H d S) · tokens/s ÷ (989.5e12 · GPUs): N parameters with the head once (tied), L layers, H query
heads, d head width, S document length; the attention term is the causal half; recomputation does not count;
989.5 TFLOP/s is the H200's dense bf16 peak.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    Memory,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    Precision,
    sft_loss,
)

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
}  # fmt: skip
COMMON = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 40960,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
}  # fmt: skip
PEAK = 989.5e12


def model_folder(shape: str) -> str:
    """A folder that holds only config.json."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(COMMON | SHAPES[shape]))
    return str(folder)


def flops_per_token(shape: dict[str, Any], document: int) -> float:
    """Forward and backward, as the module's docstring says."""
    hidden, layers, width = shape["hidden_size"], shape["num_hidden_layers"], shape["head_dim"]
    heads, kv = shape["num_attention_heads"], shape["num_key_value_heads"]
    attention = hidden * width * (2 * heads + 2 * kv)
    block = attention + 3 * hidden * shape["intermediate_size"] + 2 * hidden + 2 * width
    parameters = layers * block + hidden * shape["vocab_size"] + hidden
    return 6.0 * parameters + 6.0 * layers * heads * width * document


def packed(shape: dict[str, Any], tokens: int, document: int, seed: int) -> Batch:
    """Random documents of one length."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.ones(document)
    weight[0] = 0.0
    ids = torch.randint(0, shape["vocab_size"], (tokens // document, document), generator=generator)
    return Batch.pack([{"input_ids": row, "loss_weight": weight} for row in ids])


def build(options: argparse.Namespace) -> Any:
    """The engine for these options, initialized."""
    config = EngineConfig(
        model=ModelSource(path=model_folder(options.shape), init="random", attention=options.attention),
        optimizer=OptimizerConfig(lr=1e-5), parallelism=Parallelism(ulysses=options.ulysses),
        precision=Precision(compute="float32" if options.device == "cpu" else "bfloat16"),
        memory=Memory(max_tokens=options.tokens, logit_chunk=options.chunk, compile=options.compile,
                      reshard_after_forward=options.reshard, recompute=options.recompute),
        options=json.loads(options.options),
    )  # fmt: skip
    engine = EngineRegistry.create(backend="fsdp2", device=options.device, config=config)
    engine.initialize()
    return engine


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Median step time over ``--steps`` after ``--warmup``; every step has other documents."""
    shape = SHAPES[options.shape]
    begin = time.perf_counter()
    engine = build(options)
    started = time.perf_counter() - begin
    seeds = range(options.warmup + options.steps)
    batches = [packed(shape, options.tokens, options.document, 1000 * engine.topology.dp_rank + s) for s in seeds]
    times = []
    for batch in batches:
        begin = time.perf_counter()
        result = engine.train_batch(batch, sft_loss)  # ends with the gradient norm on the host: no stray work
        times.append(time.perf_counter() - begin)
    step = sorted(times[options.warmup :])[options.steps // 2]
    world = engine.topology.world_size
    rate = options.tokens * engine.topology.dp_size / step
    peak = torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else 0.0
    if options.profile:
        options.profile.write_text(profile(engine, batches))
    row = {
        "shape": options.shape, "gpus": world, "tokens": options.tokens, "document": options.document,
        "attention": getattr(engine, "kernel", options.attention), "compile": options.compile, "chunk": options.chunk,
        "recompute": options.recompute, "ulysses": options.ulysses, "step_ms": round(step * 1e3, 1),
        "tokens_per_s": round(rate), "mfu": round(flops_per_token(shape, options.document) * rate / PEAK / world, 4),
        "peak_gib": round(peak, 1), "loss": round(result.loss, 3), "start_s": round(started, 1),
        "first_step_s": round(times[0], 1), "torch": torch.__version__,
    }  # fmt: skip
    engine.close()
    return row


def profile(engine: Any, batches: list[Batch]) -> str:
    """Where the time of three steps goes: kernels and host functions, by their own time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for batch in batches[:3]:
            engine.train_batch(batch, sft_loss)
    tables = [recorded.key_averages().table(sort_by=key, row_limit=18, max_name_column_width=60)
              for key in ("self_cuda_time_total", "self_cpu_time_total")]  # fmt: skip
    return "\n".join(tables)


def main() -> None:
    """Parse, measure, print one JSON line on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=8192, help="packed tokens a step and data-parallel rank")
    parser.add_argument("--document", type=int, default=4096)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--no-reshard", dest="reshard", action="store_false")
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--ulysses", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--profile", type=Path, help="write a profile of three steps there")
    parser.add_argument("--options", default="{}", help="JSON: the engine's own options")
    row = measure(parser.parse_args())
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

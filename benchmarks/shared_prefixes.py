"""Update and log-prob pass on groups that share their prompt, with and without sharing it.

``python -m benchmarks.shared_prefixes --shape 0.6b`` runs it on one GPU, also under torchrun:
groups of 8 answers of 512 tokens to a prompt of 2,048, loss on the answers, random weights. The two
engines do the same work one after another in one process. Each prints one JSON line; tokens/s are
those of the documents, shared or not, so that the rows compare. The last line has the ratios, and
the distance of the two losses and gradient norms. ``--device cpu --shape tiny --prompt 64
--answer 16`` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.mfu import SHAPES, model_folder
from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    Memory,
    ModelSource,
    OptimizerConfig,
    Precision,
    sft_loss,
)


def groups(options: argparse.Namespace, seed: int) -> Batch:
    """Return a rank's groups: random prompts with random answers, which alone carry loss."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = SHAPES[options.shape]["vocab_size"]

    def draw(count: int) -> torch.Tensor:
        return torch.randint(0, vocabulary, (count,), generator=generator)

    weight = torch.cat([torch.zeros(options.prompt), torch.ones(options.answer)])
    documents: list[dict[str, Any]] = []
    for _ in range(options.groups):
        prompt = draw(options.prompt)
        for _ in range(options.answers):
            ids = torch.cat([prompt, draw(options.answer)])
            documents.append({"input_ids": ids, "loss_weight": weight})
    return Batch.pack(documents)


def build(options: argparse.Namespace, folder: str, *, shared: bool) -> Any:
    """Build the engine and initialize it."""
    config = EngineConfig(
        model=ModelSource(path=folder),
        optimizer=OptimizerConfig(lr=1e-5),
        precision=Precision(compute="float32" if options.device == "cpu" else "bfloat16"),
        memory=Memory(
            max_tokens=options.max_tokens,
            logit_chunk=options.chunk,
            compile=options.compile,
            recompute=options.recompute,
            share_prefixes=shared,
        ),
    )
    engine = EngineRegistry.create(backend="fsdp2", device=options.device, config=config)
    engine.initialize()
    return engine


def time_of(
    options: argparse.Namespace, call: Callable[[Batch], Any], offset: int
) -> tuple[float, Any]:
    """Return the median seconds of a call after the warm-up, and its first result."""
    times: list[float] = []
    results: list[Any] = []
    for step in range(options.warmup + options.steps):
        batch = groups(options, offset + step)
        begin = time.perf_counter()
        results.append(call(batch))
        times.append(time.perf_counter() - begin)
    return sorted(times[options.warmup :])[options.steps // 2], results[0]


def measure(options: argparse.Namespace, folder: str, *, shared: bool) -> dict[str, Any]:
    """Return the row of one engine."""
    on_gpu = options.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    engine = build(options, folder, shared=shared)
    world = engine.topology.world_size
    offset = 1000 * engine.topology.dp_rank

    def infer(batch: Batch) -> float:
        # Reading one number waits for the device.
        return float(engine.infer_batch(batch).log_probs.sum())

    # The update ends with the gradient norm on the host, so no work is left on the device.
    update, first = time_of(options, lambda batch: engine.train_batch(batch, sft_loss), offset)
    log_probs, _ = time_of(options, infer, offset)
    tokens = options.groups * options.answers * (options.prompt + options.answer) * world
    row = {
        "shared": shared,
        "shape": options.shape,
        "gpus": world,
        "attention": engine.kernel,
        "compile": options.compile,
        "recompute": options.recompute,
        "tokens": tokens,
        "micro_batches": first.num_micro_batches,
        "update_ms": round(update * 1e3, 1),
        "update_tokens_per_s": round(tokens / update),
        "log_probs_ms": round(log_probs * 1e3, 1),
        "log_probs_tokens_per_s": round(tokens / log_probs),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if on_gpu else 0.0,
        "first_loss": first.loss,
        "first_grad_norm": first.grad_norm,
        "torch": torch.__version__,
    }
    engine.close()
    return row


def main() -> None:
    """Measure both engines and print their rows and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--answers", type=int, default=8, help="to each prompt")
    parser.add_argument("--answer", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--groups", type=int, default=4, help="on each rank in a step")
    parser.add_argument("--max-tokens", type=int, default=24576, help="of a micro-batch")
    parser.add_argument("--chunk", type=int, default=3328, help="tokens of a chunk of logits")
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument("--recompute", choices=("none", "full"), default="none")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    options = parser.parse_args()
    folder = model_folder(options.shape)
    rows = [measure(options, folder, shared=shared) for shared in (False, True)]
    if int(os.environ.get("RANK", "0")):
        return
    apart, together = rows
    ratios = {
        "update": round(together["update_tokens_per_s"] / apart["update_tokens_per_s"], 2),
        "log_probs": round(together["log_probs_tokens_per_s"] / apart["log_probs_tokens_per_s"], 2),
        "loss_apart": abs(together["first_loss"] / apart["first_loss"] - 1),
        "grad_norm_apart": abs(together["first_grad_norm"] / apart["first_grad_norm"] - 1),
    }
    for row in (*rows, ratios):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

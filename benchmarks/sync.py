"""Weight sync on GPUs, from an engine's fp32 masters to the served weights, in bf16 and in FP8.

``python -m benchmarks.sync --shape qwen3-8b --server vllm`` runs on one GPU, ``torchrun
--nproc-per-node 2 -m benchmarks.sync …`` on several: the engine is spread over all of them (FSDP2,
or with ``--backend megatron`` over ``--tp``, ``--pp``, ``--ep``), and each serves a whole replica
(``--tensor-parallel 1``) or a part. The weights are random, so no model is needed. The output is
one JSON line per row: the median over ``--repeats`` syncs after ``--warmup``, from the call of
``export`` until the served weights are complete on every GPU, and audited unless the row says that
they are not.

``bytes`` are those of the served weights. ``wire`` has the bytes into each GPU from the remaining
GPUs, and their share of NVLink's 450 GB/s.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.shapes import whole_folder
from engine_api import (
    EngineConfig,
    EngineRegistry,
    ModelSource,
    Parallelism,
    Precision,
    RolloutRegistry,
    SamplingParams,
)

SIZES = ("tp", "pp", "ep")
LINK = 450e9
"""Bytes per second in one direction, of NVLink 4 with 18 links."""


@contextmanager
def engine_of(folder: str, device: str, backend: str, layout: Parallelism) -> Iterator[Any]:
    """Open an engine that holds fp32 masters and no optimizer."""
    config = EngineConfig(
        model=ModelSource(path=folder),
        optimizer=None,
        parallelism=layout,
        precision=Precision(compute="bfloat16"),
    )
    engine = EngineRegistry.create(backend=backend, device=device, config=config)
    engine.initialize()
    try:
        yield engine
    finally:
        engine.close()


def timed(engine: Any, exporter: Any, rollout: Any, version: int) -> tuple[float, dict[str, float]]:
    """Return the seconds of one sync on the slowest rank, and the phases on this rank."""
    barrier()
    begin = time.perf_counter()
    result = rollout.update_weights(exporter.export(engine), version)
    torch.cuda.synchronize()
    barrier()
    return time.perf_counter() - begin, dict(result.seconds)


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def wire_bytes(plan: Any, world: int) -> int:
    """Return the bytes that this GPU receives from the remaining ones in one sync."""
    return sum(
        b.wire.num_bytes * (world - 1) // world for b in plan.buckets if b.gathered and world > 1
    )


def measure(
    options: argparse.Namespace, engine: Any, folder: str, quantization: str
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one rollout, audited and not."""
    world = engine.topology.world_size
    model = ModelSource(path=folder)
    begin = time.perf_counter()
    rollout = RolloutRegistry.create(
        name=options.server,
        device="cuda",
        model=model,
        pad_token_id=0,
        dtype="bfloat16",
        quantization=quantization,
        batch_size=max(64, options.sequences),
        **json.loads(options.rollout),
    )
    started = time.perf_counter() - begin
    try:
        versions = itertools.count()
        for audit in (True, False):
            exporter = RolloutRegistry.create_exporter(
                name=options.server,
                device="cuda",
                model=model,
                dtype="bfloat16",
                quantization=quantization,
                options={"audit": audit},
            )
            first, _ = timed(engine, exporter, rollout, next(versions))
            runs = [
                timed(engine, exporter, rollout, next(versions))
                for _ in range(options.warmup + options.repeats)
            ][options.warmup :]
            seconds, phases = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
            plan = exporter._plan  # noqa: SLF001 - a figure for the table
            wire = wire_bytes(plan, world)
            yield {
                "backend": options.backend,
                "layout": {name: getattr(options, name) for name in SIZES},
                "shape": options.shape,
                "layers": options.layers,
                "server": options.server,
                "gpus": world,
                "tensor_parallel": options.tensor_parallel,
                "quantization": quantization,
                "audit": audit,
                "ms": round(seconds * 1e3, 1),
                "min_ms": round(min(s for s, _ in runs) * 1e3, 1),
                "max_ms": round(max(s for s, _ in runs) * 1e3, 1),
                "phases_ms": {name: round(value * 1e3, 1) for name, value in phases.items()},
                "bytes": plan.wire.num_bytes,
                "tensors": len(plan.wire.tensors),
                "gathered_late": len(plan.wire.notes),
                "wire": wire,
                "wire_gb_s": round(wire / seconds / 1e9, 1),
                "link": round(wire / seconds / LINK, 3),
                "first_s": round(first, 2),
                "start_s": round(started, 1),
            }
            exporter.close()
        if options.sequences:
            yield generated(options, rollout, quantization, world)
    finally:
        rollout.close()
        del rollout
        gc.collect()
        torch.cuda.empty_cache()


def generated(
    options: argparse.Namespace, rollout: Any, quantization: str, world: int
) -> dict[str, Any]:
    """Return the generated tokens per second, the median of three rounds after one.

    A round has ``--sequences`` completions of 256 tokens to prompts of 128.
    """
    rates: list[float] = []
    # The prompts differ each time, so that none is found in the prefix cache.
    for seed in range(4):
        drawn = torch.Generator().manual_seed(seed)
        prompts = torch.randint(3, 100_000, (options.sequences, 128), generator=drawn).tolist()
        begin = time.perf_counter()
        completions = rollout.generate(prompts, SamplingParams(max_new_tokens=256))
        rates.append(sum(len(c.tokens) for c in completions) / (time.perf_counter() - begin))
    return {
        "shape": options.shape,
        "layers": options.layers,
        "server": options.server,
        "gpus": world,
        "quantization": quantization,
        "sequences": options.sequences,
        "tokens_per_s": [round(r) for r in rates[1:]],
        "first_repeat": round(rates[0]),
        "median": round(sorted(rates[1:])[1]),
    }


def main() -> None:
    """Parse the arguments, measure, and print one JSON line per row on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=None, help="cut the shape to so many layers")
    parser.add_argument("--backend", default="fsdp2", help="the engine that the weights come from")
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, default=1, help="of the engine")
    parser.add_argument("--server", default="vllm")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="of the server")
    parser.add_argument("--quantization", default="none,fp8")
    parser.add_argument("--rollout", default="{}", help="rollout.options as JSON")
    parser.add_argument(
        "--sequences", type=int, default=0, help="also measure generation with so many at a time"
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    options = parser.parse_args()
    folder = str(whole_folder(options.shape, layers=options.layers))
    layout = Parallelism(**{name: getattr(options, name) for name in SIZES})
    with engine_of(folder, "cuda", options.backend, layout) as engine:
        for quantization in options.quantization.split(","):
            for row in measure(options, engine, folder, quantization):
                if int(os.environ.get("RANK", "0")) == 0:
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

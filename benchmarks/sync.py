"""Weight sync on GPUs, from an engine's fp32 masters to the served weights, in bf16 and in FP8.

``python -m benchmarks.sync --shape qwen3-8b --server vllm`` runs on one GPU, ``torchrun
--nproc-per-node 2 -m benchmarks.sync …`` on several. Several engines and layouts send to the same
rollout one after another, as in ``--backend fsdp2,torchtitan:ep=2``; sizes are those of
``Parallelism``, and the remaining ranks divide the weights. Each GPU serves a whole replica
(``--tensor-parallel 1``) or a part. The weights are random, so no model is needed. The output is
one JSON line per row: the median over ``--repeats`` syncs after ``--warmup``, from the call of
``export`` until the served weights are complete on every GPU, and audited unless the row says that
they are not.

``bytes`` are those of the served weights. ``wire`` has the bytes into each GPU from the remaining
GPUs, and their share of NVLink's 450 GB/s. ``digest`` is made of the checksums of all exported
tensors: engines that send the same bits have the same digest. The exit status is 1 where they
differ, where an engine is not available, and where an audit left tensors out.

``--server-python`` starts a server for each rank in an environment of its own, for an engine whose
library needs another torch than the server does. ``--device cpu`` tries the command without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.mfu import Entry, entries
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
from engine_api.devices import device_of
from engine_api.errors import PluginUnavailable
from engine_api.process_groups import ensure_process_group
from engine_api.rollout import SyncResult
from rollout_fp8.remote.endpoint import ServerProcess

LINK = 450e9
"""Bytes per second in one direction, of NVLink 4 with 18 links."""

START_S = 600.0
"""Seconds for a server in an environment of its own to answer."""


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


@contextmanager
def server_of(python: str, name: str, device: str, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Start a rollout's server on this rank's device in another environment, and yield its URL."""
    config = {**arguments, "model": asdict(arguments["model"])}
    gpus = 1 if device == "cuda" else 0
    server = ServerProcess(name, device, config, gpus=gpus, timeout_s=START_S, python=python)
    try:
        yield server.url
    finally:
        server.close()


def timed(
    engine: Any, exporter: Any, rollout: Any, version: int
) -> tuple[float, SyncResult, Mapping[str, int]]:
    """Return the seconds of one sync on the slowest rank, its result, and the sent checksums."""
    barrier()
    begin = time.perf_counter()
    stream = exporter.export(engine)
    result = rollout.update_weights(stream, version)
    if (kind := device_of(stream.device.type)).has_streams:
        kind.module.synchronize()
    barrier()
    return time.perf_counter() - begin, result, stream.checksums()


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def wire_bytes(plan: Any, world: int) -> int:
    """Return the bytes that this GPU receives from the remaining ones in one sync."""
    return sum(
        b.wire.num_bytes * (world - 1) // world for b in plan.buckets if b.gathered and world > 1
    )


def digest_of(checksums: Mapping[str, int]) -> str:
    """Return a digest of every tensor's checksum, which is the same for the same bits."""
    return hashlib.blake2b(repr(sorted(checksums.items())).encode(), digest_size=8).hexdigest()


@contextmanager
def rollout_of(
    options: argparse.Namespace, folder: str, quantization: str
) -> Iterator[tuple[Any, float]]:
    """Open the rollout, and yield it with the seconds of its start."""
    arguments: dict[str, Any] = {
        "model": ModelSource(path=folder),
        "pad_token_id": 0,
        "dtype": "bfloat16",
        "quantization": quantization,
        "batch_size": max(64, options.sequences),
        **json.loads(options.rollout),
    }
    hosted = options.server.removesuffix("-server")
    server = (
        server_of(options.server_python, hosted, options.device, arguments)
        if options.server_python
        else nullcontext(None)
    )
    begin = time.perf_counter()
    with server as url:
        rollout = RolloutRegistry.create(
            name=options.server,
            device=options.device,
            **arguments,
            **({} if url is None else {"url": url}),
        )
        try:
            yield rollout, time.perf_counter() - begin
        finally:
            rollout.close()
            del rollout
            gc.collect()
            device_of(options.device).empty_cache()


def measure(
    options: argparse.Namespace,
    engine: Any,
    entry: Entry,
    folder: str,
    quantization: str,
    rollout: Any,
    started: float,
    versions: Iterator[int],
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one engine's syncs, audited and not."""
    world = engine.topology.world_size
    for audit in (True, False):
        exporter: Any = RolloutRegistry.create_exporter(
            name=options.server,
            device=options.device,
            model=ModelSource(path=folder),
            dtype="bfloat16",
            quantization=quantization,
            options={"audit": audit},
        )
        first, result, checksums = timed(engine, exporter, rollout, next(versions))
        runs = [
            timed(engine, exporter, rollout, next(versions))[:2]
            for _ in range(options.warmup + options.repeats)
        ][options.warmup :]
        seconds, result = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
        plan = exporter._plan  # noqa: SLF001 - a figure for the table
        wire = wire_bytes(plan, world)
        yield {
            "backend": entry.backend,
            "layout": entry.text,
            "shape": options.shape,
            "layers": options.layers,
            "server": options.server,
            "gpus": world,
            "tensor_parallel": options.tensor_parallel,
            "quantization": quantization,
            "audit": audit,
            "audited": result.audited,
            "ms": round(seconds * 1e3, 1),
            "min_ms": round(min(s for s, _ in runs) * 1e3, 1),
            "max_ms": round(max(s for s, _ in runs) * 1e3, 1),
            "phases_ms": {name: round(value * 1e3, 1) for name, value in result.seconds.items()},
            "bytes": plan.wire.num_bytes,
            "tensors": len(plan.wire.tensors),
            "quantized": result.num_quantized,
            "gathered_late": len(plan.wire.notes),
            "wire": wire,
            "wire_gb_s": round(wire / seconds / 1e9, 1),
            "link": round(wire / seconds / LINK, 3),
            "first_s": round(first, 2),
            "start_s": round(started, 1),
            "digest": digest_of(checksums) if audit else None,
        }
        if options.profile:
            name = "-".join(("audited" if audit else "plain", quantization, entry.backend))
            path = options.profile / f"{name}-rank{engine.topology.rank}.json"
            record(options.device, path, engine, exporter, rollout, next(versions))
        exporter.close()


def record(device: str, path: Path, engine: Any, exporter: Any, rollout: Any, version: int) -> None:
    """Write the trace of one more sync, its launches and its kernels, for chrome://tracing."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    kinds = [ProfilerActivity.CPU]
    if device == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    with profiler(activities=kinds) as recorded:
        timed(engine, exporter, rollout, version)
    path.parent.mkdir(parents=True, exist_ok=True)
    recorded.export_chrome_trace(str(path))


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


def measure_all(options: argparse.Namespace, folder: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of every quantization and engine, or why an engine cannot be had here.

    All engines of a quantization send to one rollout, whose start takes longer than their syncs.
    """
    available: list[Entry] = []
    for entry in entries(options.backend):
        try:
            EngineRegistry.resolve(
                model_type="language_model", backend=entry.backend, device=options.device
            )
            available.append(entry)
        except PluginUnavailable as error:
            yield {"backend": entry.backend, "layout": entry.text, "unavailable": str(error)}
    for quantization in options.quantization.split(","):
        versions = itertools.count()
        with rollout_of(options, folder, quantization) as (rollout, started):
            for entry in available:
                with engine_of(folder, options.device, entry.backend, entry.layout) as engine:
                    yield from measure(
                        options,
                        engine,
                        entry,
                        folder,
                        quantization,
                        rollout,
                        started,
                        versions,
                    )
                gc.collect()
                device_of(options.device).empty_cache()
            if options.sequences:
                yield generated(options, rollout, quantization, world_size())


def world_size() -> int:
    """Return the number of ranks."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=None, help="cut the shape to so many layers")
    parser.add_argument("--backend", default="fsdp2", help="NAME[:SIZE=N[+SIZE=N…]] by commas")
    parser.add_argument("--device", default="cuda", help="cpu: a trial, whose times mean nothing")
    parser.add_argument("--server", default="vllm")
    parser.add_argument(
        "--server-python",
        help="Python of the servers' own environment, for --server vllm-server or sglang-server",
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, help="of the server")
    parser.add_argument("--quantization", default="none,fp8")
    parser.add_argument("--rollout", default="{}", help="rollout.options as JSON")
    parser.add_argument(
        "--sequences", type=int, default=0, help="also measure generation with so many at a time"
    )
    parser.add_argument("--profile", type=Path, help="write a trace of one more sync there")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    options = parser.parse_args(arguments)
    if options.server_python and not options.server.endswith("-server"):
        parser.error(f"--server-python: expected --server vllm-server, got {options.server}")
    return options


def main() -> int:
    """Measure, print one JSON line per row on rank 0, and return the exit status."""
    options = parse()
    folder = str(whole_folder(options.shape, layers=options.layers))
    # It outlives the engines: a rollout in this process has joined it.
    ensure_process_group(options.device, timedelta(minutes=10))
    failed = False
    digests: dict[str, set[str]] = {}
    for row in measure_all(options, folder):
        # A server that keeps weights in packed form cannot read all of them back (vLLM's experts on
        # a CPU).
        failed |= "unavailable" in row or row.get("audit") != row.get("audited")
        if row.get("digest"):
            digests.setdefault(row["quantization"], set()).add(row["digest"])
        if int(os.environ.get("RANK", "0")) == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()
    return int(failed or any(len(found) > 1 for found in digests.values()))


if __name__ == "__main__":
    sys.exit(main())

"""Seconds of a checkpoint of engine-megatron: portable, and in Megatron's own format.

``torchrun --nproc-per-node 2 -m benchmarks.saves --shape qwen3-0.6b`` runs it, with ``--tp``,
``--pp``, ``--ep`` for layouts other than data parallel; ``--shim`` simulates CUDA on the CPU. The
weights are random, in bfloat16 on float32 masters, after one AdamW step. The output is one JSON
line per format: medians over ``--repeats`` after one more, from the call until all ranks return.

``gather_s`` is the part of ``save_s`` that the boxes cost before any file is written. The files are
read from memory, not from the disk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.shapes import config as shape_config
from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    sft_loss,
)
from engine_api.config import Precision
from engine_conformance.shim import install

ROW = {"input_ids": [5, 9, 7, 8, 3], "loss_weight": [0.0, 1.0, 1.0, 1.0, 1.0]}


def trained(arguments: argparse.Namespace, model: Path, checkpoint: str) -> Any:
    """Return an engine after one step, so that there are moments."""
    engine = EngineRegistry.create(
        backend="megatron",
        device="cpu" if arguments.shim else "cuda",
        config=EngineConfig(
            model=ModelSource(path=str(model), init="random"),
            optimizer=OptimizerConfig(),
            precision=Precision(compute="bfloat16"),
            options={"checkpoint": checkpoint},
            parallelism=Parallelism(tp=arguments.tp, pp=arguments.pp, ep=arguments.ep),
        ),
    )
    engine.initialize()
    engine.train_batch(Batch.pack([ROW]), sft_loss)
    return engine


def seconds(engine: Any, work: Callable[[], object]) -> float:
    """Return the time from the first rank's call to the last rank's return."""
    engine.comm.all_gather(None)
    begin = time.perf_counter()
    work()
    engine.comm.all_gather(None)
    return time.perf_counter() - begin


def measure(engine: Any, folder: Path, repeats: int) -> dict[str, float]:
    """Return the medians and the checkpoint's size."""
    rows: dict[str, list[float]] = {"save_s": [], "gather_s": [], "load_s": []}
    for index in range(repeats + 1):
        target = folder / f"step-{index}"
        own = engine.options.checkpoint != "portable"
        gather = 0.0 if own else seconds(engine, engine.state_shards)
        found = {
            # The functions are called at once, within this turn of the loop.
            "save_s": seconds(engine, lambda: engine.save_checkpoint(target)),  # noqa: B023
            "gather_s": gather,
            "load_s": seconds(engine, lambda: engine.load_checkpoint(target)),  # noqa: B023
        }
        size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
        engine.comm.all_gather(None)
        if engine.topology.rank == 0:
            shutil.rmtree(target)
        for name, value in found.items():
            rows[name] += [value] * (index > 0)
    return {name: round(statistics.median(values), 2) for name, values in rows.items()} | {
        "mib": size >> 20
    }


def main() -> None:
    """Print one line per format."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shim", action="store_true")
    for size in ("tp", "pp", "ep"):
        parser.add_argument(f"--{size}", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.shim:
        install()
    # Both engines use this group.
    dist.init_process_group("gloo" if arguments.shim else "nccl")
    with tempfile.TemporaryDirectory() as name:
        model = Path(name)
        (model / "config.json").write_text(
            json.dumps(shape_config(arguments.shape, arguments.layers))
        )
        for checkpoint in ("portable", "megatron"):
            engine = trained(arguments, model, checkpoint)
            folder = Path(engine.comm.all_gather(name)[0])
            figures = measure(engine, folder, arguments.repeats)
            if engine.topology.rank == 0:
                print(
                    json.dumps(
                        {"checkpoint": checkpoint, "sizes": dict(engine.topology.sizes)} | figures
                    ),
                    flush=True,
                )
            engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

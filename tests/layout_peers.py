"""Engines of several layouts in one process, for the tests of packages with layouts.

``python layout_peers.py BACKEND MODEL SIZES…`` is the program of a rank, where SIZES is a JSON
object of parallelism, in which ``compile`` asks for compiled blocks and ``lora`` for adapters of
that rank on all linear layers. Each engine lives until all are built, and each must return the
log-probs of the first, and train alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    LoraConfig,
    Memory,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    sft_loss,
)

LENGTHS = (5, 17, 1, 12)
NEAR = 1e-4


def run_peers(backend: str, folder: Path, ranks: int, layouts: Sequence[dict[str, int]]) -> None:
    """Run the program on so many ranks, with an engine of each layout."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    sizes = [json.dumps(one) for one in layouts]
    done = subprocess.run(
        [*launcher, f"--nproc-per-node={ranks}", __file__, backend, str(folder), *sizes],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def create(backend: str, folder: str, sizes: dict[str, int], recompute: bool) -> Any:
    compiled = bool(sizes.pop("compile", 0))
    rank = sizes.pop("lora", 0)
    config = EngineConfig(
        model=ModelSource(path=folder),
        parallelism=Parallelism(**sizes),
        optimizer=OptimizerConfig(name="torch.optim.SGD", lr=0.1),
        memory=Memory(recompute="full" if recompute else "none", compile=compiled),
        lora=LoraConfig(rank=rank, target_modules="all-linear") if rank else None,
    )
    engine = EngineRegistry.create(backend=backend, device="cpu", config=config)
    engine.initialize()
    return engine


def make_batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in LENGTHS:
        ids = torch.randint(5, 100, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "loss_weight": [0.0] + [1.0] * (length - 1)})
    return Batch.pack(rows)


def main(backend: str, folder: str, *texts: str) -> None:
    """Compare engines of all layouts, which live at the same time."""
    engines = [
        create(backend, folder, json.loads(text), recompute=index % 2 == 1)
        for index, text in enumerate(texts)
    ]
    found: list[tuple[torch.Tensor, float, float, torch.Tensor]] = []
    for engine in engines:
        # All ranks have the same documents, so that the loss is the same in each layout.
        step = engine.train_batch(make_batch(1), sft_loss)
        if engine.config.lora is not None:
            # A has no gradient while B is zero.
            step = engine.train_batch(make_batch(1), sft_loss)
        outputs = engine.infer_batch(make_batch(0)).log_probs
        export = torch.cat([one.flatten() for _, one in engine.get_per_tensor_param()])
        found.append((outputs, step.loss, step.grad_norm, export))
    want = found[0]
    for text, got in zip(texts, found, strict=True):
        assert float((got[0] - want[0]).abs().max()) < NEAR, text
        assert abs(got[1] - want[1]) < NEAR, (text, got[1], want[1])
        assert abs(got[2] - want[2]) < NEAR * want[2], (text, got[2], want[2])
        assert float((got[3] - want[3]).abs().max()) < NEAR, text
    # In another order than that of their making.
    for engine in engines:
        engine.close()
    assert not dist.is_initialized()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The program of the ranks of test_layouts: engines of several layouts in one process.

Run it as ``python layout_peers.py MODEL SIZES…``, where SIZES is a JSON object of parallelism, in
which ``compile`` asks for compiled blocks. Each engine lives until all are built, and each must
return the log-probs of the first, and train alike.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    Memory,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    sft_loss,
)

LENGTHS = (5, 17, 1, 12)
NEAR = 1e-4


def create(folder: str, sizes: dict[str, int], recompute: bool) -> Any:
    compiled = bool(sizes.pop("compile", 0))
    config = EngineConfig(
        model=ModelSource(path=folder),
        parallelism=Parallelism(**sizes),
        optimizer=OptimizerConfig(name="torch.optim.SGD", lr=0.1),
        memory=Memory(recompute="full" if recompute else "none", compile=compiled),
    )
    engine = EngineRegistry.create(backend="torchtitan", device="cpu", config=config)
    engine.initialize()
    return engine


def make_batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in LENGTHS:
        ids = torch.randint(5, 100, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "loss_weight": [0.0] + [1.0] * (length - 1)})
    return Batch.pack(rows)


def main(folder: str, *texts: str) -> None:
    """Compare engines of all layouts, which live at the same time."""
    engines = [
        create(folder, json.loads(text), recompute=index % 2 == 1)
        for index, text in enumerate(texts)
    ]
    found: list[tuple[torch.Tensor, float, float, torch.Tensor]] = []
    for engine in engines:
        # All ranks have the same documents, so that the loss is the same in each layout.
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

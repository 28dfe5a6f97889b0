"""The program of the ranks of engine-fsdp's test_float8, which compute the same documents in FP8.

Run it as ``python float8_peers.py MODEL OUT``. Each rank writes the log-probs before and after a
step, by the name of a layout, and the weights after it, to the folder ``OUT``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    Precision,
    sft_loss,
)

LENGTHS = (30, 17, 9)
LAYOUTS = {
    "one": Parallelism(),
    "shards": Parallelism(),
    "replicas": Parallelism(dp_replicate=2),
    "ulysses": Parallelism(ulysses=2),
}


def make_batch() -> Batch:
    """Return documents of which no length is a multiple of 16."""
    generator = torch.Generator().manual_seed(0)
    documents = []
    for length in LENGTHS:
        ids = torch.randint(0, 256, (length,), generator=generator)
        weight = torch.ones(length)
        weight[0] = 0.0
        documents.append({"input_ids": ids, "loss_weight": weight})
    return Batch.pack(documents)


def run(folder: str, recipe: str, layout: str) -> dict[str, Any]:
    """Return log-probs before and after a step, the weights after it, and the loss."""
    config = EngineConfig(
        model=ModelSource(path=folder),
        optimizer=OptimizerConfig(lr=1e-2),
        precision=Precision(compute="float8"),
        parallelism=LAYOUTS[layout],
        options={"float8_recipe": recipe, "float8_emulate": True},
    )
    engine = EngineRegistry.create(backend="fsdp2", device="cpu", config=config)
    engine.initialize()
    batch = make_batch()
    before = engine.infer_batch(batch).log_probs
    loss = engine.train_batch(batch, sft_loss).loss
    after = engine.infer_batch(batch).log_probs
    weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    engine.close()
    return {"before": before, "after": after, "weights": weights, "loss": loss}


def main(folder: str, out: str) -> None:
    """Compute on every layout of two ranks."""
    torch.set_num_threads(1)
    found = {layout: run(folder, "tensorwise", layout) for layout in list(LAYOUTS)[1:]}
    torch.save(found, Path(out, f"rank-{os.environ['RANK']}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])

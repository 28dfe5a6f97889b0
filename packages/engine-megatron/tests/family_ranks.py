"""Functions that test_families runs inside ranks."""

from __future__ import annotations

from typing import Any

from layout_ranks import create
from torch import Tensor

from engine_api import Batch, OptimizerConfig, sft_loss
from engine_api.config import Memory
from engine_api.weights import ShardSpec

# One step moves a weight by its gradient.
SGD = OptimizerConfig(name="torch.optim.SGD", lr=1.0, clip_norm=None)

Shards = list[tuple[str, Tensor, ShardSpec]]
Result = tuple[dict[int, Tensor], dict[str, Tensor], Shards, dict[str, Tensor]]


def compute(
    path: str,
    parallelism: dict[str, int],
    options: dict[str, Any],
    documents: list[list[int]],
    **config: Any,
) -> Result:
    """Return log-probs by document, exported weights whole and as shards, and the moved weights."""
    engine = create(
        path, parallelism, options, optimizer=SGD, memory=Memory(max_tokens=128), **config
    )
    engine.initialize()
    place = engine.topology
    own = range(place.dp_rank, len(documents), place.dp_size)
    rows = [
        {"input_ids": documents[i], "loss_weight": [0.0] + [1.0] * (len(documents[i]) - 1)}
        for i in own
    ]
    batch = Batch.pack(rows)
    log_probs = engine.infer_batch(batch).log_probs.split([len(documents[i]) for i in own])
    before = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    shards = [(name, part.clone(), spec) for name, part, spec in engine.get_per_tensor_param_shard()]
    engine.train_batch(batch, sft_loss)
    after = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    engine.close()
    return dict(zip(own, log_probs, strict=True)), before, shards, after

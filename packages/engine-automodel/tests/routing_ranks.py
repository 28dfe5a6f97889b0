"""Functions that the ranks of test_routing run."""

from __future__ import annotations

from typing import Any

import torch

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    ModelSource,
    Parallelism,
    Precision,
)
from engine_automodel.modules import Experts


def collect_dtypes(path: str, ids: list[int]) -> set[torch.dtype]:
    """Return the dtypes in which spread experts get the weights of their tokens."""
    config = EngineConfig(
        model=ModelSource(path=path),
        optimizer=None,
        parallelism=Parallelism(ep=2),
        precision=Precision(compute="bfloat16"),
    )
    engine: Any = EngineRegistry.create(backend="automodel", device="cpu", config=config)
    engine.initialize()
    found: set[torch.dtype] = set()
    for module in engine.module.modules():
        if isinstance(module, Experts):
            # It runs behind FSDP's hook.
            module.register_forward_pre_hook(lambda _, given: found.add(given[2].dtype))
    engine.infer_batch(Batch.pack([{"input_ids": ids, "loss_weight": [0.0] * len(ids)}]))
    engine.close()
    return found

"""Engines of one process on folders of models: their making, and what they compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import documents, log_probs, oracle

from engine_api import Batch, EngineConfig, EngineRegistry, ModelSource, OptimizerConfig, sft_loss

# Largest difference in nats, for float32 sums in two orders.
NEAR = 1e-4


def create_on(backend: str, folder: Path, **model: Any) -> Any:
    """Return an engine on a CPU whose optimizer changes nothing."""
    config = EngineConfig(
        model=ModelSource(path=str(folder), **model),
        optimizer=OptimizerConfig(name="torch.optim.SGD", lr=0.0),
    )
    return EngineRegistry.create(backend=backend, device="cpu", config=config)


def check_right(backend: str, folder: Path) -> None:
    """Compare inference and a training pass with transformers, per token."""
    engine = create_on(backend, folder)
    engine.initialize()
    model = oracle(str(folder))
    want = torch.cat([log_probs(model, ids) for ids in documents()])
    batch = Batch.pack(
        [
            {"input_ids": ids.tolist(), "loss_weight": [0.0] + [1.0] * (len(ids) - 1)}
            for ids in documents()
        ]
    )
    assert float((engine.infer_batch(batch).log_probs.double() - want).abs().max()) < NEAR
    trained_tokens = len(want) - len(documents())
    loss = engine.train_batch(batch, sft_loss).loss
    assert loss == pytest.approx(-float(want.sum()) / trained_tokens, abs=NEAR)
    engine.close()


def edit_config(folder: Path, **fields: Any) -> None:
    """Change fields of a folder's ``config.json``."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))

"""A training whose model has an MTP head, which tests of engines run inside ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tested_device import DEVICE
from torch import Tensor

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    sft_loss,
)
from engine_api.errors import ConfigError

IDS = [5, 9, 7, 8, 3, 11]
BATCH = Batch.pack([{"input_ids": IDS, "loss_weight": [0.0] + [1.0] * (len(IDS) - 1)}])


def create(path: str, backend: str, **config: Any) -> Any:
    """Return an initialized engine."""
    settings = {
        "model": ModelSource(path=path),
        "optimizer": OptimizerConfig(lr=1e-2),
    } | config
    engine = EngineRegistry.create(
        backend=backend,
        device=DEVICE,
        config=EngineConfig(**settings),
    )
    engine.initialize()
    return engine


def train_and_save(
    path: str,
    backend: str,
    scratch: str,
    *,
    parallelism: dict[str, int] | None = None,
    dtype: torch.dtype | None = None,
    **config: Any,
) -> dict[str, Tensor]:
    """Save a trained model and a resumed one, and return the weights that both have.

    The folders are ``saved`` and ``resumed`` in ``scratch``. Before the second engine is made, the
    checkpoint is all that is left of the first.
    """
    config |= {"parallelism": Parallelism(**(parallelism or {}))}
    engine = create(path, backend, **config)
    engine.train_batch(BATCH, sft_loss)
    exported = {
        name: one.to("cpu", copy=True) for name, one in engine.get_per_tensor_param(dtype=dtype)
    }
    engine.save_hf(Path(scratch, "saved"), dtype=dtype)
    engine.save_checkpoint(Path(scratch, "checkpoint")).result()
    engine.close()
    engine = create(path, backend, **config)
    engine.load_checkpoint(Path(scratch, "checkpoint"))
    engine.save_hf(Path(scratch, "resumed"), dtype=dtype)
    engine.close()
    return exported


def refuse(path: str, backend: str) -> str:
    """Return the text of the error by which an engine refuses the folder."""
    try:
        create(path, backend).close()
    except ConfigError as error:
        return str(error)
    raise AssertionError("the folder was not refused")

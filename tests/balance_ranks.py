"""The step with a balance loss that tests of engines run, in this process or inside ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from balance_reference import DOCUMENTS, pack
from tested_device import DEVICE
from torch import Tensor

from engine_api import (
    EngineConfig,
    EngineRegistry,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    sft_loss,
)
from engine_api.config import Memory

COEFFICIENT = 0.5
# Weights in float32 that move far lose few digits of their gradient.
RATE = 64.0


def create(path: str, backend: str, **config: Any) -> Any:
    """Return an engine that is not initialized yet, with plain gradient descent."""
    settings = {
        "optimizer": OptimizerConfig(name="torch.optim.SGD", lr=RATE, clip_norm=None),
        "options": {"balance_loss": COEFFICIENT},
    } | config
    return EngineRegistry.create(
        backend=backend,
        device=DEVICE,
        config=EngineConfig(model=ModelSource(path=path), **settings),
    )


def step(
    path: str,
    backend: str,
    *,
    parallelism: Mapping[str, int] | None = None,
    order: Sequence[int] = range(len(DOCUMENTS)),
    memory: Mapping[str, Any] | None = None,
    first_alone: bool = False,
    **config: Any,
) -> tuple[dict[str, Tensor], Any, Any]:
    """Return a step's gradients by name of the saved weight, its output and its log-probs before.

    The documents are given in ``order``, to the data-parallel ranks in turn, or with
    ``first_alone`` all of them to the first one.
    """
    engine = create(
        path,
        backend,
        parallelism=Parallelism(**(parallelism or {})),
        memory=Memory(**({"max_tokens": 64} | dict(memory or {}))),
        **config,
    )
    engine.initialize()
    place = engine.topology
    own = list(order)[place.dp_rank :: place.dp_size]
    if first_alone:
        own = list(order) if place.dp_rank == 0 else []
    batch = pack([DOCUMENTS[i] for i in own])
    log_probs = engine.infer_batch(batch).log_probs.cpu()
    before = {name: one.to("cpu", copy=True) for name, one in engine.get_per_tensor_param()}
    output = engine.train_batch(batch, sft_loss)
    after = {name: one.to("cpu", copy=True) for name, one in engine.get_per_tensor_param()}
    engine.close()
    moved = {name: (before[name].double() - after[name].double()) / RATE for name in before}
    return moved, output, log_probs

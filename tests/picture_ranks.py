"""The step on images that tests of engines run, in this process or inside ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tested_device import DEVICE
from torch import Tensor

from engine_api import (
    EngineConfig,
    EngineRegistry,
    Memory,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    sft_loss,
)
from engine_conformance.fixtures.pictures import PictureDocument, draw_document, picture_batch

# Weights in float32 that move far lose few digits of their gradient.
RATE = 64.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """Results of a step on one rank."""

    order: list[int]
    """Numbers of its documents."""
    log_probs: Tensor
    loss: float
    micro_batches: int
    gradients: dict[str, Tensor]
    """Gradients by name of the saved weight."""


def draw_documents() -> list[PictureDocument]:
    """Return documents with an image, none, two images, and three tokens of text."""
    return [
        draw_document(1, 3, (4, 6), 5),
        draw_document(2, 9),
        draw_document(3, 2, (2, 4), 3, (6, 4)),
        draw_document(4, 3),
    ]


def create(path: str, backend: str = "veomni", **config: Any) -> Any:
    """Return an engine that is not initialized yet, with plain gradient descent."""
    source = ModelSource(path=path, freeze=config.pop("freeze", ()))
    settings = {
        "optimizer": OptimizerConfig(name="torch.optim.SGD", lr=RATE, clip_norm=None),
        "memory": Memory(max_tokens=24),
    } | config
    whole = EngineConfig(model=source, **settings)
    return EngineRegistry.create(backend=backend, device=DEVICE, config=whole)


def read_weights(engine: Any) -> dict[str, Tensor]:
    """Return copies of all weights by their saved names."""
    return {name: one.to("cpu", copy=True) for name, one in engine.get_per_tensor_param()}


def step(
    path: str, order: Sequence[int], *, parallelism: Mapping[str, int] | None = None, **config: Any
) -> Step:
    """Infer and train on documents in ``order``, which data-parallel ranks take in turn."""
    engine = create(path, parallelism=Parallelism(**(parallelism or {})), **config)
    engine.initialize()
    place = engine.topology
    own = list(order)[place.dp_rank :: place.dp_size]
    batch = picture_batch([draw_documents()[i] for i in own], "cpu")
    log_probs = engine.infer_batch(batch).log_probs.cpu()
    before = read_weights(engine)
    output = engine.train_batch(batch, sft_loss)
    after = read_weights(engine)
    engine.close()
    return Step(
        order=own,
        log_probs=log_probs,
        loss=output.loss,
        micro_batches=output.num_micro_batches,
        gradients={n: (before[n].double() - after[n].double()) / RATE for n in before},
    )

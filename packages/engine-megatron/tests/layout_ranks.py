"""What runs inside the ranks of test_layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine_api import Batch, EngineConfig, EngineRegistry, ModelSource, OptimizerConfig, Parallelism, sft_loss
from engine_api.config import Memory
from engine_api.errors import EngineError

ROWS = [
    {"input_ids": [5, 9, 7, 8, 3], "loss_weight": [0.0, 1.0, 1.0, 0.5, 1.0]},
    {"input_ids": [11, 2], "loss_weight": [0.0, 1.0]},
    {"input_ids": [4, 4, 200, 31, 8, 90, 1], "loss_weight": [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]},
]


def create(path: str, parallelism: dict[str, int], options: dict[str, Any], **config: Any) -> Any:
    settings = {"optimizer": OptimizerConfig(lr=1e-2, clip_norm=1.0), "memory": Memory(max_tokens=8)} | config
    return EngineRegistry.create(
        backend="megatron",
        device="cpu",
        config=EngineConfig(
            model=ModelSource(path=path), parallelism=Parallelism(**parallelism), options=options, **settings
        ),
    )


def steps(path: str, parallelism: dict[str, int], options: dict[str, Any], **config: Any) -> tuple[list[float], dict[str, Tensor]]:  # fmt: skip
    """Figures of two steps with an inference between them, and the weights after."""
    engine = create(path, parallelism, options, **config)
    engine.initialize()
    place = engine.topology
    batch = Batch.pack(ROWS[place.dp_rank :: place.dp_size])
    first = engine.train_batch(batch, sft_loss)
    log_probs = engine.infer_batch(batch).log_probs
    second = engine.train_batch(batch, sft_loss)
    figures = [first.loss, first.grad_norm, second.loss, second.grad_norm]
    if place.dp_size == 1:
        figures += log_probs.tolist()
    weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param(bucket_bytes=1 << 12)}
    engine.close()
    return figures, weights


class BreaksOnce:
    """A loss that raises at its first call in this process."""

    def __init__(self) -> None:
        self.broken = False

    def __call__(self, outputs: Any, batch: Any) -> Any:
        if not self.broken:
            self.broken = True
            raise KeyError("loss")
        return sft_loss(outputs, batch)


def a_loss_that_raises(path: str, parallelism: dict[str, int]) -> tuple[str, float]:
    """The error's type, and the gradient norm of the step after it."""
    engine = create(path, parallelism, {})
    engine.initialize()
    batch, loss = Batch.pack(ROWS), BreaksOnce()
    raised = ""
    try:
        engine.train_batch(batch, loss)
    except (KeyError, EngineError) as error:
        raised = type(error).__name__
    norm = engine.train_batch(batch, sft_loss).grad_norm
    engine.close()
    return raised, norm


def another_layout_at_once(path: str) -> tuple[str, bool]:
    """What a second engine with other sizes gets, and whether the first still works."""
    first, second = create(path, {"tp": 2}, {}, optimizer=None), create(path, {"pp": 2}, {}, optimizer=None)
    first.initialize()
    try:
        second.initialize()
        error = ""
    except EngineError as caught:
        error = str(caught)
    finite = bool(torch.isfinite(first.infer_batch(Batch.pack(ROWS)).log_probs).all())
    first.close()
    return error, finite

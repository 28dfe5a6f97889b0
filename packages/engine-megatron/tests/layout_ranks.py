"""Functions that test_layouts runs inside ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
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
from engine_api.config import Memory
from engine_api.errors import EngineError
from engine_api.results import LossOutput
from engine_api.weights import ShardSpec

Shards = list[tuple[str, Tensor, ShardSpec]]
ROWS = [
    {"input_ids": [5, 9, 7, 8, 3], "loss_weight": [0.0, 1.0, 1.0, 0.5, 1.0]},
    {"input_ids": [11, 2], "loss_weight": [0.0, 1.0]},
    {"input_ids": [4, 4, 200, 31, 8, 90, 1], "loss_weight": [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]},
]


def create(
    path: str,
    parallelism: dict[str, int],
    options: dict[str, Any],
    model_type: str = "language_model",
    backend: str = "megatron",
    **config: Any,
) -> Any:
    """Return an engine, not yet initialized."""
    settings = {
        "optimizer": OptimizerConfig(lr=1e-2, clip_norm=1.0),
        "memory": Memory(max_tokens=8),
    } | config
    return EngineRegistry.create(
        model_type=model_type,
        backend=backend,
        device=DEVICE,
        config=EngineConfig(
            model=ModelSource(path=path),
            parallelism=Parallelism(**parallelism),
            options=options,
            **settings,
        ),
    )


def train_two_steps(
    path: str,
    parallelism: dict[str, int],
    options: dict[str, Any],
    rows: list[Any] = ROWS,
    **config: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """Return figures of two steps with an inference between them, and the weights after."""
    engine = create(path, parallelism, options, **config)
    engine.initialize()
    place = engine.topology
    batch = Batch.pack(rows[place.dp_rank :: place.dp_size])
    first = engine.train_batch(batch, sft_loss)
    log_probs = engine.infer_batch(batch).log_probs
    second = engine.train_batch(batch, sft_loss)
    figures = [first.loss, first.grad_norm, second.loss, second.grad_norm]
    if place.dp_size == 1:
        figures += [first.num_micro_batches, *log_probs.tolist()]
    weights = {
        name: tensor.clone() for name, tensor in engine.get_per_tensor_param(bucket_bytes=1 << 12)
    }
    engine.close()
    return figures, weights


def count_threads(path: str, parallelism: dict[str, int]) -> list[int]:
    """Return the number of this process's threads after each of three engines was used."""
    left: list[int] = []
    for _ in range(3):
        train_two_steps(path, parallelism, {})
        left.append(len(list(Path("/proc/self/task").iterdir())))
    return left


def infer(path: str, parallelism: dict[str, int], options: dict[str, Any]) -> list[float]:
    """Return log-probs and entropies of an engine without an optimizer, in three micro-batches."""
    engine = create(path, parallelism, options, optimizer=None)
    engine.initialize()
    outputs = engine.infer_batch(Batch.pack([*ROWS, ROWS[0]]), temperature=0.7, entropy=True)
    engine.close()
    return [*outputs.log_probs.tolist(), *outputs.entropy.tolist()]


class SquaredValues:
    """The sum of the weighted squares of the values."""

    needs = ("values",)

    def __call__(self, outputs: Any, batch: Any) -> Any:
        return LossOutput(loss=(batch.loss_weight * outputs.values.square()).sum())


def train_values(
    path: str, parallelism: dict[str, int], options: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    """Return figures of a value model's step, the values after it, and the weights."""
    engine = create(
        path,
        parallelism,
        options,
        model_type="value_model",
        optimizer=OptimizerConfig(lr=1e-2, eps=1e-5),
    )
    engine.initialize()
    batch = Batch.pack(ROWS)
    step = engine.train_batch(batch, SquaredValues())
    figures = [step.loss, step.grad_norm, *engine.infer_batch(batch).values.tolist()]
    weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    engine.close()
    return figures, weights


def compare_exports(
    path: str, parallelism: dict[str, int], options: dict[str, Any], **config: Any
) -> tuple[list[str], list[str], Shards]:
    """Return names whose whole export differs from the folder's, the order, and this rank's boxes.

    Exports are compared bit for bit; boxes are in the masters' dtype.
    """
    engine = create(path, parallelism, options, **config)
    engine.initialize()
    stored = load_file(f"{path}/model.safetensors")
    wrong: list[str] = []
    for dtype in (None, torch.bfloat16):
        found = {
            name: tensor.clone()
            for name, tensor in engine.get_per_tensor_param(dtype=dtype, bucket_bytes=1 << 12)
        }
        wrong += sorted(set(found) ^ set(stored))
        wrong += [
            name
            for name in found
            if not torch.equal(found[name], stored[name].to(dtype or torch.float32))
        ]
    shards = [
        (name, part.clone(), spec) for name, part, spec in engine.get_per_tensor_param_shard()
    ]
    engine.close()
    return wrong, list(stored), shards


def train_and_save(
    path: str, parallelism: dict[str, int], options: dict[str, Any], folder: str, **config: Any
) -> None:
    """Train one step and save a checkpoint."""
    engine = create(path, parallelism, options, **config)
    engine.initialize()
    place = engine.topology
    engine.train_batch(Batch.pack(ROWS[place.dp_rank :: place.dp_size]), sft_loss)
    engine.save_checkpoint(folder)
    engine.close()


def load_and_train(
    path: str, parallelism: dict[str, int], options: dict[str, Any], folder: str, **config: Any
) -> tuple[float, dict[str, Tensor]]:
    """Return the gradient norm of a step after a load, and the weights after it."""
    engine = create(path, parallelism, options, **config)
    engine.initialize()
    engine.load_checkpoint(folder)
    place = engine.topology
    norm = engine.train_batch(Batch.pack(ROWS[place.dp_rank :: place.dp_size]), sft_loss).grad_norm
    weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    engine.close()
    return norm, weights


class _NaNGradient(torch.autograd.Function):
    """The identity, with NaN as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        return grads[0] * float("nan")


def nan_gradient_loss(outputs: Any, batch: Any) -> Any:
    """Return a finite loss, whose gradient is NaN for documents that begin as the first row."""
    result = sft_loss(outputs, batch)
    if int(batch.input_ids[0]) != ROWS[0]["input_ids"][0]:
        return result
    return type(result)(loss=_NaNGradient.apply(result.loss), metrics=result.metrics)


def skip_a_step(
    path: str, parallelism: dict[str, int], options: dict[str, Any], **config: Any
) -> tuple[str | None, bool, float]:
    """Return why a step was skipped, whether all weights stayed, and the next step's norm."""
    engine = create(path, parallelism, options, **config)
    engine.initialize()
    place = engine.topology
    batch = Batch.pack(ROWS[place.dp_rank :: place.dp_size])
    before = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    skipped = engine.train_batch(batch, nan_gradient_loss).skipped
    same = all(torch.equal(tensor, before[name]) for name, tensor in engine.get_per_tensor_param())
    norm = engine.train_batch(batch, sft_loss).grad_norm
    engine.close()
    return skipped, same, norm


class BreaksOnce:
    """A loss that raises at its first call in this process."""

    def __init__(self) -> None:
        self.broken = False

    def __call__(self, outputs: Any, batch: Any) -> Any:
        if not self.broken:
            self.broken = True
            raise KeyError("loss")
        return sft_loss(outputs, batch)


def train_after_an_error(
    path: str, parallelism: dict[str, int], options: dict[str, Any], alone: bool = False
) -> tuple[str, float]:
    """Return the type of a loss's error, and the gradient norm of the step after it.

    With ``alone`` the loss raises on the last rank only.
    """
    engine = create(path, parallelism, options)
    engine.initialize()
    last = engine.topology.rank == engine.topology.world_size - 1
    batch = Batch.pack(ROWS)
    loss = BreaksOnce() if last or not alone else sft_loss
    raised = ""
    try:
        engine.train_batch(batch, loss)
    except (KeyError, EngineError) as error:
        raised = type(error).__name__
    norm = engine.train_batch(batch, sft_loss).grad_norm
    engine.close()
    return raised, norm


def build_two_layouts(path: str) -> tuple[str, bool]:
    """Return the error of a second engine with other sizes, and whether the first still works."""
    first = create(path, {"tp": 2}, {}, optimizer=None)
    second = create(path, {"pp": 2}, {}, optimizer=None)
    first.initialize()
    try:
        second.initialize()
        error = ""
    except EngineError as caught:
        error = str(caught)
    finite = bool(torch.isfinite(first.infer_batch(Batch.pack(ROWS)).log_probs).all())
    first.close()
    return error, finite


def train_dense_with_experts(
    path: str,
    dense_path: str,
    parallelism: dict[str, int],
    options: dict[str, Any],
    dense: dict[str, int],
) -> tuple[list[float], list[float], str]:
    """Return loss and norm of a dense engine's step next to an engine with experts, and alone.

    The third value is the error of an engine with experts that is built second.
    """

    def step(engine: Any) -> list[float]:
        place = engine.topology
        result = engine.train_batch(Batch.pack(ROWS[place.dp_rank :: place.dp_size]), sft_loss)
        return [result.loss, result.grad_norm]

    first = create(path, parallelism, options)
    first.initialize()
    step(first)
    second = create(dense_path, dense, {})
    second.initialize()
    together = step(second)
    step(first)
    first.close()
    step(second)
    second.close()
    alone = create(dense_path, dense, {})
    alone.initialize()
    figures = step(alone)
    error = ""
    try:
        create(path, parallelism, options).initialize()
    except EngineError as caught:
        error = str(caught)
    alone.close()
    return together, figures, error


def fail_to_build(path: str, what: str) -> str:
    """Return the error of a build in which the last rank runs out of memory.

    An engine can be built afterwards.
    """
    import engine_megatron.engine as module

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError(what)

    raised = ""
    original = getattr(module, what)
    if torch.distributed.get_rank() == 1:
        setattr(module, what, fail)
    try:
        create(path, {"tp": 2}, {}).initialize()
    except (EngineError, MemoryError) as error:
        raised = type(error).__name__
    finally:
        setattr(module, what, original)
    engine = create(path, {"tp": 2}, {})
    engine.initialize()
    engine.close()
    return raised

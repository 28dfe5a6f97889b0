"""The step over spread experts that test_experts runs inside of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from balance_reference import DOCUMENTS, rows_of
from tested_device import DEVICE
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    sft_loss,
)
from engine_api.batch import ROUTED_EXPERTS
from engine_api.config import Memory
from engine_api.errors import EngineError
from engine_api.results import LossOutput

# Weights in float32 that move far lose few digits of their gradient.
RATE = 64.0
SGD = OptimizerConfig(name="torch.optim.SGD", lr=RATE, clip_norm=None)


@dataclass(frozen=True)
class Found:
    """Results of a step on one rank."""

    gradients: dict[str, Tensor]
    """Distances that the saved weights have moved, divided by the rate, in float64."""

    log_probs: dict[int, Tensor]
    """Log-probs, or values, before the step by number of the rank's documents."""

    loss: float
    norm: float
    metrics: Mapping[str, Any]

    kept: dict[str, tuple[int, ...]]
    """Shapes of the parts of experts' weights that this rank keeps, by name."""


def make(
    path: str, *, layout: Mapping[str, int], model_type: str = "language_model", **config: Any
) -> Any:
    """Return an engine that is not initialized yet."""
    memory = Memory(**({"max_tokens": 64} | config.pop("memory", {})))
    return EngineRegistry.create(
        model_type=model_type,
        backend=config.pop("backend", "fsdp2"),
        device=DEVICE,
        config=EngineConfig(
            model=ModelSource(path=path),
            **{"optimizer": SGD, "parallelism": Parallelism(**layout), "memory": memory} | config,
        ),
    )


class SquaredValues:
    """The loss ``Σ_t w_t v_t²`` of a value model."""

    needs = ("values",)

    def __call__(self, outputs: Any, batch: Any) -> LossOutput:
        """Return the sum."""
        return LossOutput(loss=(batch.loss_weight * outputs.values.square()).sum(), metrics={})


def step(
    path: str,
    *,
    layout: Mapping[str, int],
    order: Sequence[int] = range(len(DOCUMENTS)),
    first_alone: bool = False,
    experts: Sequence[Tensor] | None = None,
    **config: Any,
) -> Found:
    """Return what a step finds (see ``Found``).

    Args:
        path: folder of the model.
        layout: sizes of the parallelism.
        order: the documents, which the data-parallel ranks take in turn.
        first_alone: True gives all documents to the first data-parallel rank.
        experts: each document's experts, which are replayed.
        **config: fields of the engine's configuration.
    """
    is_critic = config.get("model_type") == "value_model"
    engine = make(path, layout=layout, **config)
    engine.initialize()
    place = engine.topology
    own = list(order)[place.dp_rank :: place.dp_size]
    if first_alone:
        own = list(order) if place.dp_rank == 0 else []
    rows = rows_of([DOCUMENTS[i] for i in own])
    if experts is not None:
        rows = [row | {ROUTED_EXPERTS: experts[i]} for i, row in zip(own, rows, strict=True)]
    batch = Batch.pack(rows)
    outputs = engine.infer_batch(batch)
    found = outputs.values if is_critic else outputs.log_probs
    scores = found.double().cpu().split([len(DOCUMENTS[i]) for i in own])
    before = {name: one.to("cpu", copy=True) for name, one in engine.get_per_tensor_param()}
    kept = {
        name: tuple(one.to_local().shape)
        for name, one in engine.module.named_parameters()
        if ".experts." in name and isinstance(one, DTensor)
    }
    output = engine.train_batch(batch, SquaredValues() if is_critic else sft_loss)
    after = {name: one.to("cpu", copy=True) for name, one in engine.get_per_tensor_param()}
    engine.close()
    moved = {name: (before[name].double() - after[name].double()) / RATE for name in before}
    return Found(
        gradients=moved,
        log_probs=dict(zip(own, scores, strict=True)),
        loss=output.loss,
        norm=output.grad_norm,
        metrics=output.metrics,
        kept=kept,
    )


def refuse(path: str, **config: Any) -> tuple[str, str, str]:
    """Return the kind, the subject and the reason of the error that building an engine raises."""
    engine = make(path, **config)
    try:
        engine.initialize()
    except EngineError as error:
        subject = getattr(error, "field", None) or getattr(error, "where", "")
        return type(error).__name__, subject, f"{error}"
    finally:
        engine.close()
    return "", "", ""


def journey(
    path: str,
    stages: Sequence[Mapping[str, int]],
    folder: str,
    *,
    moves: bool = False,
    backends: Sequence[str] = (),
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the loss of a step in each stage, and the weights after the last.

    A stage loads the checkpoint of the stage before it. ``moves`` takes the engine off its device
    and back after each step. ``backends`` has the engine of each stage (empty: fsdp2).
    """
    losses: list[float] = []
    weights: dict[str, Tensor] = {}
    adamw = OptimizerConfig(lr=1e-2, clip_norm=0.5)
    for number, layout in enumerate(stages):
        backend = backends[number] if backends else "fsdp2"
        engine = make(path, layout=layout, optimizer=adamw, backend=backend)
        engine.initialize()
        place = engine.topology
        if number:
            engine.load_checkpoint(Path(folder) / f"step-{number:06d}")
        own = [DOCUMENTS[i] for i in range(len(DOCUMENTS))][place.dp_rank :: place.dp_size]
        losses.append(engine.train_batch(Batch.pack(rows_of(own)), sft_loss).loss)
        if moves:
            engine.to("cpu")
            engine.to(DEVICE)
        engine.save_checkpoint(Path(folder) / f"step-{number + 1:06d}")
        engine.save_hf(Path(folder) / "hf")
        weights = {name: one.to("cpu", copy=True) for name, one in engine.get_per_tensor_param()}
        engine.close()
    return losses, weights

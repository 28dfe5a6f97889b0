"""Functions that run inside a rank: build an engine, do the case's work with it, and close it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine_api.batch import ROUTED_EXPERTS, Batch
from engine_api.contract import Adapter, Engine
from engine_api.errors import EngineError
from engine_api.losses import LossFn
from engine_api.results import TokenOutputs, Topology, TrainOutput
from engine_conformance.cases._case import must
from engine_conformance.cases._losses import FIRST_KEY, default_loss
from engine_conformance.cases._target import Setup
from engine_conformance.fixtures import PackedDocuments
from engine_conformance.rank_failure import REFUSED

__all__ = [
    "InferCall",
    "InferredAndTrained",
    "RankOutputs",
    "Trained",
    "build",
    "caught",
    "checked",
    "infer",
    "infer_and_train",
    "infer_on_rank",
    "local_batch",
    "opened",
    "save",
    "step",
    "summary",
    "to_batch",
    "train",
    "whole_weights",
]

T = TypeVar("T")


@contextmanager
def opened(setup: Setup) -> Iterator[Engine]:
    """Yield an initialized engine and close it at the end.

    An error that is about the model, which a case expects the engine to build, has a note that
    names the model's family.
    """
    engine = setup.create()
    try:
        engine.initialize()
    # An engine may raise anything over a model that it was not written for.
    except Exception as error:
        part = getattr(error, "field", "").partition(".")[0]
        file = Path(setup.config.model.path, "config.json")
        if file.exists() and (part == "model" or not isinstance(error, EngineError)):
            error.add_note(f"{REFUSED} {json.loads(file.read_text()).get('model_type')}")
        raise
    try:
        yield engine
    finally:
        engine.close()


def build(setup: Setup) -> EngineError | None:
    """Build and initialize this engine, close it, and return the error, if any."""
    engine = None
    try:
        engine = setup.create()
        engine.initialize()
    except EngineError as error:
        return error
    finally:
        if engine is not None:
            engine.close()
    return None


def to_batch(documents: PackedDocuments, device: str = "cpu") -> Batch:
    """Return the contract's batch of these documents, all fields included."""
    fields = {
        name: torch.tensor(array, device=device) for name, array in documents.per_token().items()
    }
    ids = torch.tensor(documents.input_ids, device=device)
    fields["key"] = ids + FIRST_KEY
    if documents.routed_experts is not None:
        fields[ROUTED_EXPERTS] = torch.tensor(documents.routed_experts, device=device)
    return Batch(
        input_ids=ids, cu_seqlens=torch.tensor(documents.cu_seqlens, device=device), fields=fields
    )


def own_documents(count: int, topology: Topology) -> list[int]:
    """Return the indices of this data-parallel rank's documents, which are dealt in turn.

    Some ranks may get none.
    """
    return list(range(topology.dp_rank, count, topology.dp_size))


def local_batch(engine: Engine, documents: PackedDocuments, device: str) -> Batch:
    """Return this rank's dp shard of ``documents``."""
    mine = own_documents(len(documents.lengths), engine.topology)
    if not mine:
        return Batch.pack([]).to(device)
    return to_batch(documents.take(mine), device)


def caught(call: Callable[[], Any]) -> EngineError | None:
    """Return the contract's error that ``call`` raises, or None.

    Any other exception passes through.
    """
    try:
        call()
    except EngineError as error:
        return error
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class InferCall:
    """Arguments of one ``infer_batch``."""

    documents: PackedDocuments
    temperature: float = 1.0
    entropy: bool = False
    adapter: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOutputs:
    """One rank's outputs for its own documents, by field, on the CPU."""

    dp_rank: int
    dp_size: int
    fields: dict[str, Tensor]


def infer_on_rank(engine: Engine, call: InferCall, device: str) -> RankOutputs:
    """Run one call on this rank's dp shard."""
    batch = local_batch(engine, call.documents, device)
    outputs = engine.infer_batch(
        batch, temperature=call.temperature, entropy=call.entropy, adapter=call.adapter
    )
    return RankOutputs(
        dp_rank=engine.topology.dp_rank,
        dp_size=engine.topology.dp_size,
        fields=_fields(outputs, device),
    )


def _here() -> str:
    return f"rank {os.environ.get('RANK', '0')}"


def _fields(outputs: TokenOutputs, device: str) -> dict[str, Tensor]:
    checked(outputs, TokenOutputs, "infer_batch")
    named = {name: getattr(outputs, name) for name in ("log_probs", "entropy", "values")}
    given = {name: value for name, value in named.items() if value is not None}
    for name, value in given.items():
        must(
            isinstance(value, Tensor),
            name,
            f"a {type(value).__name__}, not a tensor",
            where=_here(),
        )
        must(value.dtype == torch.float32, name, f"{value.dtype}, not float32", where=_here())
        must(not value.requires_grad, name, "not detached", where=_here())
        there = torch.device(device).type
        must(
            value.device.type == there,
            name,
            f"on {value.device}, the engine's device is {there}",
            where=_here(),
        )
    return {name: value.cpu() for name, value in given.items()}


_NUMBERS = {
    "loss": float,
    "grad_norm": float,
    "lr": float,
    "denominator": float,
    "num_tokens": int,
    "num_micro_batches": int,
    "weight_version": int,
}


def checked(output: T, kind: type[T], called: str) -> T:
    """Return ``output``, which must be a ``kind`` whose numbers are Python's own.

    Raises:
        ConformanceFailure: naming the field and the rank.
    """
    must(
        isinstance(output, kind),
        called,
        f"returned a {type(output).__name__}, not {kind.__name__}",
        where=_here(),
    )
    for one in fields(kind):  # type: ignore[arg-type] - the contract's results are dataclasses
        value = getattr(output, one.name)
        number = _NUMBERS.get(one.name)
        if number is not None:
            _number(f"{called}'s {one.name}", value, number)
        if one.name == "metrics":
            must(
                isinstance(value, Mapping),
                f"{called}'s metrics",
                f"a {type(value).__name__}",
                where=_here(),
            )
            for name, metric in value.items():
                _number(f"{called}'s metric {name}", metric, float)
        if one.name == "skipped":
            must(
                value is None or isinstance(value, str),
                f"{called}'s skipped",
                f"{value!r}",
                where=_here(),
            )
    return output


def _number(name: str, value: object, kind: type) -> None:
    right = isinstance(value, (int, kind)) and not isinstance(value, bool)
    must(right, name, f"a {type(value).__name__}, not {kind.__name__}", where=_here())


def step(
    engine: Engine,
    setup: Setup,
    documents: PackedDocuments,
    *,
    loss: LossFn | None = None,
    denominator: float | None = None,
    temperature: float = 1.0,
) -> TrainOutput:
    """Run one ``train_batch`` on this rank's dp shard.

    Without ``loss`` the model type's own loss is used.
    """
    batch = local_batch(engine, documents, setup.device)
    chosen = loss or default_loss(setup.model_type)
    output = engine.train_batch(batch, chosen, denominator=denominator, temperature=temperature)
    return checked(output, TrainOutput, "train_batch")


def infer(setup: Setup, calls: Sequence[InferCall]) -> list[RankOutputs]:
    """Return the outputs of ``calls``, with one engine for all of them."""
    with opened(setup) as engine:
        return [infer_on_rank(engine, call, setup.device) for call in calls]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A rank's results of some steps.

    Weights travel from rank 0 only; every rank has its own ``digest``.
    """

    outputs: tuple[TrainOutput, ...]
    version: int
    order: tuple[str, ...]
    digest: str
    weights: dict[str, Tensor] = field(repr=False)


def train(
    setup: Setup,
    batches: Sequence[PackedDocuments],
    *,
    loss: LossFn | None = None,
    denominators: Sequence[float] | None = None,
    temperature: float = 1.0,
    load: Path | None = None,
    save_to: Path | None = None,
    adapter: Adapter = "merged",
) -> Trained:
    """Run one ``train_batch`` per batch, then export.

    A load before the first batch and a save after the last are optional.
    """
    with opened(setup) as engine:
        if load is not None:
            engine.load_checkpoint(load)
        divisors = denominators or [None] * len(batches)
        outputs = [
            step(engine, setup, batch, loss=loss, denominator=divisor, temperature=temperature)
            for batch, divisor in zip(batches, divisors, strict=True)
        ]
        if save_to is not None:
            save(engine, save_to)
        return summary(engine, outputs, adapter=adapter)


@dataclass(frozen=True, kw_only=True, slots=True)
class InferredAndTrained:
    """A rank's outputs before a step, and the step."""

    outputs: list[RankOutputs]
    trained: Trained = field(repr=False)


def infer_and_train(
    setup: Setup, calls: Sequence[InferCall], batch: PackedDocuments
) -> InferredAndTrained:
    """Make the calls, then one ``train_batch``, with one engine."""
    with opened(setup) as engine:
        outputs = [infer_on_rank(engine, call, setup.device) for call in calls]
        trained = summary(engine, [step(engine, setup, batch)])
        return InferredAndTrained(outputs=outputs, trained=trained)


def summary(
    engine: Engine, outputs: Sequence[TrainOutput], *, adapter: Adapter = "merged"
) -> Trained:
    """Return the results of ``outputs`` with the engine's current weights."""
    weights = whole_weights(engine, adapter=adapter)
    return Trained(
        outputs=tuple(outputs),
        version=engine.weight_version,
        order=tuple(weights),
        digest=digest(weights),
        weights=weights if engine.topology.rank == 0 else {},
    )


def whole_weights(engine: Engine, **arguments: Any) -> dict[str, Tensor]:
    """Return a CPU copy of the whole export.

    An item that is not (name, tensor), or a name that comes twice, is a failure.
    """
    weights: dict[str, Tensor] = {}
    for item in engine.get_per_tensor_param(**arguments):
        is_pair = isinstance(item, tuple) and len(item) == 2
        must(
            is_pair, "export", f"yields a {type(item).__name__}, not (name, tensor)", where=_here()
        )
        name, tensor = item
        must(isinstance(name, str), "export", f"{name!r} is no name", where=_here())
        plain = isinstance(tensor, Tensor) and not isinstance(tensor, DTensor)
        must(
            plain,
            "export",
            f"a {type(tensor).__name__}, not a plain tensor",
            where=f"{name}, {_here()}",
        )
        must(name not in weights, "export", "comes twice", where=f"{name}, {_here()}")
        # Not clone(): a tensor of one element keeps the stride that it has in a bucket.
        weights[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return weights


def digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names and bytes, in order."""
    total = hashlib.sha256()
    for name, tensor in weights.items():
        total.update(name.encode())
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def save(engine: Engine, folder: Path, **extra: Any) -> None:
    """Save a checkpoint and wait for it."""
    engine.save_checkpoint(folder, extra=extra).result()

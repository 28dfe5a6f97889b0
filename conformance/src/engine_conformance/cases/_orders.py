"""Seeded sequences of calls on two engines of a process, and the oracle's results of each."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_api.batch import Batch
from engine_api.contract import Engine
from engine_api.errors import EngineError
from engine_api.losses import LossFn
from engine_api.results import ForwardBackwardOutput, StepOutput, TrainOutput
from engine_conformance.cases import _losses as losses
from engine_conformance.cases._case import VALUE
from engine_conformance.cases._expect import documents, oracle_of
from engine_conformance.cases._ranks import (
    InferCall,
    RankOutputs,
    checked,
    digest,
    infer_on_rank,
    local_batch,
    opened,
    save,
    to_batch,
    whole_weights,
)
from engine_conformance.cases._target import EPS, Setup
from engine_conformance.fixtures import LENGTHS, PackedDocuments, TinyModel
from engine_conformance.oracle import (
    AdamWConfig,
    OracleModel,
    Schedule,
    StepResult,
    TrainResult,
    train_steps,
)
from engine_conformance.oracle.train import Loss

__all__ = [
    "ExpectedResult",
    "Operation",
    "OperationResult",
    "call_of",
    "expectations",
    "operate",
    "sequence",
]

_ADAMW = AdamWConfig(weight_decay=0.1, max_grad_norm=2.0, eps=EPS)
_RATES = Schedule(kind="linear", lr=1e-3, warmup_steps=2, total_steps=12, min_ratio=0.1)
_TEMPERATURES = {"warm": 0.7, "entropy": 1.3}
_REFUSING = ("train_batch", "forward_backward", "infer_batch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One call of a sequence.

    Attributes:
        kind: ``forward_backward``, ``masked`` (no token carries loss), ``corrupted`` (the loss is
            NaN, its gradient is not), ``raises`` (the loss raises), ``train_batch``,
            ``optimizer_step``, ``infer``, ``save``, ``load``, ``bad_batch``, or ``bad_load`` (of an
            absent checkpoint).
        engine: which of the two engines is called.
        documents: the batch of all ranks together.
        loss: ``plain``, ``warm`` (at temperature 0.7) or ``entropy`` (at temperature 1.3).
        denominator_factor: the denominator over the sum of the loss weights, or None for the
            default.
        name: the checkpoint that is saved or loaded, or the member that gets a bad batch.
    """

    kind: str
    engine: int = 0
    documents: PackedDocuments
    loss: str = "plain"
    denominator_factor: float | None = None
    name: str = ""

    def __str__(self) -> str:
        second = " of the second engine" if self.engine else ""
        return f"{self.kind}{second}"

    @property
    def denominator(self) -> float | None:
        """The denominator that the caller gives."""
        return (
            None
            if self.denominator_factor is None
            else self.denominator_factor * self.documents.denominator
        )

    @property
    def temperature(self) -> float:
        """The temperature of the call."""
        return _TEMPERATURES.get(self.loss, 1.0)


# --- the sequence -----------------------------------------------------------------------------


class _OperationFactory:
    """Makes operations with documents, losses and denominators drawn from a seed."""

    def __init__(self, seed: int, model_type: str) -> None:
        self.seed = seed
        self.draw = random.Random(seed)
        self.names = 0
        self.losses = ("plain",) if model_type == VALUE else ("plain", "warm", "entropy")

    def __call__(self, kind: str, **arguments: Any) -> Operation:
        # A loss is corrupted, and raises, on ranks that have documents: on all of them.
        every = kind in ("corrupted", "raises")
        lengths = "uneven" if every else self.draw.choice(sorted(LENGTHS))
        batch = documents(1000 + 100 * self.seed + self.draw.randrange(100), lengths)
        return Operation(kind=kind, documents=batch, **arguments)

    def add(self, **arguments: Any) -> Operation:
        """Return a call that adds to the gradient."""
        drawn = {
            "loss": self.draw.choice(self.losses),
            "denominator_factor": self.draw.choice([None, 0.5, 2.0, 3.0]),
        }
        return self("forward_backward", **(drawn | arguments))

    def step(self, engine: int = 0) -> Operation:
        """Return an ``optimizer_step``."""
        return self("optimizer_step", engine=engine)

    def new_name(self) -> str:
        """Return the name of a checkpoint that is not there yet."""
        self.names += 1
        return f"saved-{self.names}"


def sequence(seed: int, model_type: str) -> tuple[Operation, ...]:
    """Return about fifty calls in which each kind of call meets a gradient that waits.

    They are made of short phrases, each of which is about one way to treat the gradient wrongly;
    the seed draws their order, their documents, losses and denominators, and the places of calls
    that must leave the gradient alone.
    """
    new = _OperationFactory(seed, model_type)
    # Each of these ends with a step that shows whether the gradient is whole.
    plain = [
        [new.add(denominator_factor=0.5), new.add(denominator_factor=3.0), new.step()],
        [*(new.add(loss=loss) for loss in new.losses), new.step()],
        [new.add(), new("masked", denominator_factor=2.0), new.step()],
    ]
    quiet = [
        new("infer"),
        new("save", name=new.new_name()),
        new("bad_load"),
        *(new("bad_batch", name=member) for member in _REFUSING),
    ]
    for one in quiet:
        phrase = new.draw.choice(plain)
        # Behind a call that adds, and before the step that uses its gradient.
        phrase.insert(new.draw.randrange(1, len(phrase)), one)
    name = new.new_name()
    phrases = [
        *plain,
        [new("masked"), new.add(), new.step()],
        [new("masked"), new.step()],
        [new("corrupted"), new.add(), new.step()],
        [new.add(), new("corrupted"), new.add(), new.step()],
        [new.add(), new("corrupted"), new.step()],
        [new("corrupted", engine=1), new.add(), new.step(), new.step(1)],
        [new.add(engine=1), new.add(), new.step(1), new.step()],
        [new.add(), new("train_batch", loss=new.draw.choice(new.losses))],
        [
            new.add(),
            new("save", name=name),
            new.step(),
            new.add(),
            new("load", name=name),
            new.step(),
        ],
        [new.add(), new("raises"), new.step()],
    ]
    new.draw.shuffle(phrases)
    return (*(one for phrase in phrases for one in phrase), new.add(), new.step(), new("infer"))


# --- the engines --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationResult:
    """Result of one operation on one rank.

    ``weights`` of an applied step come from rank 0.
    """

    output: ForwardBackwardOutput | StepOutput | TrainOutput | None
    error: EngineError | KeyError | None
    inferred: RankOutputs | None
    version: int
    digest: str
    weights: dict[str, Tensor] | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Counted:
    """A loss with the sum of its weights as a metric."""

    loss: LossFn

    @property
    def needs(self) -> tuple[str, ...]:
        """The outputs that the loss needs."""
        return getattr(self.loss, "needs", ("log_probs",))

    def __call__(self, outputs: Any, batch: Batch) -> Any:
        """Return the loss."""
        return replace(self.loss(outputs, batch), metrics={"weight": batch.loss_weight.sum()})


def operate(setup: Setup, operations: Sequence[Operation], folder: Path) -> list[OperationResult]:
    """Run the operations on two engines of this process, and return what is seen of each."""
    with ExitStack() as stack:
        engines = [stack.enter_context(opened(setup)) for _ in range(2)]
        return [_see(engines[one.engine], setup, one, folder) for one in operations]


def _see(engine: Engine, setup: Setup, one: Operation, folder: Path) -> OperationResult:
    before = engine.weight_version
    output: Any = None
    error: EngineError | KeyError | None = None
    inferred: RankOutputs | None = None
    if one.kind == "infer":
        inferred = infer_on_rank(engine, call_of(one, setup.model_type), setup.device)
    else:
        try:
            output = _CALLS[one.kind](engine, setup, one, folder)
        except (EngineError, KeyError) as raised:
            error = raised.with_traceback(None)
    weights = whole_weights(engine)
    moved = one.kind in ("train_batch", "optimizer_step") and engine.weight_version > before
    return OperationResult(
        output=output,
        error=error,
        inferred=inferred,
        version=engine.weight_version,
        digest=digest(weights),
        weights=weights if moved and engine.topology.rank == 0 else None,
    )


def call_of(one: Operation, model_type: str) -> InferCall:
    return InferCall(documents=one.documents, entropy=model_type != VALUE)


def _loss(setup: Setup, one: Operation) -> LossFn:
    if one.loss == "entropy":
        return losses.entropy_bonus
    return losses.default_loss(setup.model_type)


def _forward_backward(
    engine: Engine, setup: Setup, one: Operation, loss: LossFn
) -> ForwardBackwardOutput:
    output = engine.forward_backward(
        local_batch(engine, one.documents, setup.device),
        loss,
        denominator=one.denominator,
        temperature=one.temperature,
    )
    return checked(output, ForwardBackwardOutput, "forward_backward")


def _add(engine: Engine, setup: Setup, one: Operation, folder: Path) -> ForwardBackwardOutput:
    del folder
    return _forward_backward(engine, setup, one, _Counted(_loss(setup, one)))


def _masked(engine: Engine, setup: Setup, one: Operation, folder: Path) -> ForwardBackwardOutput:
    del folder
    silent = replace(one.documents, loss_weight=one.documents.loss_weight * 0)
    batch = local_batch(engine, silent, setup.device)
    output = engine.forward_backward(batch, _loss(setup, one), denominator=one.denominator)
    return checked(output, ForwardBackwardOutput, "forward_backward")


def _call_with_corrupted_loss(
    engine: Engine, setup: Setup, one: Operation, folder: Path
) -> ForwardBackwardOutput:
    del folder
    loss = losses.CorruptedLoss(model_type=setup.model_type, constant=float("nan"))
    return _forward_backward(engine, setup, one, loss.limit_to_last_rank(engine.topology))


def _raises(engine: Engine, setup: Setup, one: Operation, folder: Path) -> None:
    del folder
    loss = losses.ForModelType(setup.model_type, losses.raises)
    engine.forward_backward(local_batch(engine, one.documents, setup.device), loss)


def _train_batch(engine: Engine, setup: Setup, one: Operation, folder: Path) -> TrainOutput:
    del folder
    output = engine.train_batch(
        local_batch(engine, one.documents, setup.device),
        _Counted(_loss(setup, one)),
        denominator=one.denominator,
        temperature=one.temperature,
    )
    return checked(output, TrainOutput, "train_batch")


def _optimizer_step(engine: Engine, *_: Any) -> StepOutput:
    return checked(engine.optimizer_step(), StepOutput, "optimizer_step")


def _save(engine: Engine, setup: Setup, one: Operation, folder: Path) -> None:
    del setup
    save(engine, folder / one.name)


def _load(engine: Engine, setup: Setup, one: Operation, folder: Path) -> None:
    del setup
    engine.load_checkpoint(folder / one.name)


def _bad_load(engine: Engine, setup: Setup, one: Operation, folder: Path) -> None:
    del setup, one
    engine.load_checkpoint(folder / "absent")


def _bad_batch(engine: Engine, setup: Setup, one: Operation, folder: Path) -> None:
    """Give a member a batch that is bad on the last rank alone."""
    del folder
    batch = local_batch(engine, one.documents, setup.device)
    if engine.topology.rank == engine.topology.world_size - 1:
        good = to_batch(one.documents, setup.device)
        ids = good.input_ids.clone()
        ids[-1] = TinyModel().vocab_size
        batch = Batch(input_ids=ids, cu_seqlens=good.cu_seqlens, fields=good.fields)
    if one.name == "infer_batch":
        engine.infer_batch(batch)
    else:
        getattr(engine, one.name)(batch, _loss(setup, one))


_CALLS: dict[str, Callable[[Engine, Setup, Operation, Path], Any]] = {
    "forward_backward": _add,
    "masked": _masked,
    "corrupted": _call_with_corrupted_loss,
    "raises": _raises,
    "train_batch": _train_batch,
    "optimizer_step": _optimizer_step,
    "save": _save,
    "load": _load,
    "bad_load": _bad_load,
    "bad_batch": _bad_batch,
}


# --- the oracle -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedResult:
    """Result of one operation by the oracle.

    Attributes:
        error: name of the contract's error that the call must raise.
        loss: value of the loss, where it is finite and one is reported.
        skipped: whether a step is skipped.
        step: an applied step's loss, gradient norm and rate.
        result: an applied step's weights, and how far each may be off.
        version: ``weight_version`` after the call.
        oracle: the model with the weights after the call.
    """

    error: str = ""
    loss: float | None = None
    skipped: bool = False
    step: StepResult | None = None
    result: TrainResult | None = None
    version: int
    oracle: OracleModel


@dataclass(slots=True)
class _State:
    """One engine's state: the steps so far, and the calls whose gradient waits."""

    start: OracleModel
    steps: TrainResult | None = None
    waiting: list[tuple[Loss, Operation]] = field(default_factory=list[tuple[Loss, Operation]])
    calls: int = 0
    corrupted: bool = False

    @property
    def oracle(self) -> OracleModel:
        return self.start if self.steps is None else self.steps.oracle

    @property
    def version(self) -> int:
        return 0 if self.steps is None else len(self.steps.steps)

    def drop(self) -> None:
        self.waiting.clear()
        self.calls = 0
        self.corrupted = False

    def add(self, one: Operation) -> None:
        self.waiting.append((_oracle_loss(self.start, one), one))

    def apply(self) -> StepResult:
        """Apply a step of the gradient that waits."""
        calls = list(self.waiting)

        def total(oracle: OracleModel, *_: Any) -> Tensor:
            return torch.stack(
                [loss(oracle, one.documents, _divisor(one)) for loss, one in calls]
            ).sum()

        before = () if self.steps is None else self.steps.steps
        result = train_steps(
            self.start,
            [calls[0][1].documents],
            total,
            optimizer=_ADAMW,
            schedule=_RATES,
            start=self.steps,
        )
        self.steps = replace(result, steps=(*before, *result.steps))
        return result.steps[0]


def _divisor(one: Operation) -> float:
    return one.denominator or one.documents.denominator


def _oracle_loss(oracle: OracleModel, one: Operation) -> Loss:
    if one.loss == "warm":
        return losses.oracle_warm
    if one.loss == "entropy":
        return lambda model, batch, denominator: losses.oracle_entropy_bonus(
            model, batch, denominator, temperature=one.temperature
        )
    return losses.oracle_default(oracle)


@cache
def expectations(folder: str, operations: tuple[Operation, ...]) -> tuple[ExpectedResult, ...]:
    """Return what the oracle says of each operation on the model in ``folder``."""
    engines = [_State(oracle_of(folder)) for _ in range(2)]
    saved: dict[str, TrainResult | None] = {}
    found = list[ExpectedResult]()
    for one in operations:
        found.append(_expect(engines[one.engine], one, saved))
    return tuple(found)


def _expect(state: _State, one: Operation, saved: dict[str, TrainResult | None]) -> ExpectedResult:
    about: dict[str, Any] = {}
    if one.kind == "forward_backward":
        state.add(one)
        state.calls += 1
        about["loss"] = _value(state, one)
    elif one.kind in ("masked", "corrupted"):
        state.calls += 1
        state.corrupted |= one.kind == "corrupted"
        about["loss"] = 0.0 if one.kind == "masked" else None
    elif one.kind == "train_batch":
        state.drop()
        state.add(one)
        about = {"loss": _value(state, one), "step": state.apply(), "result": state.steps}
        state.drop()
    elif one.kind == "optimizer_step":
        about = _expect_step(state)
        state.drop()
    elif one.kind == "save":
        saved[one.name] = state.steps
    elif one.kind == "load":
        state.steps = saved[one.name]
        state.drop()
    elif one.kind == "raises":
        about["error"] = "KeyError"
        state.drop()
    elif one.kind == "bad_batch":
        about["error"] = "BatchError"
    elif one.kind == "bad_load":
        about["error"] = "CheckpointMissing"
    return ExpectedResult(version=state.version, oracle=state.oracle, **about)


def _expect_step(state: _State) -> dict[str, Any]:
    if not state.calls:
        return {"error": "EngineStateError"}
    if state.corrupted or not state.waiting:
        return {"skipped": True}
    return {"step": state.apply(), "result": state.steps}


def _value(state: _State, one: Operation) -> float:
    with torch.no_grad():
        return float(_oracle_loss(state.start, one)(state.oracle, one.documents, _divisor(one)))

"""The loop over judged documents, which DPO, KTO and reward models share.

A step computes the sums of its documents in one forward pass, and from these the losses and their
slopes; the training pass is then linear in the model's outputs
(``engine_trainer.algorithms.preference`` says why). The documents of a pair stay on one rank, so
that their slopes are known there, and may lie in any micro-batches.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from engine_api.batch import Batch
from engine_api.errors import ConfigError
from engine_api.losses import where_counted
from engine_api.results import TokenOutputs, TrainOutput
from engine_trainer.algorithms.packed import document_of, sum_by_document
from engine_trainer.algorithms.preference import LinearLoss
from engine_trainer.config import DPOConfig, KTOConfig, RewardModelConfig
from engine_trainer.data import ChatTokenizer, SampleOrder, load_tokenizer, order_of
from engine_trainer.placement.groups import divide
from engine_trainer.run.run import Outcome, Run
from engine_trainer.utils.hf_models import random_rates

EVAL_ROWS = 128
"""Pairs or rows in one inference call, over all ranks."""

Metrics = dict[str, float]
JudgedConfig = DPOConfig | KTOConfig | RewardModelConfig


class Rows(Protocol):
    """Rows of data, each of which a step takes whole."""

    def __len__(self) -> int: ...


D = TypeVar("D", bound=Rows)
Item = TypeVar("Item")
Sums = TypeVar("Sums")


@dataclass(frozen=True, kw_only=True)
class Data(Generic[D]):
    """Training rows and held-out rows."""

    train: D
    heldout: D | None

    def select(self, heldout: bool) -> D:
        """Return the held-out or the training rows."""
        chosen = self.heldout if heldout else self.train
        assert chosen is not None
        return chosen


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The rows that a run takes in each of its steps, as far as it has not seen all of them."""

    order: SampleOrder
    steps: int
    batch_size: int

    def step(self, number: int) -> list[int]:
        """Return the rows of a step, which is counted from 1."""
        return self.order.take((number - 1) * self.batch_size, self.batch_size)

    def visited(self) -> list[int]:
        """Return all rows that the run takes, sorted."""
        taken = min(self.steps * self.batch_size, self.order.size)
        return sorted(set(self.order.take(0, taken)))


class JudgedTrainer(ABC, Generic[Item, Sums]):
    """Steps and evaluations over items: pairs, or rows.

    ``Sums`` is a dataclass of tensors ``[N]``, one number for each item of this rank. Every method
    is called on all ranks together, and returns the same on all unless said otherwise.

    Attributes:
        run: the run.
        linear: the loss of the training pass.
        heldout: number of held-out rows, 0 without any.
        show: metrics that are shown next to the progress bar.
    """

    show: Sequence[str]

    def __init__(self, run: Run, linear: LinearLoss, heldout: int) -> None:
        self.run = run
        self.linear = linear
        self.heldout = heldout

    @abstractmethod
    def items(self, indices: Sequence[int]) -> Sequence[Item]:
        """Return the items that the rows ``indices`` make."""

    @abstractmethod
    def measure(self, items: Sequence[Item], *, heldout: bool) -> tuple[Batch, Sums]:
        """Return the documents of this rank's items, and what their losses are computed from."""

    @abstractmethod
    def judge(self, sums: Sums) -> tuple[torch.Tensor, Metrics]:
        """Return the slopes of this rank's documents, and the figures of all ranks' items.

        The slopes are ``[D]`` float64, in the order of the batch of ``measure``. ``loss`` is one
        of the figures.
        """

    def convert(self, folder: Path) -> None:
        """Change the folder of the trained model before it takes its final name.

        Called on the main process only.
        """

    def close(self) -> None:
        """Close the engines other than the policy."""

    def step(self, step: int, indices: Sequence[int]) -> Metrics:
        """Apply one update from the rows ``indices`` and return its figures."""
        run = self.run
        with run.timers.phase("judge"):
            batch, sums = self.measure(self.items(indices), heldout=False)
            slopes, figures = self.judge(sums)
        metrics = _prefixed("train", figures)
        # The loss is a sum over all ranks, so that all of them skip.
        if not math.isfinite(metrics["train/loss"]):
            run.log.say(
                f"step {step} was skipped: loss is {metrics['train/loss']}; "
                "weights and optimizer are as before"
            )
            return metrics | {"train/skipped": 1.0}
        with run.timers.phase("train"):
            batch = batch.with_fields(coefficient=_coefficients(batch, slopes))
            output = run.engine.train_batch(batch, self.linear, denominator=float(len(indices)))
        seconds = run.timers.last("judge") + run.timers.last("train")
        return (
            metrics
            | _updated(run, step, output)
            | {"perf/tokens_per_s": output.num_tokens / max(seconds, 1e-9)}
        )

    def evaluate(self) -> Metrics:
        """Return ``eval/…`` over the held-out rows.

        It is empty without them.
        """
        if not self.heldout:
            return {}
        with self.run.timers.phase("eval"):
            items = self.items(range(self.heldout))
            parts = [
                self.measure(items[start : start + EVAL_ROWS], heldout=True)[1]
                for start in range(0, len(items), EVAL_ROWS)
            ]
            return _prefixed("eval", self.judge(_joined(parts))[1])

    def add(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of numbers of this rank over all ranks that hold different rows."""
        own = list(numbers)
        primary = self.run.engine.topology.is_primary
        rows = self.run.comm.all_gather(own if primary else [0.0] * len(own))
        return [math.fsum(column) for column in zip(*rows, strict=True)]


def train_judged(
    config: JudgedConfig,
    *,
    kind: str,
    load: Callable[[ChatTokenizer], Data[D]],
    trainer_of: Callable[[Run, Data[D], Plan, ChatTokenizer], JudgedTrainer[Any, Any]],
) -> Outcome:
    """Train as ``config`` says, from the beginning or from the last checkpoint.

    Args:
        config: configuration of the run.
        kind: the command's name.
        load: reads the data.
        trainer_of: builds the trainer from the run with its engine as it begins, the data, the
            rows of each step of the whole run, and the tokenizer.

    Raises ``EngineError`` for configuration, data, plug-ins and checkpoints.
    """
    tokenizer = load_tokenizer(config.data, config.engine.model)
    _refuse_dropout(config)
    data = load(tokenizer)
    order = order_of(data.train, config.data, config.run.seed)
    steps = config.run.total_steps(
        len(data.train), config.batch_size, key="batch_size", data=config.data
    )
    with Run(config, kind=kind, total_steps=steps) as run:
        run.start()
        plan = Plan(order=order, steps=run.total_steps, batch_size=config.batch_size)
        trainer = trainer_of(run, data, plan, tokenizer)
        state = run.resume(len(data.train))
        done = state["step"]
        if (done == 0 and data.heldout is not None) or "unmeasured" in state:
            run.log_start(done, state.get("unmeasured", {}) | trainer.evaluate())
        for step in run.steps(done):
            position = step * config.batch_size
            metrics = trainer.step(step, plan.step(step))
            metrics["train/epoch"] = position / len(data.train)
            state = {"position": position, "rows": len(data.train)}
            if step == run.total_steps or (
                config.eval and config.eval.every and step % config.eval.every == 0
            ):
                run.complete(step, metrics, state)
                metrics |= trainer.evaluate()
            run.end_step(step, metrics, state, show=trainer.show)
        trainer.close()
        return run.finish(tokenizer.tokenizer, trainer.convert)


def _refuse_dropout(config: JudgedConfig) -> None:
    """Raise ``ConfigError`` for a model whose own files have dropout.

    The adapter's dropout is refused with the configuration.
    """
    if rates := random_rates(config.engine.model):
        off = ", ".join(f"{name}: 0.0" for name in rates)
        raise ConfigError(
            "engine.model.config_overrides",
            f"{', '.join(f'{name} is {rate}' for name, rate in rates.items())}, expected 0",
            why="the slopes of the loss are taken in one forward pass and used in another, "
            "which would drop different activations",
            remedy=f"set engine.model.config_overrides: {{{off}}}",
        )


def share(data: Sequence[int], run: Run) -> list[int]:
    """Return the positions of this rank's items, of which ``data`` has the numbers of tokens."""
    (positions,) = divide(list(data), run.policy)
    return list(positions)


def pack(documents: Sequence[Mapping[str, Any]]) -> Batch:
    """Return documents as a batch, whose ``loss_weight`` are the factors of their sums."""
    if not documents:
        return Batch.pack([]).with_fields(loss_weight=torch.zeros(0, dtype=torch.float32))
    return Batch.pack(documents)


def counted_tokens(batch: Batch) -> torch.Tensor:
    """Return the number of tokens that carry loss in each document, at least 1: ``[D]`` float64."""
    counted = (batch.loss_weight > 0).double()
    return sum_by_document(counted, batch.cu_seqlens).clamp(min=1.0)


def document_sums(outputs: TokenOutputs, batch: Batch) -> torch.Tensor:
    """Return the weighted sum of each document's log-probs or values: ``[D]`` float64."""
    given = outputs.log_probs if outputs.values is None else outputs.values
    if given is None:  # an empty batch may have none
        return torch.zeros(0, dtype=torch.float64)
    weight = batch.loss_weight.double()
    return sum_by_document(weight * where_counted(given.cpu().double(), weight), batch.cu_seqlens)


def _coefficients(batch: Batch, slopes: torch.Tensor) -> torch.Tensor:
    """Return the derivative ``[T]`` float32 of the summed loss by each token's output."""
    return (slopes[document_of(batch.cu_seqlens)] * batch.loss_weight).float()


def _updated(run: Run, step: int, output: TrainOutput) -> Metrics:
    if output.skipped:
        run.log.say(
            f"step {step} was skipped: {output.skipped}; weights and optimizer are as before"
        )
    return {
        "train/grad_norm": output.grad_norm,
        "train/lr": output.lr,
        "train/tokens": float(output.num_tokens),
        "train/micro_batches": float(output.num_micro_batches),
        "train/skipped": float(output.skipped is not None),
    }


def _prefixed(prefix: str, figures: Mapping[str, float]) -> Metrics:
    return {f"{prefix}/{name}": value for name, value in figures.items()}


def _joined(parts: Sequence[Sums]) -> Sums:
    """Return the tensors of several dataclasses of tensors one behind the other."""
    first = parts[0]
    joined = {
        one.name: torch.cat([getattr(part, one.name) for part in parts])
        for one in fields(first)  # pyright: ignore[reportArgumentType] - it is a dataclass
    }
    return type(first)(**joined)

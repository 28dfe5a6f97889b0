"""The loop over pairs of preferences, which DPO and reward models share.

A step computes the pairs' sums in one forward pass, and from these their loss and its slopes; the
training pass is then linear in the model's outputs (``engine_trainer.algorithms.preference`` says
why). A pair stays on one rank, so that its slopes are known there; its two documents may lie in any
micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from engine_api.batch import Batch
from engine_api.errors import ConfigError
from engine_api.losses import where_counted
from engine_api.results import TokenOutputs, TrainOutput
from engine_trainer.algorithms.packed import document_of, sum_by_document
from engine_trainer.algorithms.preference import LinearLoss, PairObjective, Pairs
from engine_trainer.config import DPOConfig, RewardModelConfig
from engine_trainer.data import ChatTokenizer, load_tokenizer, order_of, positions_of
from engine_trainer.data.preferences import Pair, PairDataset
from engine_trainer.placement.groups import divide
from engine_trainer.run.run import Outcome, Run
from engine_trainer.utils.hf_models import random_rates

SHOW = ("train/loss", "train/accuracy", "train/margin", "train/grad_norm", "eval/accuracy")
EVAL_PAIRS = 128
"""Pairs in one inference call, over all ranks."""

Metrics = dict[str, float]


class Objective(Protocol):
    """The score of a document, and the loss of a pair as a function of its scores."""

    linear: LinearLoss
    loss: PairObjective

    def documents(self, pair: Pair) -> list[dict[str, Any]]:
        """Return the chosen and the rejected document as ``Batch.pack`` takes them.

        Their ``loss_weight`` are the factors that sum the outputs of their tokens.
        """
        ...

    def offsets(self, heldout: bool, indices: Sequence[int], batch: Batch) -> torch.Tensor:
        """Return the reference's numbers for the sums of the documents of ``indices``.

        The result is ``[2n]`` float64. Called on all ranks together. ``batch`` holds the documents
        of these pairs, chosen and rejected alternating.
        """
        ...

    def convert(self, folder: Path) -> None:
        """Change the folder of the trained model before it takes its final name.

        Called on the main process only.
        """
        ...

    def close(self) -> None:
        """Close the objective's own engines."""
        ...


@dataclass(frozen=True, kw_only=True)
class PairData:
    """Training pairs and held-out pairs."""

    train: PairDataset
    heldout: PairDataset | None

    def select(self, heldout: bool) -> PairDataset:
        """Return the held-out or the training pairs."""
        chosen = self.heldout if heldout else self.train
        assert chosen is not None
        return chosen


def train_pairs(
    config: DPOConfig | RewardModelConfig,
    *,
    kind: str,
    objective_of: Callable[[Run, PairData, list[int], ChatTokenizer], Objective],
) -> Outcome:
    """Train as ``config`` says, from the beginning or from the last checkpoint.

    Args:
        config: configuration of the run.
        kind: the command's name.
        objective_of: builds the objective from the run with its engine as it begins, the data, the
            training pairs that the whole run visits, and the tokenizer.

    Raises ``EngineError`` for configuration, data, plug-ins and checkpoints.
    """
    tokenizer = load_tokenizer(config.data, config.engine.model)
    _refuse_dropout(config)
    data = _load(config, tokenizer)
    order = order_of(data.train, config.data, config.run.seed)
    steps = config.run.total_steps(
        len(data.train), config.batch_size, key="batch_size", data=config.data
    )
    with Run(config, kind=kind, total_steps=steps) as run:
        run.start()
        visited = sorted(
            set(order.take(0, min(run.total_steps * config.batch_size, len(data.train))))
        )
        trainer = PairTrainer(run, data, objective_of(run, data, visited, tokenizer))
        state = run.resume(len(data.train))
        position = int(state.get("position", 0))
        done = state["step"]
        if (done == 0 and data.heldout is not None) or "unmeasured" in state:
            run.log_start(done, state.get("unmeasured", {}) | trainer.evaluate())
        for step in run.steps(done):
            indices = order.take(position, config.batch_size)
            position += len(indices)
            metrics = trainer.step(step, indices) | {"train/epoch": position / len(data.train)}
            state = {"position": position, "rows": len(data.train)}
            if step == run.total_steps or (
                config.eval and config.eval.every and step % config.eval.every == 0
            ):
                run.complete(step, metrics, state)
                metrics |= trainer.evaluate()
            run.end_step(step, metrics, state, show=SHOW)
        trainer.objective.close()
        return run.finish(tokenizer.tokenizer, trainer.objective.convert)


def _refuse_dropout(config: DPOConfig | RewardModelConfig) -> None:
    """Raise ``ConfigError`` for a model whose own files have dropout.

    The adapter's dropout is refused with the configuration.
    """
    if rates := random_rates(config.engine.model):
        off = ", ".join(f"{name}: 0.0" for name in rates)
        raise ConfigError(
            "engine.model.config_overrides",
            f"{', '.join(f'{name} is {rate}' for name, rate in rates.items())} with pairs",
            why="the slopes of the loss are taken in one forward pass and used in another, "
            "which would drop different activations",
            remedy=f"set engine.model.config_overrides: {{{off}}}",
        )


def _load(config: DPOConfig | RewardModelConfig, tokenizer: ChatTokenizer) -> PairData:
    section = config.data
    assert section.source is not None  # the configurations check it
    context = positions_of(config.engine.model)
    spare = 1 if isinstance(config, RewardModelConfig) else 0
    margin = config.rm.margin if isinstance(config, RewardModelConfig) else None
    train = PairDataset.read(
        section.source,
        section.split,
        tokenizer,
        section,
        context=context,
        spare=spare,
        margin=margin,
    )
    if config.eval is None:
        return PairData(train=train, heldout=None)
    heldout = PairDataset.read(
        config.eval.source,
        config.eval.split,
        tokenizer,
        section,
        limit=config.eval.max_pairs,
        context=context,
        spare=spare,
        name="eval",
        margin=margin,
    )
    return PairData(train=train, heldout=heldout)


class PairTrainer:
    """Steps and evaluations over pairs.

    Every method is called on all ranks together, and returns the same on all.
    """

    def __init__(self, run: Run, data: PairData, objective: Objective) -> None:
        self.run = run
        self.data = data
        self.objective = objective

    def step(self, step: int, indices: Sequence[int]) -> Metrics:
        """Apply one update from the pairs ``indices`` and return its figures."""
        run = self.run
        objective = self.objective
        with run.timers.phase("judge"):
            batch, local = self._pack(indices, heldout=False)
            losses, slopes, rewards = self._score(batch, local, heldout=False)
        metrics = self._figures("train", rewards, losses)
        # The loss is a sum over all ranks, so that all of them skip.
        if not math.isfinite(metrics["train/loss"]):
            run.log.say(
                f"step {step} was skipped: loss is {metrics['train/loss']}; "
                "weights and optimizer are as before"
            )
            return metrics | {"train/skipped": 1.0}
        with run.timers.phase("train"):
            batch = batch.with_fields(coefficient=_coefficients(batch, slopes))
            output = run.engine.train_batch(
                batch, objective.linear, denominator=float(len(indices))
            )
        seconds = run.timers.last("judge") + run.timers.last("train")
        return (
            metrics
            | _updated(run, step, output)
            | {"perf/tokens_per_s": output.num_tokens / max(seconds, 1e-9)}
        )

    def evaluate(self) -> Metrics:
        """Return ``eval/…`` over the held-out pairs.

        It is empty without them.
        """
        if self.data.heldout is None:
            return {}
        losses: list[torch.Tensor] = []
        rewards: list[torch.Tensor] = []
        with self.run.timers.phase("eval"):
            for start in range(0, len(self.data.heldout), EVAL_PAIRS):
                indices = range(start, min(start + EVAL_PAIRS, len(self.data.heldout)))
                loss, _, part = self._score(*self._pack(indices, heldout=True), heldout=True)
                losses.append(loss)
                rewards.append(part)
            return self._figures("eval", torch.cat(rewards), torch.cat(losses))

    # --- inside ---------------------------------------------------------------------------------

    def _pack(self, indices: Sequence[int], *, heldout: bool) -> tuple[Batch, list[int]]:
        """Return the batch of this rank's pairs and their indices.

        Chosen and rejected documents alternate.
        """
        dataset = self.data.select(heldout)
        (positions,) = divide([len(dataset[i]) for i in indices], self.run.policy)
        local = [indices[k] for k in positions]
        return pack(self.objective, [dataset[i] for i in local]), local

    def _score(
        self, batch: Batch, local: Sequence[int], *, heldout: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return losses ``[n]``, slopes ``[2n]`` and rewards ``[2n]`` of this rank's pairs.

        All are float64. Chosen and rejected documents alternate.
        """
        sums = document_sums(self.run.engine.infer_batch(batch), batch)
        reference = self.objective.offsets(heldout, local, batch)
        counted = (batch.loss_weight > 0).double()
        counts = sum_by_document(counted, batch.cu_seqlens).clamp(min=1.0)
        dataset = self.data.select(heldout)
        pairs = Pairs(
            chosen=sums[0::2],
            rejected=sums[1::2],
            ref_chosen=reference[0::2],
            ref_rejected=reference[1::2],
            chosen_tokens=counts[0::2],
            rejected_tokens=counts[1::2],
            margin=torch.tensor([dataset[i].margin for i in local], dtype=torch.float64),
        )
        loss, *slopes = self.objective.loss(pairs)
        rewards = self.objective.loss.rewards(pairs)
        return loss, torch.stack(slopes, dim=1).flatten(), torch.stack(rewards, dim=1).flatten()

    def _figures(self, prefix: str, rewards: torch.Tensor, losses: torch.Tensor) -> Metrics:
        chosen = rewards[0::2]
        rejected = rewards[1::2]
        right = (chosen > rejected).double() + 0.5 * (chosen == rejected).double()
        own = [len(losses), *(float(x.sum()) for x in (losses, right, chosen, rejected))]
        rows = self.run.comm.all_gather(own if self.run.engine.topology.is_primary else [0.0] * 5)
        count, loss, accuracy, better, worse = (
            math.fsum(column) for column in zip(*rows, strict=True)
        )
        count = max(count, 1.0)
        return {
            f"{prefix}/loss": loss / count,
            f"{prefix}/accuracy": accuracy / count,
            f"{prefix}/margin": (better - worse) / count,
            f"{prefix}/chosen": better / count,
            f"{prefix}/rejected": worse / count,
        }


def pack(objective: Objective, pairs: Sequence[Pair]) -> Batch:
    """Return the documents of ``pairs`` as a batch, chosen and rejected alternating.

    Its ``loss_weight`` has the factors of the objective.
    """
    documents = [document for pair in pairs for document in objective.documents(pair)]
    if not documents:
        return Batch.pack([]).with_fields(loss_weight=torch.zeros(0, dtype=torch.float32))
    return Batch.pack(documents)


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

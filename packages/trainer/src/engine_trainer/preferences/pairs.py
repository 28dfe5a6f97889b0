"""Training on pairs of a chosen and a rejected document, for DPO and reward models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from engine_api.batch import Batch
from engine_trainer.algorithms.preference import LinearLoss, PairObjective, Pairs
from engine_trainer.config import DPOConfig, RewardModelConfig
from engine_trainer.config.sections import token_budget
from engine_trainer.data import ChatTokenizer, positions_of
from engine_trainer.data.preferences import Pair, PairDataset
from engine_trainer.preferences.loop import (
    Data,
    Metrics,
    Plan,
    PreferenceTrainer,
    counted_tokens,
    document_sums,
    pack,
    share,
    train_on_preferences,
)
from engine_trainer.run.run import Outcome, Run

PairData = Data[PairDataset]


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


def train_pairs(
    config: DPOConfig | RewardModelConfig,
    *,
    kind: str,
    objective_of: Callable[[Run, PairData, Plan, ChatTokenizer], Objective],
) -> Outcome:
    """Train as ``config`` says, from the beginning or from the last checkpoint.

    The arguments are those of ``engine_trainer.preferences.loop.train_on_preferences``;
    ``objective_of`` builds the objective.

    Raises ``EngineError`` for configuration, data, plug-ins and checkpoints.
    """
    return train_on_preferences(
        config,
        kind=kind,
        load=lambda tokenizer: _load(config, tokenizer),
        trainer_of=lambda run, data, plan, tokenizer: PairTrainer(
            run, data, objective_of(run, data, plan, tokenizer)
        ),
    )


class PairTrainer(PreferenceTrainer[int, Pairs]):
    """Steps and evaluations over pairs, whose items are their indices."""

    show = ("train/loss", "train/accuracy", "train/margin", "train/grad_norm", "eval/accuracy")

    def __init__(self, run: Run, data: PairData, objective: Objective) -> None:
        heldout = 0 if data.heldout is None else len(data.heldout)
        super().__init__(run, objective.linear, heldout)
        self.data = data
        self.objective = objective

    def items(self, indices: Sequence[int], *, heldout: bool) -> Sequence[int]:
        """Return the indices themselves."""
        return indices

    def measure(self, items: Sequence[int], *, heldout: bool) -> tuple[Batch, Pairs]:
        """Return this rank's documents, chosen and rejected alternating, and their sums."""
        dataset = self.data.select(heldout)
        local = [items[k] for k in share([len(dataset[i]) for i in items], self.run)]
        batch = pack_pairs(self.objective, [dataset[i] for i in local])
        sums = document_sums(self.run.engine.infer_batch(batch), batch)
        reference = self.objective.offsets(heldout, local, batch)
        counts = counted_tokens(batch)
        return batch, Pairs(
            chosen=sums[0::2],
            rejected=sums[1::2],
            ref_chosen=reference[0::2],
            ref_rejected=reference[1::2],
            chosen_tokens=counts[0::2],
            rejected_tokens=counts[1::2],
            margin=torch.tensor([dataset[i].margin for i in local], dtype=torch.float64),
        )

    def score(self, sums: Pairs) -> tuple[torch.Tensor, Metrics]:
        """Return the slopes of the documents, and the figures of the pairs."""
        losses, *slopes = self.objective.loss(sums)
        chosen, rejected = self.objective.loss.rewards(sums)
        right = (chosen > rejected).double() + 0.5 * (chosen == rejected).double()
        count, loss, accuracy, better, worse = self.add(
            [len(losses), *(float(x.sum()) for x in (losses, right, chosen, rejected))]
        )
        count = max(count, 1.0)
        return torch.stack(slopes, dim=1).flatten(), {
            "loss": loss / count,
            "accuracy": accuracy / count,
            "margin": (better - worse) / count,
            "chosen": better / count,
            "rejected": worse / count,
        }

    def convert(self, folder: Path) -> None:
        """Change the folder as the objective does."""
        self.objective.convert(folder)

    def close(self) -> None:
        """Close the objective's own engines."""
        self.objective.close()


def pack_pairs(objective: Objective, pairs: Sequence[Pair]) -> Batch:
    """Return the documents of ``pairs`` as a batch, chosen and rejected alternating.

    Its ``loss_weight`` has the factors of the objective.
    """
    return pack([document for pair in pairs for document in objective.documents(pair)])


def _load(config: DPOConfig | RewardModelConfig, tokenizer: ChatTokenizer) -> PairData:
    section = config.data
    assert section.source is not None  # the configurations check it
    context = positions_of(config.engine.model)
    budget = token_budget(config.engine.memory, config.data.max_length)
    spare = 1 if isinstance(config, RewardModelConfig) else 0
    margin = config.rm.margin if isinstance(config, RewardModelConfig) else None
    train = PairDataset.read(
        section.source,
        section.split,
        tokenizer,
        section,
        context=context,
        budget=budget,
        spare=spare,
        margin=margin,
    )
    if config.eval is None:
        return Data(train=train, heldout=None)
    heldout = PairDataset.read(
        config.eval.source,
        config.eval.split,
        tokenizer,
        section,
        limit=config.eval.max_pairs,
        context=context,
        budget=budget,
        spare=spare,
        name="eval",
        margin=margin,
    )
    return Data(train=train, heldout=heldout)

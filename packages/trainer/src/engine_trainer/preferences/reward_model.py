"""Reward models, which are value models that score the better answer higher."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine_api.batch import Batch
from engine_trainer.algorithms.preference import LinearLoss, PairLossName
from engine_trainer.config import RewardModelConfig
from engine_trainer.data import Document
from engine_trainer.data.preferences import Pair
from engine_trainer.preferences.loop import train_pairs
from engine_trainer.run.run import Outcome


def train_reward_model(config: RewardModelConfig) -> Outcome:
    """Train as ``config`` says, from the beginning or from the last checkpoint.

    The loss of a pair is ``-log σ(r(chosen) - r(rejected))`` (Bradley and Terry 1952; Ouyang et al.
    2022, arXiv:2203.02155, eq. 1), with r the value at the document's last token. By the contract's
    alignment that is the model's value of everything before the token that ends the answer: a
    document to be scored must end with it.

    Raises ``EngineError`` for configuration, data, plug-ins and checkpoints.
    """
    return train_pairs(config, kind="rm", objective_of=lambda *_: RewardObjective())


class RewardObjective:
    """The values at the last tokens.

    See ``engine_trainer.preferences.loop.Objective``.
    """

    linear = LinearLoss(output="values")
    loss: PairLossName = "sigmoid"
    beta = 1.0

    def weights(self, pair: Pair) -> tuple[list[float], list[float]]:
        """Return 1 for each last token (see ``Objective``)."""
        return _last(pair.chosen), _last(pair.rejected)

    def offsets(self, heldout: bool, indices: Sequence[int], batch: Batch) -> torch.Tensor:
        """Return zeros (see ``Objective``)."""
        del heldout, batch
        return torch.zeros(2 * len(indices), dtype=torch.float64)

    def close(self) -> None:
        """Do nothing (see ``Objective``)."""


def _last(document: Document) -> list[float]:
    return [0.0] * (len(document) - 1) + [1.0]

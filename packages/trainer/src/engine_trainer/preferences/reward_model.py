"""Reward models, which are value models that score the better answer higher."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine_api.batch import Batch
from engine_trainer.algorithms.preference import LinearLoss, PairObjective, bradley_terry
from engine_trainer.config import RewardModelConfig
from engine_trainer.config.preferences import RewardModelSection
from engine_trainer.data import ChatTokenizer
from engine_trainer.data.preferences import Pair, score_token
from engine_trainer.preferences.classifier import padding_token, write_classifier
from engine_trainer.preferences.pairs import train_pairs
from engine_trainer.run.run import Outcome


def train_reward_model(config: RewardModelConfig) -> Outcome:
    """Train as ``config`` says, from the beginning or from the last checkpoint.

    The loss of a pair is ``-log σ(r(chosen) - r(rejected))``
    (``engine_trainer.algorithms.preference.bradley_terry``), with r the head's output at the
    document's last token. That is the token whose output transformers'
    ``AutoModelForSequenceClassification`` returns: the last one that is not the padding token.
    Where the token that ends an answer is also the padding token, r is therefore the output at the
    token before it.

    The saved model is read by that class. The head's bias, which cancels in the loss without
    ``rm.center``, is left out.

    Raises ``EngineError`` for configuration, data, plug-ins and checkpoints.
    """
    return train_pairs(
        config,
        kind="rm",
        objective_of=lambda _run, _data, _plan, tokenizer: RewardObjective(
            tokenizer, padding_token(tokenizer, config.engine.model), config.rm
        ),
    )


class RewardObjective:
    """The head's outputs at the last tokens.

    See ``engine_trainer.preferences.pairs.Objective``.
    """

    linear = LinearLoss(output="values")

    def __init__(self, tokenizer: ChatTokenizer, padding: int, section: RewardModelSection) -> None:
        self.loss = PairObjective(
            function=functools.partial(bradley_terry, center=section.center), name="bradley_terry"
        )
        self._padding = padding
        self._centered = section.center > 0
        # The saved tokenizer pads with the token that the saved model looks for.
        tokenizer.tokenizer.pad_token = tokenizer.tokenizer.convert_ids_to_tokens(padding)

    def documents(self, pair: Pair) -> list[dict[str, Any]]:
        """Return the documents, which sum the value about the score's token (see ``Objective``)."""
        return [
            scored_document(document.input_ids.tolist(), self._padding)
            for document in pair.documents
        ]

    def offsets(self, heldout: bool, indices: Sequence[int], batch: Batch) -> torch.Tensor:
        """Return zeros (see ``Objective``)."""
        del heldout, batch
        return torch.zeros(2 * len(indices), dtype=torch.float64)

    def convert(self, folder: Path) -> None:
        """Make the folder one of a sequence classifier (see ``Objective``)."""
        write_classifier(folder, self._padding, centered=self._centered)

    def close(self) -> None:
        """Do nothing (see ``Objective``)."""


def scored_document(tokens: list[int], padding: int) -> dict[str, Any]:
    """Return a document that sums to the head's output at its last token that is no padding.

    By the contract's alignment that output is the value about the next token, so a document that
    ends with the token is made longer by one token, which no output of the sum depends on.
    """
    at = score_token(tokens, padding) + 1
    tokens = [*tokens, tokens[-1]][: max(len(tokens), at + 1)]
    weights = [0.0] * len(tokens)
    weights[at] = 1.0
    return {"input_ids": tokens, "loss_weight": weights}

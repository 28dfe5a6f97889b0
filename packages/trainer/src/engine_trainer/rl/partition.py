"""Which completions each data-parallel rank of an engine has.

Engines of other sizes divide the same completions otherwise: each by its own topology. What one says of a token reaches the
ranks that need it for the other by ``moved``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine_api.batch import Batch
from engine_api.microbatch import balance
from engine_trainer.placement.groups import EngineGroup
from engine_trainer.rl.credit import CompletionIndex


@dataclass(frozen=True, kw_only=True)
class TrainingDocument:
    """A prompt with one answer. ``group`` and ``index_in_group`` say which: the advantage is ``advantages[group, index]``."""

    group: int
    index_in_group: int
    tokens: list[int]
    mask: list[float]  # 1 where a token counts
    rollout_log_probs: list[float]

    @property
    def index(self) -> CompletionIndex:
        """Which of a step's answers."""
        return self.group, self.index_in_group

    @property
    def counted(self) -> int:
        """Tokens that count."""
        return int(sum(self.mask))

    def fields(self) -> dict[str, Any]:
        """As ``Batch.pack`` takes them."""
        return {
            "input_ids": self.tokens,
            "mask": self.mask,
            "rollout_log_probs": self.rollout_log_probs,
        }


class Partition:
    """A step's documents over the data-parallel ranks of ``engines``, of each mini-batch about equally many tokens a rank.

    Every process knows the whole of it. A *shard* is all documents of one rank, mini-batch after mini-batch.

    Args:
        mini_batches: documents by mini-batch, the same in every process.
    """

    def __init__(
        self, engines: EngineGroup, mini_batches: Sequence[Sequence[TrainingDocument]]
    ) -> None:
        self._engines = engines
        parts = [
            [
                [documents[i] for i in part]
                for part in balance([len(d.tokens) for d in documents], engines.dp_size)
            ]
            for documents in mini_batches
        ]
        self._counts = [[len(part) for part in parts_of_ranks] for parts_of_ranks in parts]
        self._ranks = [[d for mini in parts for d in mini[rank]] for rank in range(engines.dp_size)]

    @property
    def shards(self) -> list[list[TrainingDocument]]:
        """Those of the ranks that are held here."""
        return [self._ranks[rank] for rank in self._engines.local_dp_ranks]

    def packed(self) -> list[Batch]:
        """The shards as batches with ``mask`` and ``rollout_log_probs``. Raises ``BatchError``."""
        return [_pack(shard) for shard in self.shards]

    def by_mini_batch(self, shards: Sequence[Batch]) -> list[list[Batch]]:
        """Packed shards, cut: the parts of each mini-batch, one a shard."""
        begin = [0] * len(shards)
        found: list[list[Batch]] = []
        for counts in self._counts:
            end = [
                b + counts[rank]
                for b, rank in zip(begin, self._engines.local_dp_ranks, strict=True)
            ]
            found.append(
                [s.select(range(b, e)) for s, b, e in zip(shards, begin, end, strict=True)]
            )
            begin = end
        return found

    def moved(self, values: Sequence[torch.Tensor], to: Partition) -> list[torch.Tensor]:
        """What each token has: from the shards of this partition to those of another one of the same documents.

        On all processes of the loop together.

        Args:
            values: ``[T]`` a shard, on the CPU.
        """
        if to is self:
            return list(values)
        rows = self._engines.gather(values)
        found = {
            document.index: part
            for documents, row in zip(self._ranks, rows, strict=True)
            for document, part in zip(
                documents, row.split([len(d.tokens) for d in documents]), strict=True
            )
        }
        return [
            torch.cat([values[0].new_zeros(0), *(found[d.index] for d in shard)])
            for shard in to.shards
        ]


def _pack(documents: Sequence[TrainingDocument]) -> Batch:
    if documents:
        return Batch.pack([d.fields() for d in documents])
    nothing = torch.zeros(0, dtype=torch.float32)
    return Batch.pack([]).with_fields(mask=nothing, rollout_log_probs=nothing)

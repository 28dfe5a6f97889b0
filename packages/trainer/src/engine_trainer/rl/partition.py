"""The partition of a step's completions over the data-parallel ranks of an engine.

Engines of different sizes partition the same completions differently, each by its own topology.
``Partition.moved`` brings the numbers that one engine computes for a token to the ranks that need
them in the other partition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine_api.batch import ROUTED_EXPERTS, Batch
from engine_api.media import MEDIA
from engine_api.microbatch import Bins, balance
from engine_trainer.data.datasets import DocumentImages, make_media
from engine_trainer.placement.groups import EngineGroup
from engine_trainer.rl.credit import CompletionIndex


@dataclass(frozen=True, kw_only=True)
class TrainingDocument:
    """A prompt with one completion.

    Its advantage is ``advantages[group, index_in_group]``.
    """

    group: int
    index_in_group: int
    tokens: list[int]
    mask: list[float]
    """One number per token, 1 where the token counts and 0 elsewhere."""
    rollout_log_probs: list[float]
    weight_versions: list[int] | None = None
    """The version of the weights that made each token; None where no loss reads it."""
    routed_experts: torch.Tensor | None = field(default=None, repr=False, compare=False)
    """``[tokens, L, k]``, the experts that the engine replays; None where it selects its own."""
    images: DocumentImages | None = field(default=None, repr=False, compare=False)
    """The images of the prompt, the same object for all completions of it."""

    @property
    def index(self) -> CompletionIndex:
        """The index of its completion among those of the step."""
        return self.group, self.index_in_group

    @property
    def counted(self) -> int:
        """The number of tokens that count."""
        return int(sum(self.mask))

    def fields(self) -> dict[str, Any]:
        """Return the mapping that ``Batch.pack`` takes, without the images."""
        fields: dict[str, Any] = {
            "input_ids": self.tokens,
            "mask": self.mask,
            "rollout_log_probs": self.rollout_log_probs,
        }
        if self.weight_versions is not None:
            fields["weight_versions"] = torch.tensor(self.weight_versions, dtype=torch.int32)
        if self.routed_experts is not None:
            fields[ROUTED_EXPERTS] = self.routed_experts
        return fields


class Partition:
    """A step's documents over the data-parallel ranks of ``engines``.

    In each mini-batch all ranks have about equally many tokens. Every process knows the whole
    partition. A *dp shard* is all documents of one rank, mini-batch after mini-batch.

    Args:
        mini_batches: documents by mini-batch, the same in every process.
        keeps_groups: true where the engine computes a group's prompt once
            (``memory.share_prefixes``). A group then stays on one rank, or on few where there are
            fewer groups than ranks, and its prompt counts once.
    """

    def __init__(
        self,
        engines: EngineGroup,
        mini_batches: Sequence[Sequence[TrainingDocument]],
        *,
        keeps_groups: bool = False,
    ) -> None:
        self._engines = engines
        divide = _divide_groups if keeps_groups else _divide_documents
        parts = [
            [[documents[i] for i in part] for part in divide(documents, engines.dp_size)]
            for documents in mini_batches
        ]
        self._counts = [[len(part) for part in parts_of_ranks] for parts_of_ranks in parts]
        self._ranks = [[d for mini in parts for d in mini[rank]] for rank in range(engines.dp_size)]

    @property
    def shards(self) -> list[list[TrainingDocument]]:
        """The dp shards of the local ranks."""
        return [self._ranks[rank] for rank in self._engines.local_dp_ranks]

    def pack(self) -> list[Batch]:
        """Return the local dp shards as batches with ``mask`` and ``rollout_log_probs``.

        Raises ``BatchError``, and ``ImageError`` for an image that cannot be decoded.
        """
        return [_pack(shard) for shard in self.shards]

    def by_mini_batch(self, shards: Sequence[Batch]) -> list[list[Batch]]:
        """Return for each mini-batch its part of every packed dp shard."""
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

    def move(self, values: Sequence[torch.Tensor], to: Partition) -> list[torch.Tensor]:
        """Return per-token values of this partition in the order of the partition ``to``.

        Both partitions are of the same completions, whose prompts may differ (see ``place``).
        Called on all processes of the loop together.

        Args:
            values: ``[T, …]`` per dp shard, on the CPU.
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
        return to.place(found)

    def place(
        self, found: Mapping[CompletionIndex, torch.Tensor], *, missing: int = 0
    ) -> list[torch.Tensor]:
        """Return the values of each local dp shard, ``[T, …]``, from those of each document.

        Values and document end at the same token. Values before the document's first token are left
        out, and absent values are ``missing``.
        """
        like = next(iter(found.values()), torch.zeros(0))
        return [
            torch.cat([like[:0], *(_at_end(found[d.index], len(d.tokens), missing) for d in shard)])
            for shard in self.shards
        ]


def _at_end(values: torch.Tensor, length: int, missing: int) -> torch.Tensor:
    """Return the last ``length`` values, with ``missing`` in front of fewer."""
    kept = values[max(len(values) - length, 0) :]
    absent = length - len(kept)
    if not absent:
        return kept
    return torch.cat([kept.new_full((absent, *kept.shape[1:]), missing), kept])


def _divide_documents(documents: Sequence[TrainingDocument], ranks: int) -> Bins:
    """Return the indices of each rank's documents, balanced by tokens."""
    return balance([len(d.tokens) for d in documents], ranks)


def _divide_groups(documents: Sequence[TrainingDocument], ranks: int) -> Bins:
    """Return the indices of each rank's documents, balanced by the tokens that are computed.

    With fewer groups than ranks, each group is cut into as many parts as there are ranks for it.
    """
    groups: dict[int, list[int]] = {}
    for index, document in enumerate(documents):
        groups.setdefault(document.group, []).append(index)
    cuts = math.ceil(ranks / len(groups)) if groups else 1
    parts = [members[cut::cuts] for members in groups.values() for cut in range(cuts)]
    parts = [part for part in parts if part]
    costs = [_count_computed([documents[i] for i in part]) for part in parts]
    return [
        sorted(i for number in chosen for i in parts[number]) for chosen in balance(costs, ranks)
    ]


def _count_computed(group: Sequence[TrainingDocument]) -> int:
    """Return the tokens of documents of one group, of which the prompt is computed once."""
    # Nothing of a prompt counts in the loss.
    prompt = min(next((i for i, one in enumerate(d.mask) if one), len(d.mask)) for d in group)
    return prompt + sum(len(d.tokens) - prompt for d in group)


def _pack(documents: Sequence[TrainingDocument]) -> Batch:
    if documents:
        # The images of a prompt are decoded once for all of its completions.
        images = {id(d.images): d.images for d in documents if d.images is not None}
        media = dict(zip(images, make_media([*images.values()]), strict=True)) if images else {}
        shown = [{MEDIA: media[id(d.images)]} if d.images else {} for d in documents]
        return Batch.pack([d.fields() | one for d, one in zip(documents, shown, strict=True)])
    empty = torch.zeros(0, dtype=torch.float32)
    return Batch.pack([]).with_fields(mask=empty, rollout_log_probs=empty)

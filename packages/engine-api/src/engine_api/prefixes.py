"""Documents that begin alike: their order, and their distribution over micro-batches.

Completions of one prompt begin with its tokens. An engine that computes equal beginnings once
(``memory.share_prefixes``) needs these documents in the same micro-batch, whose cost is the number
of tokens that differ. The functions are pure functions of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from engine_api.batch import Batch
from engine_api.microbatch import Bins, check_budget

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixOrder:
    """The documents of a batch, ordered so that those that begin alike are neighbours.

    No earlier document shares more tokens with a document than the one right before it.
    """

    documents: Sequence[int]
    """Indices of the documents, in order."""

    shared: Sequence[int]
    """Number of tokens that each of ``documents`` has in common with the one before it, from the
    first token on; 0 for the first.
    """

    lengths: Sequence[int]
    """Number of tokens of each of ``documents``."""


def order_by_prefix(batch: Batch) -> PrefixOrder:
    """Return the order of a batch's documents by their tokens, which is lexicographic."""
    ids = batch.input_ids.cpu()
    documents = [ids[begin:end] for begin, end in pairwise(batch.boundaries)]
    # Bytes with the highest one first compare as the tokens do.
    keys = [document.numpy().astype(">i8").tobytes() for document in documents]
    order = sorted(range(len(documents)), key=lambda index: (keys[index], index))
    shared = [_count_common(documents[one], documents[two]) for one, two in pairwise(order)]
    return PrefixOrder(
        documents=order,
        shared=[0, *shared] if order else [],
        lengths=[len(documents[index]) for index in order],
    )


def _count_common(one: torch.Tensor, other: torch.Tensor) -> int:
    """Return the number of equal tokens before the first that differs."""
    shorter = min(len(one), len(other))
    differ = (one[:shorter] != other[:shorter]).nonzero()
    return int(differ[0]) if len(differ) else shorter


def least_shared_bins(order: PrefixOrder, max_tokens: int) -> Bins:
    """Return bins of at most ``max_tokens`` different tokens each, filled in the given order.

    Raises ``BatchError`` for a document longer than the budget.
    """
    by_index = dict(zip(order.documents, order.lengths, strict=True))
    check_budget([by_index[index] for index in range(len(by_index))], max_tokens)
    return [sorted(one) for one in _fill(order, max_tokens)]


def _fill(order: PrefixOrder, budget: int) -> Bins:
    bins: Bins = []
    used = 0
    for index, shared, length in zip(order.documents, order.shared, order.lengths, strict=True):
        if bins and used + length - shared <= budget:
            bins[-1].append(index)
            used += length - shared
        else:
            # A document at the start of a bin has nothing to share its beginning with.
            bins.append([index])
            used = length
    return bins


def split_shared_micro_batches(order: PrefixOrder, max_tokens: int, count: int) -> Bins:
    """Return exactly ``count`` bins within the budget, about even and some of them empty.

    ``count`` is at least ``len(least_shared_bins(order, max_tokens))``. The bins are those of the
    smallest budget found by bisection for which no more bins are needed.
    """
    found = _fill(order, max_tokens)
    assert count >= len(found), f"{len(found)} micro-batches needed, {count} agreed on"
    low, high = max(order.lengths, default=0), max_tokens
    while low < high:
        middle = (low + high) // 2
        bins = _fill(order, middle)
        if len(bins) <= count:
            found = bins
            high = middle
        else:
            low = middle + 1
    return [sorted(one) for one in found] + [[] for _ in range(count - len(found))]

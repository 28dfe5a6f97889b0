"""The order of documents that begin alike, and their micro-batches, against counting by hand."""

from __future__ import annotations

import random

import pytest

from engine_api import Batch
from engine_api.errors import BatchError
from engine_api.prefixes import (
    least_shared_bins,
    order_by_prefix,
    split_shared_micro_batches,
)

DRAW = random.Random(0)
CASES = [
    [[DRAW.randrange(3) for _ in range(DRAW.randrange(1, 9))] for _ in range(DRAW.randrange(1, 12))]
    for _ in range(60)
]


def pack(documents: list[list[int]]) -> Batch:
    return Batch.pack([{"input_ids": document} for document in documents])


def count_distinct(documents: list[list[int]]) -> int:
    """Count the beginnings, each of which is a token of the tree."""
    return len({tuple(d[: n + 1]) for d in documents for n in range(len(d))})


@pytest.mark.parametrize("documents", CASES)
def test_bins_hold_every_document_once_and_no_more_than_the_budget(
    documents: list[list[int]],
) -> None:
    order = order_by_prefix(pack(documents))
    distinct = sum(order.lengths) - sum(order.shared)
    assert distinct == count_distinct(documents)
    for budget in (max(map(len, documents)), 10, 1000):
        if budget < max(map(len, documents)):
            continue
        least = least_shared_bins(order, budget)
        for count in (len(least), len(least) + 2):
            bins = split_shared_micro_batches(order, budget, count)
            assert len(bins) == count
            assert sorted(i for one in bins for i in one) == list(range(len(documents)))
            for one in bins:
                assert count_distinct([documents[i] for i in one]) <= budget
    assert len(least_shared_bins(order, distinct)) == 1


def test_groups_fill_one_micro_batch_that_their_copies_would_not() -> None:
    documents = [[*range(20), 30 + i] for i in range(8)]
    order = order_by_prefix(pack(documents))
    assert least_shared_bins(order, 28) == [list(range(8))]


def test_two_micro_batches_are_about_even() -> None:
    documents = [[group, *range(5), i] for group in range(4) for i in range(3)]
    order = order_by_prefix(pack(documents))
    assert split_shared_micro_batches(order, 1000, 2) == [list(range(6)), list(range(6, 12))]


def test_a_document_above_the_budget_is_named() -> None:
    order = order_by_prefix(pack([[1], [1, 2, 3, 4, 5], [2]]))
    with pytest.raises(BatchError, match="document 1 has 5 tokens, the budget is 4"):
        least_shared_bins(order, 4)


def test_no_documents() -> None:
    order = order_by_prefix(Batch.pack([]))
    assert least_shared_bins(order, 8) == []
    assert split_shared_micro_batches(order, 8, 2) == [[], []]

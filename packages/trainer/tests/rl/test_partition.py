"""Partitions of documents over the data-parallel ranks of engines of different sizes.

Tokens' values are moved between them.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine_trainer.rl.partition import Partition, TrainingDocument


def document(group: int, index_in_group: int, length: int) -> TrainingDocument:
    ones = [1.0] * length
    return TrainingDocument(
        group=group,
        index_in_group=index_in_group,
        tokens=list(range(length)),
        mask=ones,
        rollout_log_probs=ones,
    )


MINI_BATCHES = [
    [document(0, i, 2 + 3 * i) for i in range(4)],
    [],
    [document(1, i, 9 - 2 * i) for i in range(3)],
]
WHOLE = {d.index: torch.randn(len(d.tokens)) for mini in MINI_BATCHES for d in mini}


def engines(size: int, held: list[int] | None = None) -> SimpleNamespace:
    """Return a controller's engines, to which all dp shards are local, or those of one process.

    Such a process has one local shard and receives those of other processes.
    """

    def gather(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        every = values(Partition(engines(size), MINI_BATCHES))
        for rank, row in zip(group.local_dp_ranks, rows, strict=True):
            assert torch.equal(row, every[rank])
        return every

    group = SimpleNamespace(
        dp_size=size, local_dp_ranks=list(range(size)) if held is None else held, gather=gather
    )
    return group


def values(partition: Partition) -> list[torch.Tensor]:
    return [
        torch.cat([torch.zeros(0), *(WHOLE[d.index] for d in shard)]) for shard in partition.shards
    ]


@pytest.mark.parametrize(("given", "wanted"), [(1, 1), (1, 3), (2, 1), (3, 2), (2, 9), (9, 4)])
def test_what_each_token_has_reaches_the_rank_that_has_it(given, wanted):
    source = Partition(engines(given), MINI_BATCHES)
    target = Partition(engines(wanted), MINI_BATCHES)
    moved = source.move(values(source), target)
    for got, want in zip(moved, values(target), strict=True):
        assert torch.equal(got, want)
        assert got.dtype == want.dtype
    assert sum(len(row) for row in moved) == sum(
        len(d.tokens) for mini in MINI_BATCHES for d in mini
    )


@pytest.mark.parametrize(("held", "wanted"), [([0], [1]), ([1], [2]), ([2], [0])])
def test_of_a_process_that_holds_one_share_of_each(held, wanted):
    source = Partition(engines(3, held), MINI_BATCHES)
    target = Partition(engines(4, wanted), MINI_BATCHES)
    (moved,) = source.move(values(source), target)
    assert torch.equal(moved, values(Partition(engines(4), MINI_BATCHES))[wanted[0]])


def test_the_same_division_moves_nothing():
    one = Partition(engines(2), MINI_BATCHES)
    given = values(one)
    assert all(a is b for a, b in zip(one.move(given, one), given, strict=True))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_shares_are_cut_into_mini_batches(size):
    one = Partition(engines(size), MINI_BATCHES)
    parts = one.by_mini_batch(one.pack())
    assert [sum(p.num_tokens for p in part) for part in parts] == [
        sum(len(d.tokens) for d in m) for m in MINI_BATCHES
    ]
    assert all(len(part) == size for part in parts)
    assert [sorted(n for p in part for n in p.lengths) for part in parts] == [
        sorted(len(d.tokens) for d in mini) for mini in MINI_BATCHES
    ]


def prompted(group: int, index: int, prompt: int, answer: int) -> TrainingDocument:
    ones = [1.0] * (prompt + answer)
    return TrainingDocument(
        group=group,
        index_in_group=index,
        tokens=list(range(prompt + answer)),
        mask=[0.0] * prompt + [1.0] * answer,
        rollout_log_probs=ones,
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_group_whose_prompt_is_computed_once_stays_together(ranks):
    groups = [[prompted(g, i, 10 + 5 * g, 3 + i) for i in range(4)] for g in range(4)]
    documents = [d for group in groups for d in group]
    partition = Partition(engines(ranks), [documents], keeps_groups=True)
    shards = partition.shards
    assert sorted(d.index for shard in shards for d in shard) == [d.index for d in documents]
    for group in range(4):
        held = [sum(d.group == group for d in shard) for shard in shards]
        # Eight ranks share four groups by halves.
        assert sorted(n for n in held if n) == ([4] if ranks <= 4 else [2, 2])
    assert all(shards)


def test_a_prompt_counts_once_in_the_balance_of_ranks():
    # Counted once the long prompt's group has 38 tokens, the two others 32 together.
    documents = [prompted(0, i, 30, 2) for i in range(4)]
    documents += [prompted(g, i, 4, 3) for g in (1, 2) for i in range(4)]
    (long, short) = Partition(engines(2), [documents], keeps_groups=True).shards
    assert {d.group for d in long} == {0}
    assert {d.group for d in short} == {1, 2}

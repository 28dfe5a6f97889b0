"""Tests of the split by token budget: properties over many lists of lengths, and agreement."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_api import Batch, Topology
from engine_api.errors import BatchError, RankFailure
from engine_api.microbatch import balance, least_bins, split_micro_batches
from engine_api.prepare import prepare
from engine_api.results import TokenOutputs

LENGTHS = st.lists(st.integers(1, 40), max_size=30)
BUDGET = st.integers(40, 120)


def each_document_once(bins, lengths):
    return sorted(i for b in bins for i in b) == list(range(len(lengths)))


@given(LENGTHS, BUDGET)
def test_least_bins_keep_the_budget_and_every_document(lengths, budget):
    bins = least_bins(lengths, budget)
    assert each_document_once(bins, lengths)
    assert all(sum(lengths[i] for i in b) <= budget for b in bins)
    # First-fit leaves at most one bin under half full.
    assert len(bins) <= max(1, 2 * sum(lengths) / budget + 1)


@given(LENGTHS, BUDGET, st.integers(0, 5))
def test_the_agreed_count_is_kept(lengths, budget, more):
    count = max(1, len(least_bins(lengths, budget)) + more)
    bins = split_micro_batches(lengths, budget, count)
    assert len(bins) == count
    assert each_document_once(bins, lengths)
    assert all(sum(lengths[i] for i in b) <= budget for b in bins)
    # The split is the same on every rank.
    assert bins == split_micro_batches(lengths, budget, count)


@given(LENGTHS, st.integers(1, 6))
def test_balanced_bins_differ_by_one_document_at_most(lengths, parts):
    bins = balance(lengths, parts)
    assert each_document_once(bins, lengths)
    loads = [sum(lengths[i] for i in b) for b in bins]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_balance_takes_a_cost():
    bins = balance([8, 4, 4, 4, 4], 2, cost=lambda n: n * n)
    assert bins == [[0], [1, 2, 3, 4]]


def test_a_document_over_the_budget_is_named():
    with pytest.raises(BatchError) as caught:
        least_bins([3, 9, 4], 8)
    assert (caught.value.field, caught.value.index) == ("cu_seqlens", 1)


def test_ranks_agree_on_count_denominator_and_tokens(ranks, make_batch):
    lengths = [[8, 8, 8], [3], []]

    def work(comm):
        topology = Topology(rank=comm.rank, world_size=3, dp_rank=comm.rank, dp_size=3)
        batch = make_batch(lengths[comm.rank]) if lengths[comm.rank] else Batch.pack([])
        return prepare(
            batch, comm=comm, topology=topology, max_tokens=8, vocab_size=11, needs_weight=True
        )

    found = ranks(3, work)
    assert [len(f.parts) for f in found] == [3, 3, 3]
    assert {f.loss_weight for f in found} == {23.0}
    assert {f.num_tokens for f in found} == {27}
    assert [sum(p.num_tokens for p in f.parts) for f in found] == [24, 3, 0]


def test_a_bad_batch_on_one_rank_stops_all(ranks, make_batch):
    def work(comm):
        topology = Topology(rank=comm.rank, world_size=2, dp_rank=comm.rank, dp_size=2)
        lengths = [9] if comm.rank == 1 else [3]
        return prepare(
            make_batch(lengths),
            comm=comm,
            topology=topology,
            max_tokens=8,
            vocab_size=11,
            needs_weight=True,
        )

    other, own = ranks(2, work)
    assert isinstance(own, BatchError)
    assert isinstance(other, RankFailure)
    assert "document 0 has 9 tokens" in other.failures[1]


def test_ranks_that_share_documents_must_share_them(ranks, make_batch):
    def work(comm, seeds):
        topology = Topology(
            rank=comm.rank, world_size=2, dp_rank=0, dp_size=1, is_primary=comm.rank == 0
        )
        batch = make_batch([4], seed=seeds[comm.rank])
        return prepare(
            batch, comm=comm, topology=topology, max_tokens=8, vocab_size=11, needs_weight=True
        )

    assert all(isinstance(e, BatchError) for e in ranks(2, lambda comm: work(comm, (0, 1))))
    # Both ranks have the same documents, whose weights count once.
    weights = [m.loss_weight for m in ranks(2, lambda comm: work(comm, (0, 0)))]
    assert weights == [3.0, 3.0]


def test_missing_weights_are_asked_for_only_where_needed(ranks):
    batch = Batch.pack([{"input_ids": [1, 2]}])

    def work(comm, *, needs_weight):
        return prepare(
            batch,
            comm=comm,
            topology=Topology(),
            max_tokens=8,
            vocab_size=11,
            needs_weight=needs_weight,
        )

    assert isinstance(ranks(1, lambda c: work(c, needs_weight=True))[0], BatchError)
    assert ranks(1, lambda c: work(c, needs_weight=False))[0].loss_weight is None


def test_outputs_are_merged_in_token_order(ranks, make_batch):
    batch = make_batch([3, 5, 2, 4])
    (split,) = ranks(
        1,
        lambda comm: prepare(
            batch, comm=comm, topology=Topology(), max_tokens=6, vocab_size=11, needs_weight=True
        ),
    )
    assert len(split.parts) > 1
    merged = split.merge([TokenOutputs(log_probs=part.input_ids.float()) for part in split.parts])
    assert torch.equal(merged.log_probs, batch.input_ids.float())
    assert merged.entropy is None

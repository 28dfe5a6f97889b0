"""The experts of a conversation that several generations made."""

from __future__ import annotations

import torch

from engine_trainer.utils.experts import join_experts, pad_experts


def table(*rows):
    """Return experts of one layer, one for each token."""
    return torch.tensor(rows, dtype=torch.int8)[:, None, None]


def test_a_token_keeps_the_experts_that_served_it_first():
    first, second = table(1, 2, -1), table(3, 3, 3, 3, -1)
    assert torch.equal(join_experts(first, second), table(1, 2, 3, 3, -1))
    assert torch.equal(join_experts(None, second), second)
    assert torch.equal(join_experts(first, None), first)
    assert join_experts(None, None) is None


def test_tokens_without_a_record_are_unknown():
    like = table(0)
    assert torch.equal(pad_experts(table(1, -1), 4, like), table(1, -1, -1, -1))
    assert torch.equal(pad_experts(None, 2, like), table(-1, -1))

from __future__ import annotations

import math

import pytest
import torch

from engine_trainer.algorithms import LossOutput, PolicyTokens
from engine_trainer.testing import CheckFailed, check_loss
from own_loss import topr


def test_a_run_can_rely_on_it():
    check_loss(topr)
    check_loss(topr, low=0.1, high=2.0)


def test_its_value_and_gradient_by_hand():
    log_probs = torch.tensor([-1.0, -2.0, -0.5, -1.5], dtype=torch.float64, requires_grad=True)
    ratios = torch.tensor([0.5, 0.5, 3.0, 1.0], dtype=torch.float64)
    tokens = PolicyTokens(
        log_probs=log_probs,
        old_log_probs=log_probs.detach() - ratios.log(),
        advantages=torch.tensor([-1.0, -1.0, 2.0, 2.0], dtype=torch.float64),
        mask=torch.ones(4, dtype=torch.bool),
        weight=torch.ones(4, dtype=torch.float64),
        cu_seqlens=torch.tensor([0, 2, 4]),
    )
    loss = topr(tokens).loss
    (gradient,) = torch.autograd.grad(loss, log_probs)
    # 0.5 · 0.5 of the first completion, and 1 in the second although its ratio is 3.
    assert gradient.tolist() == pytest.approx([0.25, 0.25, -2.0, -2.0])
    assert math.isclose(float(loss.detach()), 0.25 * -3.0 + 2.0 * 2.0)


def mean_instead_of_sum(tokens: PolicyTokens) -> LossOutput:
    """Return a mean, which depends on how documents fall on micro-batches."""
    value = -tokens.advantages * tokens.log_probs * tokens.weight
    return LossOutput(loss=value.sum() / tokens.mask.sum())


def test_a_mean_is_caught():
    with pytest.raises(CheckFailed, match="the loss is a mean") as caught:
        check_loss(mean_instead_of_sum)
    assert "the trainer divides once" in str(caught.value)

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from engine_api.batch import Batch
from engine_api.errors import ConfigError
from engine_api.results import TokenOutputs
from engine_trainer.algorithms.preference import LinearLoss, pair_loss


@pytest.mark.parametrize(
    ("name", "margin", "beta", "loss", "slope"),
    [
        ("sigmoid", 0.0, 0.1, math.log(2), -0.05),  # -β σ(0)
        ("sigmoid", 10.0, 0.1, math.log(1 + math.exp(-1)), -0.1 / (1 + math.exp(1))),
        ("sigmoid", -30.0, 0.1, math.log(1 + math.exp(3)), -0.1 / (1 + math.exp(-3))),
        ("hinge", 4.0, 0.1, 0.6, -0.1),
        ("hinge", 11.0, 0.1, 0.0, 0.0),
        ("ipo", 4.0, 0.1, 1.0, -2.0),  # 1 / (2β) = 5
        ("ipo", 8.0, 0.1, 9.0, 6.0),
    ],
)
def test_the_losses_by_hand(name, margin, beta, loss, slope):
    values, slopes = pair_loss(torch.tensor([margin]), beta, name)
    assert float(values) == pytest.approx(loss, rel=1e-9)
    assert float(slopes) == pytest.approx(slope, rel=1e-9)


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e3])
@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo"])
def test_the_slope_is_the_derivative(name, scale):
    margin = (
        torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scale
    ).requires_grad_()
    loss, slope = pair_loss(margin, 0.3, name)
    (expected,) = torch.autograd.grad(loss.sum(), margin)
    torch.testing.assert_close(slope, expected, rtol=1e-12, atol=0)
    assert bool(loss.isfinite().all())


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo"])
def test_no_pairs_far_pairs_and_a_lost_one(name):
    loss, slope = pair_loss(torch.zeros(0), 0.1, name)
    assert loss.shape == slope.shape == (0,)
    loss, slope = pair_loss(torch.tensor([-1e6, 1e6]), 0.1, name)
    assert bool(loss.isfinite().all() and slope.isfinite().all())
    loss, slope = pair_loss(torch.tensor([math.nan, 1.0]), 0.1, name)
    assert loss.isnan().tolist() == [True, False]  # hinge's too: no loss is taken for none
    assert slope[1:].isfinite().all()


def test_a_name_that_nobody_knows():
    with pytest.raises(ConfigError, match="sigmoid"):
        pair_loss(torch.zeros(1), 0.1, "sigmoyd")  # pyright: ignore[reportArgumentType]


def test_the_linear_loss_has_the_gradient_of_the_pairs_wherever_they_lie():
    """Compare with autograd of DPO over whole pairs.

    The documents are in a different order and split over micro-batches.
    """
    dice = torch.Generator().manual_seed(3)
    lengths = [4, 3, 2, 6]  # chosen 0, rejected 0, chosen 1, rejected 1
    cu = torch.tensor([0, 4, 7, 9, 15])
    new = (torch.randn(15, generator=dice, dtype=torch.float64) * 2).requires_grad_()
    reference = torch.randn(4, generator=dice, dtype=torch.float64) * 3
    mask = torch.ones(15, dtype=torch.float64)
    mask[cu[:-1]] = 0
    sums = torch.stack([(new * mask)[a:b].sum() for a, b in pairwise(cu.tolist())]) - reference
    margin = sums[0::2] - sums[1::2]
    (expected,) = torch.autograd.grad(
        -torch.nn.functional.logsigmoid(0.2 * margin).sum(), new, retain_graph=True
    )

    _, slope = pair_loss(margin.detach(), 0.2)
    sign = torch.stack([slope, -slope], dim=1).flatten()
    coefficient = torch.repeat_interleave(sign, torch.tensor(lengths)) * mask
    batch = Batch(
        input_ids=torch.arange(15),
        cu_seqlens=cu,
        fields={"coefficient": coefficient, "loss_weight": mask},
    )
    loss = LinearLoss()
    given = torch.zeros(15, dtype=torch.float64)
    for documents in ([3, 0], [2], [1]):
        part = batch.select(documents)
        at = batch.token_index(documents)
        leaf = new.detach()[at].requires_grad_()
        (given[at],) = torch.autograd.grad(loss(TokenOutputs(log_probs=leaf), part).loss, leaf)
        known = loss.coefficients(part)
        assert known is not None
        assert torch.equal(known, given[at])
    torch.testing.assert_close(given, expected, rtol=1e-13, atol=0)
    assert LinearLoss(output="values").needs == ("values",)
    assert LinearLoss(output="values").coefficients(batch) is None

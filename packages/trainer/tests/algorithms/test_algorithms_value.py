from __future__ import annotations

import statistics

import pytest
import torch

from engine_api.batch import Batch
from engine_api.errors import BatchError, ConfigError
from engine_api.results import TokenOutputs
from engine_trainer.algorithms.value_loss import ValueLoss, explained_variance


def make_batch(returns, old=None, weights=None) -> Batch:
    fields = {"returns": [0.0, *returns], "loss_weight": [0.0, *(weights or [1.0] * len(returns))]}
    if old is not None:
        fields["old_values"] = [0.0, *old]
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in fields.items()}
    count = len(returns) + 1
    return Batch(input_ids=torch.arange(count), cu_seqlens=torch.tensor([0, count]), fields=tensors)


def outputs(*values: float) -> TokenOutputs:
    return TokenOutputs(values=torch.tensor([0.0, *values], dtype=torch.float64).requires_grad_())


@pytest.mark.parametrize(
    ("value", "expected", "slope"),
    [
        (1.1, 0.5 * 0.9**2, -0.9),  # within 0.2 of the old value: the plain square
        # The value rose past the clip towards the return of 2: it is held at 1.2, without a
        # gradient.
        (1.5, 0.5 * 0.8**2, 0.0),
        (0.5, 0.5 * 1.5**2, -1.5),  # away from the return: the plain square is the larger
    ],
)
def test_the_clip_by_hand(value, expected, slope):
    given = outputs(value)
    result = ValueLoss(clip=0.2)(given, make_batch([2.0], [1.0]))
    assert float(result.loss.detach()) == pytest.approx(expected, abs=1e-12)
    (gradient,) = torch.autograd.grad(result.loss, given.values)
    assert gradient.tolist() == pytest.approx([0.0, slope], abs=1e-12)
    assert float(result.metrics["clipped"]) == (slope == 0.0)


def test_a_weighted_sum_with_sums_as_metrics():
    result = ValueLoss()(
        outputs(1.0, 3.0, 7.0), make_batch([2.0, 1.0, 0.0], weights=[1.0, 0.5, 0.0])
    )
    assert float(result.loss.detach()) == pytest.approx(0.5 * (1 + 0.5 * 4))
    sums = {name: float(value) for name, value in result.metrics.items()}
    assert sums == {
        "tokens": 2,
        "value": 4,
        "return": 3,
        "return_square": 5,
        "error": -1,
        "error_square": 5,
    }


def test_what_is_not_in_the_loss_is_not_read():
    ValueLoss()(outputs(1.0), make_batch([2.0]))
    with pytest.raises(BatchError, match="old_values"):
        ValueLoss(clip=0.2)(outputs(1.0), make_batch([2.0]))
    with pytest.raises(ConfigError, match=r"value_clip"):
        ValueLoss(clip=0.0)


@pytest.mark.parametrize("scale", [0.1, 100.0])
def test_gradients_agree_with_finite_differences(scale):
    dice = torch.Generator().manual_seed(2)
    draw = [torch.randn(30, generator=dice, dtype=torch.float64) * scale for _ in range(3)]
    batch = make_batch(draw[0].tolist(), draw[1].tolist())
    loss = ValueLoss(clip=scale / 2)
    leaf = torch.cat([torch.zeros(1, dtype=torch.float64), draw[2]]).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda v: loss(TokenOutputs(values=v), batch).loss, leaf, eps=1e-6 * scale
    )


def test_explained_variance_by_hand():
    returns = [1.0, 2.0, 4.0]
    values = [1.5, 2.0, 3.0]
    result = ValueLoss()(outputs(*values), make_batch(returns))
    sums = {name: float(value) for name, value in result.metrics.items()}
    rest = [r - v for r, v in zip(returns, values, strict=True)]
    expected = 1 - statistics.pvariance(rest) / statistics.pvariance(returns)
    assert explained_variance(sums) == pytest.approx(expected)
    assert explained_variance({**sums, "tokens": 0.0}) == 0.0


def test_nothing_counts_and_a_lost_value_makes_the_loss_be_lost():
    given = outputs(1.0, 2.0)
    result = ValueLoss(clip=0.2)(given, make_batch([5.0, 6.0], [0.0, 0.0], weights=[0.0, 0.0]))
    (gradient,) = torch.autograd.grad(result.loss, given.values)
    assert float(result.loss.detach()) == float(result.metrics["tokens"]) == 0
    assert not gradient.any()
    lost = ValueLoss(clip=0.2)(outputs(float("nan")), make_batch([5.0], [0.0]))
    assert result.loss.isfinite()
    assert lost.loss.isnan()  # so that the engine skips the step


def test_the_split_into_micro_batches_changes_nothing():
    dice = torch.Generator().manual_seed(4)
    documents = [
        {
            "input_ids": [0] * n,
            "returns": torch.randn(n, generator=dice, dtype=torch.float64) * 3,
            "old_values": torch.randn(n, generator=dice, dtype=torch.float64) * 3,
            "loss_weight": [0.0] + [1.0] * (n - 1),
        }
        for n in (1, 5, 2, 9)
    ]
    batch = Batch.pack(documents)
    values = torch.randn(17, generator=dice, dtype=torch.float64) * 3
    loss = ValueLoss(clip=0.5)
    whole = loss(TokenOutputs(values=values), batch)
    parts = [
        loss(TokenOutputs(values=values[batch.token_index(d)]), batch.select(d))
        for d in ([3, 0], [2], [1])
    ]
    assert float(sum(p.loss for p in parts)) == pytest.approx(float(whole.loss), rel=1e-13)
    for name, total in whole.metrics.items():
        assert float(sum(p.metrics[name] for p in parts)) == pytest.approx(float(total), rel=1e-12)

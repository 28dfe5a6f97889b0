"""Tests of the formulas of schedules, losses, token weights and shards."""

from __future__ import annotations

import math

import pytest
import torch

from engine_api import ScheduleConfig, ShardSpec, TokenOutputs, sft_loss, token_weights
from engine_api.errors import ConfigError
from engine_api.losses import needs_of
from engine_api.schedule import lr_factor
from engine_api.weights import assemble


def factors(name, steps, **schedule):
    return [lr_factor(ScheduleConfig(name=name, **schedule), step) for step in steps]


def test_warm_up_rises_to_one_and_meets_the_schedule():
    assert factors("constant", range(5), warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors("linear", [3, 4], warmup_steps=4, total_steps=8) == [1.0, 1.0]


def test_linear_falls_to_the_minimum_and_stays():
    found = factors("linear", [0, 5, 10, 99], total_steps=10, min_ratio=0.1)
    assert found == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_cosine_is_the_half_wave():
    found = factors("cosine", [2, 4, 6, 10, 11], warmup_steps=2, total_steps=10, min_ratio=0.2)
    waves = [0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * p)) for p in (0, 0.25, 0.5, 1, 1)]
    assert found == pytest.approx(waves)


def test_sft_loss_is_a_weighted_sum(make_batch):
    batch = make_batch([3, 2])
    found = sft_loss(TokenOutputs(log_probs=torch.full((5,), -2.0)), batch)
    assert float(found.loss) == 6.0
    assert float(found.metrics["tokens"]) == 3


def test_a_loss_says_what_it_needs():
    def value_loss(outputs, batch): ...

    assert needs_of(value_loss) == ("log_probs",)
    value_loss.needs = ("values",)
    assert needs_of(value_loss) == ("values",)


def test_aggregation_modes_are_weights():
    mask, cu = torch.tensor([0, 1, 1, 0, 1, 0]), torch.tensor([0, 3, 5, 6])
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        assert token_weights(mask, cu, mode).tolist() == [0, 1, 1, 0, 1, 0]
    by_document = token_weights(mask, cu, "seq-mean-token-mean")
    # The second document has one counted token of two, and the third has none.
    assert by_document.tolist() == [0, 0.5, 0.5, 0, 1, 0]
    with pytest.raises(ConfigError, match="seq-mean-token-mean"):
        token_weights(mask, cu, "mean")


def box(offset, shape, replica=0):
    return ShardSpec(global_shape=(4, 3), offset=offset, shape=shape, replica=replica)


def shard(whole, spec):
    return whole[spec.slices].clone(), spec


def test_shards_make_the_whole():
    whole = torch.arange(12.0).view(4, 3)
    specs = [
        box((0, 0), (3, 3)),
        box((3, 0), (1, 2)),
        box((3, 2), (1, 1)),
        box((0, 0), (3, 3), replica=1),
        ShardSpec.nothing((4, 3)),
    ]
    assert torch.equal(assemble([shard(whole, spec) for spec in specs]), whole)
    assert torch.equal(assemble([(torch.tensor(7.0), ShardSpec.whole(()))]), torch.tensor(7.0))


@pytest.mark.parametrize(
    "specs", [[box((0, 0), (3, 3))], [box((0, 0), (3, 3)), box((2, 0), (2, 3))]]
)
def test_holes_and_overlaps_are_refused(specs):
    whole = torch.zeros(4, 3)
    with pytest.raises(ValueError, match="exactly once"):
        assemble([shard(whole, spec) for spec in specs])


def test_boxes_outside_the_tensor_are_programmers_errors():
    with pytest.raises(AssertionError):
        box((3, 0), (2, 3))
    assert ShardSpec.nothing((4, 3)).is_empty
    assert not ShardSpec.whole((0, 3)).is_empty

from __future__ import annotations

import math

import pytest
import torch

from engine_api.errors import ConfigError
from engine_trainer.algorithms.advantages import group_advantages, is_flat


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_grpo_by_hand():
    # mean 0.25, Bessel variance (0.75² + 3 · 0.25²) / 3 = 0.25, std 0.5
    result = group_advantages(rows([1, 0, 0, 0]), "grpo", eps=0.0)
    torch.testing.assert_close(result, torch.tensor([[1.5, -0.5, -0.5, -0.5]]))


def test_grpo_eps_is_added_to_the_deviation():
    result = group_advantages(rows([1, 0, 0, 0]), "grpo", eps=0.5)
    torch.testing.assert_close(result, torch.tensor([[0.75, -0.25, -0.25, -0.25]]))


def test_dr_grpo_by_hand():
    result = group_advantages(rows([1, 0, 0, 0], [3, 1, 1, -1]), "dr_grpo")
    torch.testing.assert_close(result, torch.tensor([[0.75, -0.25, -0.25, -0.25], [2, 0, 0, -2.0]]))


def test_rloo_is_against_the_mean_of_the_others():
    rewards = rows([4, 1, 1, 0])
    others = [(6 - r) / 3 for r in (4, 1, 1, 0)]
    expected = torch.tensor([[r - o for r, o in zip((4, 1, 1, 0), others, strict=True)]])
    torch.testing.assert_close(group_advantages(rewards, "rloo"), expected.float())


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -7.3, 1e6])
def test_equal_rewards_give_exactly_zero(estimator, reward):
    # The mean of eight times 0.1 is not 0.1; the rest, divided by a deviation of 1e-6, would be an
    # advantage.
    assert group_advantages(torch.full((2, 8), reward), estimator).abs().max() == 0


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_groups_do_not_touch_each_other_and_sum_to_zero(estimator):
    rewards = (
        torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 10
    )
    together = group_advantages(rewards, estimator)
    alone = torch.cat([group_advantages(row[None], estimator) for row in rewards])
    torch.testing.assert_close(together, alone, rtol=0, atol=0)
    assert together.sum(-1).abs().max() < 1e-5
    assert together.dtype == torch.float32


def test_grpo_does_not_depend_on_the_scale_of_rewards():
    rewards = rows([1, 0, 2, 5])
    torch.testing.assert_close(
        group_advantages(rewards * 100), group_advantages(rewards), rtol=1e-5, atol=0
    )
    assert math.isclose(float(group_advantages(rewards).std()), 1.0, rel_tol=1e-5)


def test_one_completion_is_no_group():
    with pytest.raises(ConfigError, match=r"rollout\.n"):
        group_advantages(rows([1.0]))


def test_unknown_estimator_names_the_near_one():
    with pytest.raises(ConfigError, match="dr_grpo"):
        group_advantages(rows([1, 0]), "drgrpo")  # pyright: ignore[reportArgumentType]


def test_is_flat():
    assert is_flat(rows([1, 1, 1], [1, 1, 0], [0, 0, 0])).tolist() == [True, False, True]

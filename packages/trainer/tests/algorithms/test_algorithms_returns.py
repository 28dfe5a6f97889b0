from __future__ import annotations

import math
import random
import statistics
from itertools import pairwise

import pytest
import torch

from engine_trainer.algorithms.returns import Moments, gae, returns_to_go, token_rewards, whiten


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# A document of two prompt tokens and three completion tokens, one with a token of a tool in the
# middle, one without a completion.
CU = torch.tensor([0, 5, 9, 11])
MASK = f64(0, 0, 1, 1, 1, 0, 1, 0, 1, 0, 0)


def test_rewards_stand_at_the_last_token_that_counts():
    kl = f64(9, 9, 0.1, 0.2, 0.3, 9, 0.4, 9, 0.5, 9, 9)
    given = token_rewards(f64(1.0, -2.0, 7.0), MASK, CU, kl=kl, coefficient=0.5)
    torch.testing.assert_close(given, f64(0, 0, -0.05, -0.1, 1 - 0.15, 0, -0.2, 0, -2 - 0.25, 0, 0))
    torch.testing.assert_close(
        token_rewards(f64(1.0, -2.0, 7.0), MASK, CU), f64(0, 0, 0, 0, 1, 0, 0, 0, -2, 0, 0)
    )


def test_returns_by_hand():
    rewards = f64(9, 9, 1, 2, 3, 9, 4, 9, 5, 9, 9)  # where nothing counts it is not read
    torch.testing.assert_close(
        returns_to_go(rewards, MASK, CU), f64(0, 0, 6, 5, 3, 0, 9, 0, 5, 0, 0)
    )
    # 1 + 2/2 + 3/4, 2 + 3/2, 3; 4 + 5/2 over the tool's token, 5
    torch.testing.assert_close(
        returns_to_go(rewards, MASK, CU, 0.5), f64(0, 0, 2.75, 3.5, 3, 0, 6.5, 0, 5, 0, 0)
    )


def test_gae_by_hand():
    rewards = f64(0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0)
    values = f64(9, 9, 0.5, 0.25, 0.75, 9, 1.0, 9, 1.5, 9, 9)
    advantages, returns = gae(rewards, values, MASK, CU, gamma=0.8, lam=0.5)
    # δ: 1 - 0.75 = 0.25; 0.8·0.75 - 0.25 = 0.35; 0.8·0.25 - 0.5 = -0.3, and γλ = 0.4
    third = 0.25
    second = 0.35 + 0.4 * 0.25
    first = -0.3 + 0.4 * second
    # δ: 2 - 1.5 = 0.5; 0.8·1.5 - 1 = 0.2
    torch.testing.assert_close(
        advantages, f64(0, 0, first, second, third, 0, 0.2 + 0.4 * 0.5, 0, 0.5, 0, 0)
    )
    torch.testing.assert_close(
        returns, f64(0, 0, first + 0.5, second + 0.25, 1.0, 0, 1.4, 0, 2.0, 0, 0)
    )


def test_the_ends_of_lambda():
    rewards = f64(0, 0, 1, 2, 3, 0, 4, 0, 5, 0, 0)
    values = f64(9, 9, 0.5, 0.25, 0.75, 9, 1.0, 9, 1.5, 9, 9)
    monte_carlo, targets = gae(rewards, values, MASK, CU, gamma=1.0, lam=1.0)
    torch.testing.assert_close(targets, returns_to_go(rewards, MASK, CU))
    torch.testing.assert_close(monte_carlo, targets - values * MASK)
    one_step, _ = gae(rewards, values, MASK, CU, gamma=1.0, lam=0.0)
    torch.testing.assert_close(one_step, f64(0, 0, 0.75, 2.5, 2.25, 0, 4.5, 0, 3.5, 0, 0))


def plain_gae(rewards, values, mask, cu, gamma, lam):
    """Return the recurrence of GAE, token by token from the end."""
    out = [0.0] * len(rewards)
    for a, b in pairwise(cu):
        following = 0.0
        carried = 0.0
        for t in range(b - 1, a - 1, -1):
            if mask[t]:
                carried = rewards[t] + gamma * following - values[t] + gamma * lam * carried
                following, out[t] = values[t], carried
    return out


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize(
    ("gamma", "lam"), [(1.0, 0.95), (0.99, 1.0), (0.9, 0.5), (0.0, 0.3), (1.0, 0.0)]
)
def test_gae_is_the_recurrence(scale, gamma, lam):
    dice = random.Random(5)
    lengths = [1, 2, 3, 1, 64, 33, 200, 7]
    cu = [0]
    for n in lengths:
        cu.append(cu[-1] + n)
    mask = [float(dice.random() < 0.7) for _ in range(cu[-1])]
    rewards, values = ([dice.gauss(0, scale) for _ in mask] for _ in range(2))
    given, targets = gae(
        f64(*rewards), f64(*values), f64(*mask), torch.tensor(cu), gamma=gamma, lam=lam
    )
    expected = f64(*plain_gae(rewards, values, mask, cu, gamma, lam))
    torch.testing.assert_close(given, expected, rtol=1e-11, atol=1e-12 * scale)
    torch.testing.assert_close(
        targets, (expected + f64(*values)) * f64(*mask), rtol=1e-11, atol=1e-12 * scale
    )
    single = gae(
        f64(*rewards).float(),
        f64(*values).float(),
        f64(*mask),
        torch.tensor(cu),
        gamma=gamma,
        lam=lam,
    )[0]
    assert single.dtype == torch.float64
    torch.testing.assert_close(single, expected, rtol=1e-4, atol=1e-4 * scale)


def test_documents_do_not_touch_each_other_even_where_one_is_not_a_number():
    rewards = torch.ones(11, dtype=torch.float64)
    values = torch.ones(11, dtype=torch.float64)
    rewards[3] = math.nan
    advantages, _ = gae(rewards, values, MASK, CU, gamma=1.0, lam=1.0)
    assert advantages[2:4].isnan().all()
    assert advantages[4:].isfinite().all()
    assert returns_to_go(rewards, MASK, CU)[4:].isfinite().all()


@pytest.mark.parametrize("cu", [[0], [0, 1], [0, 0, 3, 3], [0, 2, 3]])
def test_nothing_counts(cu):
    none = torch.zeros(cu[-1], dtype=torch.float64)
    cu = torch.tensor(cu)
    advantages, returns = gae(none, none + 3, none, cu, gamma=0.9, lam=0.9)
    assert not advantages.any()
    assert not returns.any()
    assert not token_rewards(torch.ones(len(cu) - 1), none, cu).any()


def test_one_token_is_its_own_return():
    advantages, returns = gae(
        f64(0, 3), f64(0, 1), f64(0, 1), torch.tensor([0, 2]), gamma=0.9, lam=0.9
    )
    assert advantages.tolist() == [0, 2]
    assert returns.tolist() == [0, 3]


def test_moments_of_parts_are_those_of_the_whole():
    dice = random.Random(2)
    # A difference of squares would lose all digits in float32.
    values = [dice.gauss(1e4, 1e-2) for _ in range(50)]
    parts = [
        Moments.of(f64(*values[a:b]), torch.ones(b - a))
        for a, b in ((0, 1), (1, 1), (1, 30), (30, 50))
    ]
    whole = Moments.merge(parts)
    assert whole.count == 50
    assert whole.mean == pytest.approx(statistics.fmean(values), rel=1e-14)
    assert whole.variance == pytest.approx(statistics.variance(values), rel=1e-6)
    assert Moments.merge([]).variance == Moments.of(f64(3.0), f64(1)).variance == 0


def test_whitening_by_hand():
    values = f64(9, 1, 2, 3, 9)
    mask = f64(0, 1, 1, 1, 0)
    given = whiten(values, mask, Moments.of(values, mask))
    # The mean is 2 and the Bessel-corrected variance 1.
    torch.testing.assert_close(given, f64(0, -1, 0, 1, 0), rtol=0, atol=1e-7)
    same = torch.full((8,), 0.1)
    assert whiten(same, same, Moments.of(same, same)).abs().max() < 1e-9


def test_whitening_where_nothing_counts_and_where_something_is_lost():
    values = f64(1, 2, 3)
    none = f64(0, 0, 0)
    assert whiten(values, none, Moments.of(values, none)).tolist() == [0, 0, 0]
    # a number that does not count
    values = f64(math.nan, 1, 3)
    mask = f64(0, 1, 1)
    given = whiten(values, mask, Moments.of(values, mask))
    assert given.tolist() == pytest.approx([0, -1 / math.sqrt(2), 1 / math.sqrt(2)])


@pytest.mark.parametrize("scale", [1e-2, 1e4])
def test_whitening_does_not_see_scale_or_offset(scale):
    dice = random.Random(1)
    values = [dice.gauss(0, 1) for _ in range(40)]
    mask = f64(*[1.0] * 40)
    mean = statistics.fmean(values)
    deviation = statistics.stdev(values)
    expected = f64(*((x - mean) / deviation for x in values))
    moved = f64(*(scale * x + 7 for x in values))
    torch.testing.assert_close(
        whiten(moved, mask, Moments.of(moved, mask)), expected, rtol=1e-4, atol=1e-7
    )

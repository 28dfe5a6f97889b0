"""mean@k, best@k and maj@k against numbers worked by hand."""

from __future__ import annotations

import itertools
from statistics import fmean

import pytest

from engine_trainer.sampling.pass_at_k import Vote, best_at, figures_at_k, majority, majority_at


def votes(text: str) -> list[Vote]:
    """Return the votes of a text such as ``"a+ b- ."``.

    ``a+`` is answer a and correct, ``b-`` is answer b and wrong, ``.`` is no answer.
    """
    return [
        Vote(answer=None if w[0] == "." else w[0], correct=w.endswith("+")) for w in text.split()
    ]


@pytest.mark.parametrize(
    ("k", "n", "c", "expected"),
    [
        (1, 4, 1, 1 / 4),
        (2, 4, 1, 1 / 2),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (2, 5, 2, 7 / 10),  # 1 - C(3,2)/C(5,2) = 1 - 3/10
        (3, 6, 2, 4 / 5),  # 1 - C(4,3)/C(6,3) = 1 - 4/20
        (4, 4, 0, 0.0),
        (4, 4, 1, 1.0),
        (3, 4, 2, 1.0),  # only two are wrong
    ],
)
def test_best_at_k_of_n_samples(k, n, c, expected):
    assert best_at(k, n, c) == pytest.approx(expected, abs=1e-12)


def test_best_at_k_is_the_mean_over_all_choices_of_k():
    for n, k in itertools.product(range(1, 8), range(1, 8)):
        for c in range(n + 1 if k <= n else 0):
            correct = [1] * c + [0] * (n - c)
            counted = fmean(max(chosen) for chosen in itertools.combinations(correct, k))
            assert best_at(k, n, c) == pytest.approx(counted, abs=1e-12)


def test_best_at_k_of_many_samples_does_not_overflow():
    assert best_at(5000, 10000, 1) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a+ a+ b-", 1.0),
        ("a+ b- b-", 0.0),
        ("a+ b-", 0.5),  # a tie is drawn
        ("a+ a+ b- b- c- c-", 1 / 3),
        ("a+ . . .", 1.0),  # who gives no answer does not vote
        (". . .", 0.0),
        ("a- a+ b-", 0.0),  # an answer is as correct as the first that gives it
    ],
)
def test_the_majority(text, expected):
    assert majority(votes(text)) == pytest.approx(expected)


def test_the_majority_of_fewer_is_the_mean_over_blocks():
    # Blocks of 2: (a a) 1, (a b) 1/2, (b c) 0. The fourth sample begins the second block of 3:
    # (a a a) 1, (b b c) 0.
    six = votes("a+ a+ a+ b- b- c-")
    assert majority_at(2, six) == pytest.approx((1 + 0.5 + 0) / 3)
    assert majority_at(3, six) == pytest.approx(0.5)
    assert majority_at(4, six) == 1.0  # one block; the last two are left over
    assert majority_at(1, six) == pytest.approx(0.5)


def test_all_figures_of_two_problems():
    first = votes("a+ b- c- a+")
    second = votes("x- x- y+ x-")
    assert figures_at_k([first, second]) == pytest.approx(
        {
            "mean@4": (2 / 4 + 1 / 4) / 2,
            "best@2": ((1 - 1 / 6) + 1 / 2) / 2,
            "best@4": 1.0,
            # blocks: (a b) 1/2, (c a) 1/2; (x x) 0, (y x) 1/2
            "maj@2": (1 / 2 + 1 / 4) / 2,
            "maj@4": (1.0 + 0.0) / 2,
        }
    )
    assert list(figures_at_k([votes("a+ a+ a+ a+ a+ a+")])) == [
        "mean@6",
        "best@2",
        "best@4",
        "best@6",
        "maj@2",
        "maj@4",
        "maj@6",
    ]


def test_one_sample_and_rewards_that_name_no_answer():
    assert figures_at_k([votes("a+"), votes("b-")]) == {}
    assert set(figures_at_k([votes(".+ .-")])) == {"mean@2", "best@2"}

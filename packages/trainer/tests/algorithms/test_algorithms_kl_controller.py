from __future__ import annotations

import pytest

from engine_trainer.algorithms.kl_controller import next_coefficient


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (6.0, 1.0),  # at the target
        (6.6, 1.01),  # a tenth above it: 1 + 0.1 · 0.1
        (5.4, 0.99),
        (600.0, 1.02),  # held at +0.2
        (-3.0, 0.98),  # an estimate may be negative; held at -0.2
    ],
)
def test_the_paper_by_hand(kl, factor):
    assert next_coefficient(0.2, kl, target=6.0) == pytest.approx(0.2 * factor, rel=1e-12)


def test_it_finds_a_coefficient_that_keeps_the_target():
    coefficient = 0.01
    for _ in range(2000):
        coefficient = next_coefficient(coefficient, 1.0 / coefficient, target=4.0)
    assert coefficient == pytest.approx(0.25, rel=1e-3)

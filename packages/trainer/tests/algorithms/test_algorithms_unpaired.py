from __future__ import annotations

import math

import pytest
import torch

from engine_api.errors import ConfigError
from engine_trainer.algorithms.unpaired import LabelledRows, UnpairedObjective
from engine_trainer.config import KTOSection
from engine_trainer.extensions.built_in import UNPAIRED_LOSSES

BETA = 0.4
LOG_PROBS = [-3.0, -20.0, -0.5, -7.0, -900.0, -1.0]
REFERENCE = [-4.0, -18.0, -0.75, -6.0, -2.0, -900.0]
LABELS = [True, True, False, False, True, False]


def rows_of(kl: float, log_probs: list[float] = LOG_PROBS) -> LabelledRows:
    def tensor(numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64)

    return LabelledRows(
        log_probs=tensor(log_probs),
        ref_log_probs=tensor(REFERENCE),
        tokens=tensor([3.0] * len(log_probs)),
        desirable=torch.tensor(LABELS),
        kl=tensor([kl] * len(log_probs)),
    )


def by_the_paper(name: str, log_prob: float, i: int, kl: float, weights: tuple[float, float]):
    """Return λ_y - v(x, y) of one row, by the paper's equation."""
    reward = log_prob - REFERENCE[i]
    z = max(0.0, kl) if name == "kto" else 0.0
    weight = weights[0] if LABELS[i] else weights[1]
    x = BETA * (reward - z if LABELS[i] else z - reward)
    sigma = 1 / (1 + math.exp(-x)) if x > -700 else 0.0
    return weight - weight * sigma


@pytest.mark.parametrize("kl", [1.3, 0.0, -0.7])
@pytest.mark.parametrize("name", UNPAIRED_LOSSES.built_in)
def test_a_loss_of_rows_is_the_papers(name, kl):
    """Compare the value with the equation, and the slope with its central differences."""
    objective = UnpairedObjective.named(name, BETA, desirable=1.5, undesirable=0.75)
    losses, slopes = objective(rows_of(kl))
    step = 1e-5
    for i, log_prob in enumerate(LOG_PROBS):
        exact, up, down = (
            by_the_paper(name, log_prob + d, i, kl, (1.5, 0.75)) for d in (0.0, step, -step)
        )
        assert float(losses[i]) == pytest.approx(exact, rel=1e-11)
        assert float(slopes[i]) == pytest.approx((up - down) / (2 * step), rel=1e-6, abs=1e-10)
    assert float(slopes[0]) < 0 < float(slopes[2])
    rewards = objective.rewards(rows_of(kl))
    assert rewards.tolist() == pytest.approx(
        [BETA * (p - r) for p, r in zip(LOG_PROBS, REFERENCE, strict=True)]
    )


@pytest.mark.parametrize("name", UNPAIRED_LOSSES.built_in)
def test_no_rows_and_a_lost_one(name):
    objective = UnpairedObjective.named(name, BETA)
    nothing = LabelledRows(**{key: value[:0] for key, value in vars(rows_of(0.1)).items()})
    assert all(part.shape == (0,) for part in objective(nothing))
    losses, _ = objective(rows_of(0.1, [math.nan, *LOG_PROBS[1:]]))
    assert losses.isnan().tolist() == [True, *[False] * 5]
    # A lost baseline is no baseline of 0.
    lost = objective(rows_of(math.nan))[0]
    assert bool(lost.isnan().all()) is (name == "kto")


def test_a_loss_of_ones_own_comes_by_the_same_door(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "from engine_trainer.extensions.traits import unpaired_loss\n"
        "@unpaired_loss(baseline=False)\n"
        "def linear(rows, *, scale: float = 1.0):\n"
        "    return -scale * rows.signs * rows.log_ratios\n"
        "def mean(rows):\n"
        "    return rows.log_ratios.mean()\n"
    )
    section = KTOSection(loss=f"{own}:linear", loss_options={"scale": 3.0})
    assert not section.reads_baseline
    losses, slopes = UnpairedObjective.named(section.loss, 0.1, section.loss_options)(rows_of(0.0))
    assert slopes.tolist() == [-3.0, -3.0, 3.0, 3.0, -3.0, 3.0]
    assert float(losses[0]) == -3.0
    with pytest.raises(ConfigError, match="nothing reads"):
        KTOSection(loss=f"{own}:linear", beta=0.3)
    objective = UnpairedObjective.named(f"{own}:mean", 0.1)
    with pytest.raises(ConfigError, match=r"shape \(6,\) and a gradient, got .* shape \(\)"):
        objective(rows_of(0.0))

from __future__ import annotations

import functools
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from engine_api.batch import Batch
from engine_api.errors import ConfigError
from engine_api.results import TokenOutputs
from engine_trainer.algorithms.preference import (
    LinearLoss,
    PairObjective,
    Pairs,
    bradley_terry,
    pair_loss,
)
from engine_trainer.config.preferences import DPOSection
from engine_trainer.extensions.built_in import PAIR_LOSSES


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


PLAIN = {
    "sigmoid": lambda h: -torch.nn.functional.logsigmoid(0.3 * h),
    "hinge": lambda h: (1 - 0.3 * h).clamp(min=0.0),
    "ipo": lambda h: (h - 1 / 0.6) ** 2,
}


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e3])
@pytest.mark.parametrize("name", PLAIN)
def test_the_slope_is_the_derivative(name, scale):
    margin = (
        torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scale
    ).requires_grad_()
    loss, slope = pair_loss(margin, 0.3, name)
    expected = PLAIN[name](margin)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    (derivative,) = torch.autograd.grad(expected.sum(), margin)
    torch.testing.assert_close(slope, derivative, rtol=1e-12, atol=0)
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


# --- losses of two numbers -----------------------------------------------------------------------

BETA = 0.4
CHOSEN = [-3.0, -20.0, -0.5, -7.0]
REJECTED = [-9.0, -4.0, -2.5, -7.5]
REF_CHOSEN = [-4.0, -18.0, -0.75, -6.0]
REF_REJECTED = [-7.0, -4.5, -2.0, -9.0]
TOKENS = [3.0, 8.0, 2.0, 4.0], [5.0, 2.0, 2.0, 3.0]
MARGIN = [0.0, 1.5, 0.25, -0.5]


def nll(x: float) -> float:
    return math.log1p(math.exp(-x))


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def smoothed(z: float, eps: float) -> float:
    return (1 - eps) * nll(z) + eps * nll(-z)


def by_the_paper(name: str, c: float, r: float, i: int, **options: float) -> float:
    """Return one pair's loss from its two sums, by the paper's equation."""
    rc, rr, nc, nr = REF_CHOSEN[i], REF_REJECTED[i], TOKENS[0][i], TOKENS[1][i]
    z = BETA * ((c - rc) - (r - rr))
    mean = (c - rc) / nc - (r - rr) / nr
    eps = options.get("label_smoothing", 0.0)
    if name == "sigmoid":
        return smoothed(z, eps)
    if name == "robust":
        return ((1 - eps) * nll(z) - eps * nll(-z)) / (1 - 2 * eps)
    if name == "ipo":
        return (mean - 1 / (2 * BETA)) ** 2
    if name == "sigmoid_norm":
        return nll(BETA * mean)
    if name == "simpo":
        return nll(BETA / nc * c - BETA / nr * r - options["gamma"])
    if name == "orpo":
        p, q = math.exp(c / nc), math.exp(r / nr)
        return -c / nc + BETA * -math.log(sigma(math.log((p / (1 - p)) / (q / (1 - q)))))
    assert name == "bradley_terry"
    return nll(c - r - MARGIN[i]) + options["center"] * (c + r) ** 2


def pairs_of(chosen: list[float], rejected: list[float], *, reference: bool = True) -> Pairs:
    def tensor(numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64)

    zeros = [0.0] * len(chosen)
    return Pairs(
        chosen=tensor(chosen),
        rejected=tensor(rejected),
        ref_chosen=tensor(REF_CHOSEN if reference else zeros),
        ref_rejected=tensor(REF_REJECTED if reference else zeros),
        chosen_tokens=tensor(TOKENS[0]),
        rejected_tokens=tensor(TOKENS[1]),
        margin=tensor(zeros if reference else MARGIN),
    )


@pytest.mark.parametrize("sft", [0.0, 0.7])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sigmoid", {"label_smoothing": 0.0}),
        ("sigmoid", {"label_smoothing": 0.2}),
        ("robust", {"label_smoothing": 0.2}),
        ("ipo", {"per_token": True}),
        ("sigmoid_norm", {}),
        ("simpo", {"gamma": 0.6}),
        ("orpo", {}),
        ("bradley_terry", {"center": 0.03}),
    ],
)
def test_a_loss_of_pairs_is_the_papers(name, options, sft):
    """Compare the value with the equation, and the slopes with its central differences."""
    if name == "bradley_terry":
        function = functools.partial(bradley_terry, **options)
        objective = PairObjective(function=function, name=name, sft=sft)
        pairs = pairs_of(CHOSEN, REJECTED, reference=False)
    else:
        objective = PairObjective.named(name, BETA, options, sft)
        pairs = pairs_of(CHOSEN, REJECTED)

    def paper(c: float, r: float, i: int) -> float:
        return by_the_paper(name, c, r, i, **options) - sft * c / TOKENS[0][i]

    loss, chosen, rejected = objective(pairs)
    step = 1e-5
    for i, (c, r) in enumerate(zip(CHOSEN, REJECTED, strict=True)):
        assert float(loss[i]) == pytest.approx(paper(c, r, i), rel=1e-11)
        for given, up, down in (
            (chosen[i], paper(c + step, r, i), paper(c - step, r, i)),
            (rejected[i], paper(c, r + step, i), paper(c, r - step, i)),
        ):
            assert float(given) == pytest.approx((up - down) / (2 * step), rel=1e-7, abs=1e-9)


def test_robust_is_unbiased():
    """Check arXiv:2403.00409: the expectation over flipped labels is the loss without them."""
    eps = 0.2
    objective = PairObjective.named("robust", BETA, {"label_smoothing": eps})
    right = objective(pairs_of(CHOSEN, REJECTED))[0]
    swapped = replace(
        pairs_of(REJECTED, CHOSEN),
        ref_chosen=torch.tensor(REF_REJECTED).double(),
        ref_rejected=torch.tensor(REF_CHOSEN).double(),
    )
    wrong = objective(swapped)[0]
    clean = PairObjective.named("sigmoid", BETA)(pairs_of(CHOSEN, REJECTED))[0]
    torch.testing.assert_close((1 - eps) * right + eps * wrong, clean)


def test_orpo_is_finite_where_the_policy_is_certain():
    pairs = pairs_of([0.0, -1e-12, -1e-300, -800.0], [-1e-20, -900.0, 0.0, -1e-9])
    for part in PairObjective.named("orpo", BETA)(pairs):
        assert bool(part.isfinite().all())


@pytest.mark.parametrize("name", PAIR_LOSSES.built_in)
def test_pairs_do_not_depend_on_each_other(name):
    objective = PairObjective.named(name, BETA)
    whole = objective(pairs_of(CHOSEN, REJECTED))
    order = [2, 0, 3, 1]
    pairs = pairs_of(CHOSEN, REJECTED)
    moved = Pairs(**{key: value[order] for key, value in vars(pairs).items()})
    for a, b in zip(objective(moved), whole, strict=True):
        assert torch.equal(a, b[order])
    nothing = Pairs(**{key: value[:0] for key, value in vars(pairs).items()})
    assert all(part.shape == (0,) for part in objective(nothing))


def test_rewards_are_of_what_the_loss_compares():
    pairs = pairs_of(CHOSEN, REJECTED)
    chosen, rejected = PairObjective.named("sigmoid", BETA).rewards(pairs)
    assert chosen.tolist() == pytest.approx(
        [BETA * (c - r) for c, r in zip(CHOSEN, REF_CHOSEN, strict=True)]
    )
    assert rejected[0] == pytest.approx(BETA * (REJECTED[0] - REF_REJECTED[0]))
    chosen, _ = PairObjective.named("sigmoid_norm", BETA).rewards(pairs)
    assert chosen[1] == pytest.approx(BETA * (CHOSEN[1] - REF_CHOSEN[1]) / TOKENS[0][1])


def test_a_loss_that_returns_a_mean_is_refused():
    def mean(pairs: Pairs) -> torch.Tensor:
        return pairs.log_ratios.mean()

    with pytest.raises(
        ConfigError, match=r"shape \(4,\) and a gradient, got .* shape \(\)"
    ) as caught:
        PairObjective(function=mean, name="mine")(pairs_of(CHOSEN, REJECTED))
    assert "neither a sum nor a mean" in caught.value.why


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"loss": "simpoh"}, "dpo.loss"),
        ({"loss": "hinge", "loss_options": {"label_smoothing": 0.1}}, "dpo.loss_options"),
        ({"loss": "simpo", "reference": "engine"}, "dpo.reference"),
        ({"loss_options": {"beta": 0.3}}, "dpo.loss_options.beta"),
        ({"sft_coefficient": -0.1}, "dpo.sft_coefficient"),
    ],
)
def test_settings_that_are_refused(section, field):
    with pytest.raises(ConfigError) as caught:
        DPOSection(**section)
    assert caught.value.field.startswith(field)


def test_smoothing_from_a_half_on_is_refused():
    for name in ("sigmoid", "robust"):
        objective = PairObjective.named(name, BETA, {"label_smoothing": 0.5})
        with pytest.raises(ConfigError, match=r"\[0, 0\.5\)"):
            objective(pairs_of(CHOSEN, REJECTED))

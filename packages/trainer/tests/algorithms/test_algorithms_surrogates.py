"""GSPO and CISPO, and the behaviour that all kinds of ``PolicyLoss`` share."""

from __future__ import annotations

import math

import pytest
import torch

from engine_api.batch import Batch
from engine_api.errors import ConfigError
from engine_api.losses import token_weights
from engine_api.results import TokenOutputs
from engine_trainer.algorithms.losses import PolicyLoss, denominator
from engine_trainer.algorithms.surrogates import mean_log_ratio

CU = torch.tensor([0, 4, 7, 8, 10])  # three answers, one, none (a prompt alone), one
MASK = torch.tensor([0, 1.0, 1, 1, 0, 0, 1, 0, 0, 1], dtype=torch.float64)
RATIOS = [1, 1.2, 0.9, 1.5, 1, 1, 0.5, 1, 1, 1.1]
PER_DOCUMENT = [2.0, 2, 2, 2, -1, -1, -1, 0, -3, -3]
PER_TOKEN = [0.0, 2, -1, 3, 0, 0, -1, 0, 0, 1]


def make(advantages, ratios=RATIOS, mask=MASK, **extra) -> tuple[Batch, torch.Tensor]:
    dice = torch.Generator().manual_seed(1)
    old = -torch.rand(10, generator=dice, dtype=torch.float64) * 3
    new = old + torch.tensor([math.log(r) for r in ratios], dtype=torch.float64)
    fields = {
        "old_log_probs": old,
        "advantages": torch.tensor(advantages, dtype=torch.float64) * mask,
        "loss_weight": token_weights(mask, CU, "seq-mean-token-mean").double(),
        **extra,
    }
    return Batch(input_ids=torch.arange(10), cu_seqlens=CU, fields=fields), new.requires_grad_()


def run(loss: PolicyLoss, batch: Batch, new: torch.Tensor) -> tuple[float, torch.Tensor]:
    result = loss(TokenOutputs(log_probs=new), batch)
    (gradient,) = torch.autograd.grad(result.loss, new)
    return float(result.loss.detach()), gradient


def test_the_ratio_of_a_sequence_by_hand():
    log_ratio = torch.tensor([math.log(r) for r in RATIOS], dtype=torch.float64)
    s = [(1.2 * 0.9 * 1.5) ** (1 / 3), 0.5, 1.0, 1.1]
    expected = torch.tensor([s[0]] * 4 + [s[1]] * 3 + [s[2]] + [s[3]] * 2, dtype=torch.float64)
    torch.testing.assert_close(mean_log_ratio(log_ratio, MASK > 0, CU).exp(), expected)


def test_gspo_by_hand():
    """Check eq. 5 for two sequences, inside and outside of the clip.

    Each counts once whatever its length.
    """
    batch, new = make(PER_DOCUMENT)
    s0 = (1.2 * 0.9 * 1.5) ** (1 / 3)
    s3 = 1.1
    held = 1.1 < s0 < 1.5
    assert held, "the clip below is meant to hold the first sequence back"
    value, gradient = run(PolicyLoss(kind="gspo", clip_low=0.2, clip_high=0.1), batch, new)
    # A = 2 above 1.1: held; A = -1 at 0.5: held at 0.8; A = -3 at 1.1, the bound itself
    assert value == pytest.approx(-2 * 1.1 + 1 * 0.8 + 3 * s3)
    torch.testing.assert_close(gradient, torch.tensor([0.0] * 9 + [3 * s3], dtype=torch.float64))
    value, gradient = run(PolicyLoss(kind="gspo", clip_low=0.9, clip_high=0.9), batch, new)
    assert value == pytest.approx(-2 * s0 + 0.5 + 3 * s3)
    # ∂s/∂log p_t = s / |y| for each of the three tokens
    own = [-2 * s0 / 3] * 3
    expected = torch.tensor([0, *own, 0, 0, 0.5, 0, 0, 3 * s3], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected)
    assert denominator("seq-mean-token-mean", [3, 1, 0, 1]) == 3


def test_gspo_counts_held_tokens():
    batch, new = make(PER_DOCUMENT)
    metrics = PolicyLoss(kind="gspo", clip_low=0.2, clip_high=0.1)(
        TokenOutputs(log_probs=new), batch
    ).metrics
    assert (int(metrics["clipped_high"]), int(metrics["clipped_low"]), int(metrics["tokens"])) == (
        3,
        1,
        5,
    )


def test_gspo_token_is_gspo_where_advantages_are_of_sequences():
    """Compare eq. 13 with eq. 5, in value and gradient.

    Some sequences are clipped.
    """
    for high in (0.1, 0.9):
        batch, new = make(PER_DOCUMENT)
        whole, by_token = (
            run(PolicyLoss(kind=k, clip_high=high), batch, new) for k in ("gspo", "gspo_token")
        )
        assert by_token[0] == pytest.approx(whole[0], rel=1e-14)
        torch.testing.assert_close(by_token[1], whole[1], rtol=1e-14, atol=0)


def test_gspo_token_by_hand():
    batch, new = make(PER_TOKEN)
    s = (1.2 * 0.9 * 1.5) ** (1 / 3)
    value, gradient = run(PolicyLoss(kind="gspo_token", clip_low=0.3, clip_high=0.1), batch, new)
    # the sequence's ratio is above 1.1: a positive advantage is held, a negative one falls freely
    assert value == pytest.approx((-2 * 1.1 + s - 3 * 1.1) / 3 + 0.7 - 1.1)
    expected = torch.tensor([0, 0, s / 3, 0, 0, 0, 0, 0, 0, -1.1], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected)


def test_cispo_by_hand():
    batch, new = make(PER_TOKEN)
    value, gradient = run(PolicyLoss(kind="cispo", clip_low=0.3, clip_high=0.3), batch, new)
    weights = [1.2, 0.9, 1.3, 0.7, 1.1]  # sg(clip(r, 0.7, 1.3))
    terms = zip(
        (1, 2, 3, 6, 9), weights, (2, -1, 3, -1, 1), (1 / 3, 1 / 3, 1 / 3, 1, 1), strict=True
    )
    slopes = [0.0] * 10
    expected = 0.0
    for t, r, a, w in terms:
        slopes[t] = -w * r * a  # no token's gradient is dropped
        expected += slopes[t] * float(new[t].detach())
    assert value == pytest.approx(expected)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64))


def test_cispo_without_a_lower_bound_is_the_papers():
    batch, new = make(PER_TOKEN)
    _, gradient = run(PolicyLoss(kind="cispo", clip_low=1.0, clip_high=0.3), batch, new)
    assert float(gradient[6]) == pytest.approx(0.5)


@pytest.mark.parametrize("scale", [0.1, 2.0])
@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_gradients_agree_with_finite_differences(kind, scale):
    batch, new = make(PER_DOCUMENT, ratios=[math.exp(scale * math.log(r)) for r in RATIOS])
    loss = PolicyLoss(kind=kind, clip_low=0.25, clip_high=0.3)
    leaf = new.detach().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: loss(TokenOutputs(log_probs=x), batch).loss, leaf, eps=1e-7, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["ppo", "gspo", "gspo_token", "cispo"])
def test_on_policy_the_coefficients_are_the_gradient(kind):
    advantages = PER_DOCUMENT if kind == "gspo" else PER_TOKEN
    correction = torch.linspace(0.5, 1.5, 10, dtype=torch.float64)
    batch, new = make(advantages, ratios=[1.0] * 10, correction=correction)
    loss = PolicyLoss(kind=kind, on_policy=True, corrected=True)
    _, gradient = run(loss, batch, new)
    known = loss.coefficients(batch)
    assert known is not None
    torch.testing.assert_close(known, gradient, rtol=1e-14, atol=0)
    _, off = run(PolicyLoss(kind=kind, corrected=True), batch, new)
    torch.testing.assert_close(off, gradient, rtol=1e-14, atol=0)


@pytest.mark.parametrize("kind", ["ppo", "gspo", "gspo_token", "cispo"])
def test_the_split_into_micro_batches_changes_nothing(kind):
    batch, new = make(PER_DOCUMENT)
    loss = PolicyLoss(kind=kind)
    whole, _ = run(loss, batch, new)
    parts = [
        run(loss, batch.select(d), new.detach()[batch.token_index(d)].requires_grad_())
        for d in ([3, 0], [2, 1])
    ]
    assert sum(value for value, _ in parts) == pytest.approx(whole, rel=1e-13)


@pytest.mark.parametrize("kind", ["gspo", "gspo_token", "cispo"])
def test_nothing_counts_and_far_ratios(kind):
    none = torch.zeros(10, dtype=torch.float64)
    batch, new = make(PER_DOCUMENT, mask=none)
    value, gradient = run(PolicyLoss(kind=kind), batch, new)
    assert value == 0
    assert not gradient.any()
    batch, new = make(PER_DOCUMENT, ratios=[math.exp(100)] * 10)
    value, gradient = run(PolicyLoss(kind=kind), batch, new)
    assert math.isfinite(value)
    assert bool(gradient.isfinite().all())


def test_what_is_not_a_number_outside_of_the_answers_stays_there():
    batch, new = make(PER_DOCUMENT)
    spoilt = new.detach().clone()
    # This is a prompt's token. Engines return finite values there, and a sequence must not depend
    # on it.
    spoilt[4] = math.nan
    log_ratio = spoilt - batch["old_log_probs"]
    assert bool(mean_log_ratio(log_ratio, MASK > 0, CU).isfinite().all())


def test_refusals_name_the_field():
    with pytest.raises(ConfigError, match=r"algorithm\.loss.*"):
        PolicyLoss(kind="gsop")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"dual_clip"):
        PolicyLoss(kind="gspo", dual_clip=3.0)

from __future__ import annotations

import math

import pytest
import torch

from engine_api.batch import Batch
from engine_api.errors import BatchError, ConfigError
from engine_api.losses import token_weights
from engine_api.results import TokenOutputs
from engine_trainer.algorithms.losses import PolicyLoss, denominator, kl_divergence


def make_batch(ratios, advantages, weights=None, ref=None, old=None):
    """Build document 0 from a first token that never counts and one token per value."""
    count = len(ratios)
    old = torch.tensor([0.0, *(old or [-1.0] * count)], dtype=torch.float64)
    new = old + torch.tensor([0.0, *[math.log(r) for r in ratios]], dtype=torch.float64)
    fields = {
        "old_log_probs": old,
        "advantages": torch.tensor([0.0, *advantages], dtype=torch.float64),
        "loss_weight": torch.tensor([0.0, *(weights or [1.0] * count)], dtype=torch.float64),
    }
    if ref is not None:
        fields["ref_log_probs"] = torch.tensor([0.0, *ref], dtype=torch.float64)
    ids = torch.arange(count + 1)
    return Batch(
        input_ids=ids, cu_seqlens=torch.tensor([0, count + 1]), fields=fields
    ), new.requires_grad_()


def value(loss: PolicyLoss, ratios, advantages, **kwargs) -> float:
    batch, new = make_batch(ratios, advantages, **kwargs)
    return float(loss(TokenOutputs(log_probs=new), batch).loss.detach())


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),  # on policy
        (1.1, 2.0, -2.2),  # inside the clip
        (1.5, 2.0, -2.56),  # above 1 + 0.28, held: -2 · 1.28
        (0.5, 2.0, -1.0),  # below, but a positive advantage may always rise
        (0.5, -2.0, 1.6),  # below 1 - 0.2, held: 2 · 0.8
        (1.5, -2.0, 3.0),  # above, a negative advantage may always fall
    ],
)
def test_clip_by_hand(ratio, advantage, expected):
    loss = PolicyLoss(clip_low=0.2, clip_high=0.28)
    assert value(loss, [ratio], [advantage]) == pytest.approx(expected, abs=1e-12)


def test_dual_clip_by_hand():
    loss = PolicyLoss(dual_clip=3.0)
    assert value(loss, [10.0], [-2.0]) == pytest.approx(6.0)  # not 20
    assert value(loss, [2.0], [-2.0]) == pytest.approx(4.0)  # below the ceiling
    assert value(loss, [10.0], [2.0]) == pytest.approx(-2.4)  # positive advantages are as before


def test_the_loss_is_a_weighted_sum():
    loss = PolicyLoss()
    parts = [
        value(loss, [r], [a], weights=[w])
        for r, a, w in [(1.1, 1.0, 0.5), (0.9, -1.0, 2.0), (1.0, 3.0, 0.0)]
    ]
    whole = value(loss, [1.1, 0.9, 1.0], [1.0, -1.0, 3.0], weights=[0.5, 2.0, 0.0])
    assert whole == pytest.approx(sum(parts), abs=1e-12)
    assert whole == pytest.approx(-0.5 * 1.1 + 2 * 0.9, abs=1e-12)


def test_metrics_are_sums_over_counted_tokens():
    ratios = [1.5, 0.5, 1.5, 10.0, 1.5]
    advantages = [1.0, -1.0, -1.0, -1.0, 1.0]
    batch, new = make_batch(ratios, advantages, weights=[1, 1, 0.5, 1, 0])
    metrics = {
        k: float(v)
        for k, v in PolicyLoss(dual_clip=3.0)(TokenOutputs(log_probs=new), batch).metrics.items()
    }
    assert metrics["tokens"] == 4
    assert metrics["weight"] == 3.5
    assert (metrics["clipped_high"], metrics["clipped_low"], metrics["clipped_dual"]) == (1, 1, 1)
    assert metrics["ratio"] == pytest.approx(13.5)
    assert metrics["old_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios[:4]))
    assert metrics["policy_loss"] == pytest.approx(-1.2 + 0.8 + 0.75 + 3.0)


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)]
)
def test_kl_estimators_by_hand(estimator, expected):
    kl = kl_divergence(torch.tensor([-1.0]), torch.tensor([-1.5]), estimator)
    assert float(kl) == pytest.approx(expected, rel=1e-6)


def test_kl_estimators_estimate_the_kl():
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.4, 0.35, 0.25], dtype=torch.float64)
    exact = float((p * (p / q).log()).sum())
    for estimator in ("k1", "k3"):
        assert float((p * kl_divergence(p.log(), q.log(), estimator)).sum()) == pytest.approx(
            exact, abs=1e-12
        )
    assert float((p * kl_divergence(p.log(), q.log(), "k2")).sum()) == pytest.approx(exact, rel=0.1)


def test_kl_and_entropy_in_the_loss_by_hand():
    batch, new = make_batch([1.0, 1.0], [1.0, 1.0], weights=[1.0, 0.5], ref=[-1.5, -0.5])
    entropy = torch.tensor([0.0, 2.0, 3.0], dtype=torch.float64)
    loss = PolicyLoss(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01)
    result = loss(TokenOutputs(log_probs=new, entropy=entropy), batch)
    assert float(result.loss.detach()) == pytest.approx(
        -1.5 + 0.1 * (0.125 + 0.5 * 0.125) - 0.01 * (2 + 0.5 * 3)
    )
    assert float(result.metrics["ref_kl"]) == pytest.approx(0.25)  # a sum over tokens, unweighted
    assert float(result.metrics["entropy"]) == pytest.approx(5.0)
    assert loss.needs == ("log_probs", "entropy")
    assert not loss.only_advantages


def test_what_is_not_in_the_loss_is_not_read():
    loss = PolicyLoss()
    assert loss.needs == ("log_probs",)
    assert loss.only_advantages
    batch, new = make_batch([1.0], [1.0])
    loss(TokenOutputs(log_probs=new), batch)  # no ref_log_probs
    with pytest.raises(BatchError, match="ref_log_probs"):
        PolicyLoss(kl_coef=0.1)(TokenOutputs(log_probs=new), batch)


def test_on_policy_has_the_gradient_of_a_ratio_of_one():
    batch, new = make_batch([1.0, 1.0, 1.0], [1.0, -2.0, 3.0], weights=[1, 0.5, 1])
    (expected,) = torch.autograd.grad(PolicyLoss()(TokenOutputs(log_probs=new), batch).loss, new)
    bare = Batch(
        input_ids=batch.input_ids,
        cu_seqlens=batch.cu_seqlens,
        fields={n: batch[n] for n in ("advantages", "loss_weight")},
    )
    result = PolicyLoss(on_policy=True)(TokenOutputs(log_probs=new), bare)
    (given,) = torch.autograd.grad(result.loss, new)
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(given, torch.tensor([0.0, -1.0, 1.0, -3.0], dtype=torch.float64))


@pytest.mark.parametrize("scale", [0.3, 3.0])
@pytest.mark.parametrize(
    "loss",
    [
        PolicyLoss(clip_low=0.2, clip_high=0.28),
        PolicyLoss(dual_clip=1.5),
        PolicyLoss(kl_coef=0.3, kl_estimator="k1"),
        # With kl_importance the ratio of k2 has no gradient.
        PolicyLoss(kl_coef=0.3, kl_estimator="k2", kl_importance=False),
        PolicyLoss(kl_coef=0.3, kl_estimator="k3", kl_importance=False),
        PolicyLoss(kl_coef=0.3, kl_estimator="k3", entropy_coef=0.05),
    ],
)
def test_gradients_agree_with_finite_differences(loss, scale):
    random = torch.Generator().manual_seed(7)

    def draw(low: float = 0.0) -> torch.Tensor:
        return torch.rand(40, generator=random, dtype=torch.float64) * scale + low

    fields = {
        "old_log_probs": -draw(),
        "ref_log_probs": -draw(),
        "advantages": draw(-scale / 2),
        "loss_weight": draw() * (torch.arange(40) > 0),
    }
    batch = Batch(input_ids=torch.arange(40), cu_seqlens=torch.tensor([0, 40]), fields=fields)

    def run(log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return loss(TokenOutputs(log_probs=log_probs, entropy=entropy), batch).loss

    inputs = (-draw().requires_grad_(), draw().requires_grad_())
    leaves = tuple(i.detach().requires_grad_() for i in inputs)
    assert torch.autograd.gradcheck(run, leaves, eps=1e-7, atol=1e-6)


def test_the_split_into_micro_batches_changes_nothing():
    random = torch.Generator().manual_seed(3)
    lengths = [5, 9, 2, 7]
    fields = ("old_log_probs", "advantages", "ref_log_probs", "mask")
    documents = [
        {
            "input_ids": list(range(n)),
            **{f: torch.randn(n, generator=random, dtype=torch.float64) for f in fields[:3]},
            "mask": [0.0] + [1.0] * (n - 1),
        }
        for n in lengths
    ]
    batch = Batch.pack(documents)
    batch = batch.with_fields(
        loss_weight=token_weights(batch["mask"], batch.cu_seqlens, "seq-mean-token-mean")
    )
    new = torch.randn(sum(lengths), generator=random, dtype=torch.float64)
    loss = PolicyLoss(kl_coef=0.2)
    whole = loss(TokenOutputs(log_probs=new), batch)
    parts = [
        loss(TokenOutputs(log_probs=new[batch.token_index(d)]), batch.select(d))
        for d in ([2, 0], [3], [1])
    ]
    assert float(sum(p.loss for p in parts)) == pytest.approx(float(whole.loss), rel=1e-12)
    for name, total in whole.metrics.items():
        assert float(sum(p.metrics[name] for p in parts)) == pytest.approx(float(total), rel=1e-6)


@pytest.mark.parametrize("importance", [True, False])
def test_k3_of_a_token_is_held_to_its_bound(importance):
    """Check clamp(k3, max=10) without a gradient beyond, as verl's low_var_kl.

    A large ratio alone does not bound it.
    """
    ratios = [1.0, 1.1, 1.0, 1.0, 8.0]
    d = [-8.0, -2.0, -2.62, -19.0, 3.0]
    old = [-9.0, -3.0, -3.0, -21.0, -4.5]
    ref = [o + math.log(r) - x for o, r, x in zip(old, ratios, d, strict=True)]

    def run(bound):
        batch, new = make_batch(ratios, [0.0] * len(d), ref=ref, old=old)
        loss = PolicyLoss(kl_coef=1.0, kl_importance=importance, kl_bound=bound)
        result = loss(TokenOutputs(log_probs=new), batch)
        (gradient,) = torch.autograd.grad(result.loss, new)
        return float(result.loss.detach()), gradient[1:].tolist()

    weights = ratios if importance else [1.0] * len(d)
    k3 = [math.exp(-x) - 1 + x for x in d]
    slopes = [w * x if importance else 1 - math.exp(-x) for w, x in zip(weights, d, strict=True)]
    value, gradient = run(10.0)
    assert value == pytest.approx(sum(w * min(k, 10.0) for w, k in zip(weights, k3, strict=True)))
    assert gradient == pytest.approx(
        [s if k < 10 else 0.0 for s, k in zip(slopes, k3, strict=True)]
    )
    assert [k < 10 for k in k3] == [False, True, False, False, True]
    value, gradient = run(None)
    assert value == pytest.approx(sum(w * k for w, k in zip(weights, k3, strict=True)))
    assert gradient == pytest.approx(slopes)


def test_the_slope_of_k3_with_the_ratio_is_exact_in_float32():
    """Check the slope where autograd would take a difference of two numbers of 5e8.

    The steps of float32 are 32 there.
    """
    old = torch.tensor([0.0, -20.0])
    ref = torch.tensor([0.0, -0.5])
    batch = Batch(
        input_ids=torch.arange(2),
        cu_seqlens=torch.tensor([0, 2]),
        fields={
            "old_log_probs": old,
            "ref_log_probs": ref,
            "advantages": torch.zeros(2),
            "loss_weight": torch.tensor([0.0, 1.0]),
        },
    )
    new = old.clone().requires_grad_()
    result = PolicyLoss(kl_coef=1.0, kl_bound=None)(TokenOutputs(log_probs=new), batch)
    (gradient,) = torch.autograd.grad(result.loss, new)
    assert gradient.tolist() == [0.0, -19.5]


def test_far_ratios_stay_finite():
    batch, new = make_batch([1.0], [-1.0], old=[-200.0], ref=[-300.0])
    moved = (new.detach() + 150).requires_grad_()
    result = PolicyLoss(kl_coef=0.1)(TokenOutputs(log_probs=moved), batch)
    result.loss.backward()
    assert math.isfinite(float(result.loss.detach()))
    assert moved.grad is not None
    assert bool(moved.grad.isfinite().all())


def test_denominators_by_hand():
    counts = [4, 0, 6]
    assert denominator("token-mean", counts) == 10
    assert denominator("seq-mean-token-sum", counts) == 2
    assert denominator("seq-mean-token-mean", counts) == 2
    assert denominator("seq-mean-token-sum-norm", counts, 512) == 2 * 512
    assert denominator("token-mean", []) == 0


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 2 + 3 + 30) / 4),
        ("seq-mean-token-sum", (6 + 30) / 2),
        ("seq-mean-token-sum-norm", (6 + 30) / (2 * 8)),
        ("seq-mean-token-mean", (2 + 30) / 2),
    ],
)
def test_aggregation_modes_by_hand(mode, expected):
    """Sum two completions, of 3 tokens with losses 1, 2, 3 and of one token with loss 30."""
    mask = torch.tensor([0, 1.0, 1, 1, 0, 1])
    cu = torch.tensor([0, 4, 6])
    weight = token_weights(mask, cu, mode)
    losses = torch.tensor([9.0, 1, 2, 3, 9, 30])
    assert float((weight * losses).sum()) / denominator(mode, [3, 1], 8) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("clip_low", -0.1),
        ("clip_low", 1.5),
        ("clip_high", -1),
        ("dual_clip", 1.0),
        ("kl_coef", -1),
        ("kl_estimator", "k4"),
        ("kl_bound", 0.0),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, bad):
    with pytest.raises(ConfigError, match=field):
        PolicyLoss(**{field: bad})


def test_coefficients_are_the_gradient_where_they_are_known():
    batch, new = make_batch([1.0, 1.0, 1.0], [1.0, -2.0, 3.0], weights=[1, 0.5, 1])
    loss = PolicyLoss(on_policy=True, dual_clip=2.0, entropy=True)
    entropy = torch.ones(4, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(
        loss(TokenOutputs(log_probs=new, entropy=entropy), batch).loss, new
    )
    known = loss.coefficients(batch)
    assert known is not None
    torch.testing.assert_close(known, gradient, rtol=0, atol=1e-15)
    for other in (
        PolicyLoss(),
        PolicyLoss(on_policy=True, kl_coef=0.1),
        PolicyLoss(on_policy=True, entropy_coef=0.1),
    ):
        assert other.coefficients(batch) is None

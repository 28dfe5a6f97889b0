"""SAPO, GMPO, DPPO and the sequence mask: value and gradient by each paper's equation.

The expected numbers are computed document by document with Python's floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from engine_api.batch import Batch
from engine_api.errors import ConfigError
from engine_api.losses import token_weights
from engine_api.results import TokenOutputs
from engine_trainer.algorithms.losses import PolicyLoss, denominator
from engine_trainer.config.algorithm import AlgorithmSection
from engine_trainer.rl.learner import check_own_loss

CU = torch.tensor([0, 5, 9, 12, 14])
MASK = torch.tensor([0, 1, 1, 1, 1, 0, 1, 0, 1, 0, 1, 1, 0, 0], dtype=torch.float64)
RATIOS = [1, 0.6, 1.0, 1.7, 2.5, 1, 0.5, 1, 1.3, 1, 3.0, 0.2, 1, 1]
OLD = [-1, -0.1, -2.0, -0.7, -3.0, -1, -0.2, -1, -0.9, -1, -1.5, -0.05, -1, -1]
ADVANTAGES = [1.5] * 5 + [-2.0] * 4 + [-0.7] * 3 + [1.0] * 2

Value = Callable[[float, float, float], tuple[float, float]]


def batch() -> tuple[Batch, torch.Tensor]:
    old = torch.tensor(OLD, dtype=torch.float64)
    new = old + torch.tensor([math.log(r) for r in RATIOS], dtype=torch.float64)
    fields = {
        "old_log_probs": old,
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "loss_weight": token_weights(MASK, CU, "seq-mean-token-mean").double(),
    }
    packed = Batch(input_ids=torch.arange(14), cu_seqlens=CU, fields=fields)
    return packed, new.requires_grad_()


def computed(loss: PolicyLoss) -> tuple[float, list[float], dict[str, float]]:
    packed, new = batch()
    result = loss(TokenOutputs(log_probs=new), packed)
    (gradient,) = torch.autograd.grad(result.loss, new)
    metrics = {name: float(value) for name, value in result.metrics.items()}
    return float(result.loss.detach()), gradient.tolist(), metrics


def documents() -> list[list[int]]:
    """Return the positions of the counted tokens of each document that has any."""
    found = [[t for t in range(a, b) if MASK[t]] for a, b in pairwise(CU.tolist())]
    return [tokens for tokens in found if tokens]


def by_token(value: Value) -> tuple[float, list[float]]:
    """Return the mean of each completion's tokens, summed, and its gradient by the log-probs."""
    total, gradient = 0.0, [0.0] * 14
    for tokens in documents():
        for t in tokens:
            own, slope = value(RATIOS[t], ADVANTAGES[t], OLD[t])
            total += own / len(tokens)
            gradient[t] = slope / len(tokens)
    return total, gradient


def compare(loss: PolicyLoss, expected: tuple[float, list[float]]) -> dict[str, float]:
    value, gradient, metrics = computed(loss)
    assert value == pytest.approx(expected[0], rel=1e-12)
    assert gradient == pytest.approx(expected[1], rel=1e-12, abs=1e-15)
    return metrics


@pytest.mark.parametrize(("positive", "negative"), [(1.0, 1.05), (2.0, 3.0)])
def test_sapo(positive, negative):
    def value(r: float, a: float, _: float) -> tuple[float, float]:
        tau = positive if a > 0 else negative
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        # f = 4 σ / τ, f' = 4 σ (1 - σ), dr = r d log π.
        return -4 / tau * gate * a, -4 * gate * (1 - gate) * r * a

    compare(
        PolicyLoss(kind="sapo", options={"tau_pos": positive, "tau_neg": negative}),
        by_token(value),
    )


@pytest.mark.parametrize(("low", "high"), [(0.4, 0.4), (0.1, 0.9)])
def test_gmpo(low, high):
    total, gradient, clipped = 0.0, [0.0] * 14, 0
    for tokens in documents():
        a = ADVANTAGES[tokens[0]]
        logs = {t: math.log(RATIOS[t]) for t in tokens}
        held = {t: min(x, high) if a > 0 else max(x, -low) for t, x in logs.items()}
        product = math.prod(math.exp(x) for x in held.values()) ** (1 / len(tokens))
        total += -a * product
        for t in tokens:
            if held[t] == logs[t]:
                gradient[t] = -a * product / len(tokens)
            else:
                clipped += 1
    options = {"log_clip_low": low, "log_clip_high": high}
    metrics = compare(PolicyLoss(kind="gmpo", options=options), (total, gradient))
    assert clipped > 1
    assert metrics["clipped_low"] + metrics["clipped_high"] == clipped


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@pytest.mark.parametrize("cap", [20.0, 1.2])
@pytest.mark.parametrize("delta", [0.02, 0.15, 0.6])
def test_dppo(divergence, delta, cap):
    masked = 0

    def value(r: float, a: float, old: float) -> tuple[float, float]:
        nonlocal masked
        mu, pi = math.exp(old), math.exp(old) * r
        if divergence == "tv":
            distance = abs(mu - pi)
        else:
            # A probability above 1 of these made-up ratios counts as 1, just below.
            rest = 1 - min(pi, 1 - 2**-53)
            distance = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / rest)
        if distance > delta and ((a > 0 and r > 1) or (a < 0 and r < 1)):
            masked += 1
            return 0.0, 0.0
        return -a * min(r, cap), -a * min(r, cap)

    expected = by_token(value)
    options = {"delta": delta, "cap": cap}
    metrics = compare(PolicyLoss(kind=f"dppo_{divergence}", options=options), expected)
    assert metrics["clipped_low"] + metrics["clipped_high"] == masked
    assert masked > 0 or delta > 0.5


def test_a_certain_token_has_a_finite_divergence():
    packed, _ = batch()
    sure = torch.zeros(14, dtype=torch.float64)
    packed = packed.with_computed(old_log_probs=sure)
    for dtype in (torch.float32, torch.float64):
        new = sure.to(dtype).requires_grad_()
        result = PolicyLoss(kind="dppo_kl")(TokenOutputs(log_probs=new), packed)
        (gradient,) = torch.autograd.grad(result.loss, new)
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("kind", ["sapo", "gmpo", "dppo_tv", "dppo_kl"])
def test_on_policy_the_gradient_is_known_before_the_forward_pass(kind):
    packed, new = batch()
    loss = PolicyLoss(kind=kind, on_policy=True)
    result = loss(TokenOutputs(log_probs=new), packed)
    (gradient,) = torch.autograd.grad(result.loss, new)
    known = loss.coefficients(packed)
    assert known is not None
    torch.testing.assert_close(known, gradient, rtol=1e-12, atol=1e-15)
    assert PolicyLoss(kind=kind).coefficients(packed) is None


# --- the off-policy sequence mask (arXiv:2512.02556, eq. 9) ---------------------------------------


@pytest.mark.parametrize("kind", ["ppo", "gmpo"])
@pytest.mark.parametrize("rollout", [False, True])
def test_the_sequence_mask(kind, rollout):
    packed, new = batch()
    sampler = packed["old_log_probs"]
    if rollout:
        sampler = sampler + torch.linspace(-0.6, 0.9, 14, dtype=torch.float64)
        packed = packed.with_fields(rollout_log_probs=sampler)
    far = {
        number: sum(float(sampler[t] - new.detach()[t]) for t in tokens) / len(tokens)
        for number, tokens in enumerate(documents())
        if ADVANTAGES[tokens[0]] < 0
    }
    assert len(far) == 2
    # Between the two, so that one of them is masked.
    threshold = sum(far.values()) / 2
    assert threshold > 0
    weight = packed.loss_weight.clone()
    masked = 0
    for number, tokens in enumerate(documents()):
        if far.get(number, 0.0) > threshold:
            weight[tokens] = 0.0
            masked += len(tokens)
    assert 0 < masked < MASK.sum()
    without = packed.with_fields(loss_weight=weight)
    plain = PolicyLoss(kind=kind)(TokenOutputs(log_probs=new), without)
    loss = PolicyLoss(kind=kind, sequence_mask=threshold)
    result = loss(TokenOutputs(log_probs=new), packed)
    assert float(result.loss.detach()) == pytest.approx(float(plain.loss.detach()), rel=1e-13)
    (given,) = torch.autograd.grad(result.loss, new)
    (expected,) = torch.autograd.grad(plain.loss, new)
    torch.testing.assert_close(given, expected, rtol=1e-13, atol=0)
    assert float(result.metrics["sequence_masked"]) == masked
    assert PolicyLoss(on_policy=True, sequence_mask=0.1).coefficients(packed) is None


def test_the_sequence_mask_leaves_the_kl():
    packed, new = batch()
    packed = packed.with_fields(ref_log_probs=packed["old_log_probs"] - 0.3)
    everything = PolicyLoss(kl_coef=0.5, sequence_mask=0.0)
    bare = PolicyLoss(sequence_mask=0.0)
    kl = PolicyLoss(kl_coef=0.5)(TokenOutputs(log_probs=new), packed).loss
    kl = kl - PolicyLoss()(TokenOutputs(log_probs=new), packed).loss
    given = everything(TokenOutputs(log_probs=new), packed).loss
    given = given - bare(TokenOutputs(log_probs=new), packed).loss
    assert float(given.detach()) == pytest.approx(float(kl.detach()), rel=1e-12)


# --- settings -------------------------------------------------------------------------------------


def test_dr_grpos_constant_divides_all_completions():
    """Check arXiv:2503.20783: completions times a constant, whatever their lengths are."""
    assert denominator("seq-mean-token-sum-norm", [3, 1, 0, 8], 100) == 300.0
    assert token_weights(MASK, CU, "seq-mean-token-sum-norm").tolist() == MASK.tolist()


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"loss": "sapo", "loss_options": {"tau_neg": 0.0}}, "loss_options.tau_neg"),
        ({"loss": "dppo_tv", "loss_options": {"delta": -0.1}}, "loss_options.delta"),
        ({"loss": "gmpo"}, "aggregation"),
        ({"loss": "sapo", "clip_low": 0.3}, "clip_low"),
        ({"sequence_mask": -1.0}, "sequence_mask"),
    ],
)
def test_settings_that_are_refused(section, field):
    with pytest.raises(ConfigError) as caught:
        check_own_loss(AlgorithmSection(**section))
    assert field in str(caught.value)

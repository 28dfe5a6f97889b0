from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from engine_api.batch import Batch
from engine_api.results import TokenOutputs
from engine_trainer.algorithms.correction import correct, correction_figures, ratios
from engine_trainer.algorithms.losses import PolicyLoss
from engine_trainer.config import CorrectionSection
from engine_trainer.rl.kept_tokens import FIELD, TokenWatch
from engine_trainer.rl.mismatch import MismatchWatch, largest_of, mismatch_figures, mismatch_sums

LENGTHS = [5, 1, 9, 2, 7, 3]


def drawn(seed=0, scale=0.8):
    """Return packed documents.

    First tokens are prompts, and document 1 has no counted token.
    """
    random = torch.Generator().manual_seed(seed)
    size = sum(LENGTHS)
    engine, rollout = (-4 * torch.rand(size, generator=random) for _ in range(2))
    rollout = engine + scale * (rollout - engine) / 4
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    mask = torch.ones(size)
    mask[cu[:-1]] = 0
    mask[[2, 9, 12, 19]] = 0
    return engine, rollout, mask, cu


def documents(cu):
    return [range(int(a), int(b)) for a, b in itertools.pairwise(cu)]


def reference_weights(engine, rollout, mask, cu, section):
    """Return the weights token by token, as the formulas are written, in numpy float64."""
    p, q, m = (t.double().numpy() for t in (engine, rollout, mask))
    weights = np.ones(len(p))
    kept = np.ones(len(p), dtype=bool)
    for document in documents(cu):
        counted = [t for t in document if m[t]]
        product = math.exp(sum(p[t] - q[t] for t in counted))
        geometric = product ** (1 / len(counted)) if counted else 1.0
        for t in document:
            r = math.exp(p[t] - q[t]) if m[t] else 1.0
            if section.weight == "token":
                weights[t] = min(r, section.cap)
            elif section.weight == "sequence":
                weights[t] = min(product, section.cap)
            elif section.weight == "icepop":
                weights[t] = r if section.low <= r <= section.high else 0.0
            judged = {"none": 1.0, "token": r, "sequence": product, "geometric": geometric}[
                section.reject
            ]
            kept[t] = section.reject_low <= judged <= section.reject_high
    return weights, kept


@pytest.mark.parametrize("weight", ["none", "token", "sequence", "icepop"])
@pytest.mark.parametrize("reject", ["none", "token", "sequence", "geometric"])
def test_weights_and_rejection_are_the_formulas_token_by_token(weight, reject):
    section = CorrectionSection(
        weight=weight, cap=1.2, low=0.8, high=1.25, reject=reject, reject_low=0.9, reject_high=1.3
    )
    engine, rollout, mask, cu = drawn()
    result = correct(ratios(engine, rollout, mask, cu), section)
    weights, kept = reference_weights(engine, rollout, mask, cu, section)
    torch.testing.assert_close(
        result.weights, torch.tensor(weights, dtype=torch.float32), rtol=1e-6, atol=0
    )
    assert result.kept.tolist() == kept.tolist()
    if weight != "none":
        assert len(np.unique(weights)) > 2  # the bounds cut some and not all
    if reject != "none":
        assert 0 < kept.sum() < len(kept)


def by_hand(values, section, mask=None, lengths=None):
    """Build ratios with the Δ of each token given as its ratio."""
    lengths = lengths or [len(values)]
    logs = torch.tensor([math.log(v) for v in values], dtype=torch.float64)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    given = ratios(
        logs - 1, torch.full_like(logs, -1.0), torch.tensor(mask or [1.0] * len(values)), cu
    )
    result = correct(given, section)
    return result, correction_figures({k: float(v) for k, v in result.sums.items()}, section)


def test_token_tis_by_hand():
    result, figures = by_hand([0.25, 1.0, 3.0, 2.0], CorrectionSection(weight="token", cap=2.0))
    assert result.weights.tolist() == pytest.approx([0.25, 1, 2, 2])
    assert figures == pytest.approx(
        {
            "correction/weight_mean": 5.25 / 4,
            "correction/clipped": 0.25,
            "correction/ess": 5.25**2 / (4 * (0.0625 + 1 + 4 + 4)),
        }
    )


def test_sequence_tis_by_hand():
    """Check products 3 · 0.5 = 1.5 and 2 · 2 = 4, of which the second is cut.

    The units are the two sequences.
    """
    result, figures = by_hand(
        [3.0, 0.5, 2.0, 2.0], CorrectionSection(weight="sequence", cap=2.0), lengths=[2, 2]
    )
    assert result.weights.tolist() == pytest.approx([1.5, 1.5, 2, 2])
    assert figures["correction/clipped"] == 0.5
    assert figures["correction/ess"] == pytest.approx(3.5**2 / (2 * (2.25 + 4)))


def test_icepop_by_hand():
    result, figures = by_hand([0.4, 0.6, 1.0, 4.9, 5.1], CorrectionSection(weight="icepop"))
    assert result.weights.tolist() == pytest.approx([0, 0.6, 1, 4.9, 0])
    assert (figures["correction/masked_low"], figures["correction/masked_high"]) == pytest.approx(
        (0.2, 0.2)
    )
    assert bool(result.kept.all())  # the KL and entropy terms stay


def test_rejection_by_hand():
    """Check products 4 and 1, geometric means 2 and 1.

    Only the first sequence is rejected, and only by the sequence's product.
    """
    values = [4.0, 1.0, 0.5, 2.0]
    lengths = [2, 2]
    kept = {}
    for level in ("token", "sequence", "geometric"):
        result, figures = by_hand(
            values,
            CorrectionSection(reject=level, reject_low=0.6, reject_high=2.5),
            lengths=lengths,
        )
        kept[level] = (
            result.kept.tolist(),
            figures["correction/rejected_low"],
            figures["correction/rejected_high"],
            figures["correction/rejected_tokens"],
        )
        assert result.weights.tolist() == [1, 1, 1, 1]
    assert kept["token"] == ([False, True, False, True], 0.25, 0.25, 0.5)
    assert kept["sequence"] == ([False, False, True, True], 0, 0.5, 0.5)
    assert kept["geometric"] == ([True, True, True, True], 0, 0, 0)


def test_a_band_keeps_its_bounds():
    section = CorrectionSection(
        weight="icepop", low=0.5, high=2.0, reject="token", reject_low=0.5, reject_high=2.0
    )
    logs = torch.tensor([0.5, 2.0], dtype=torch.float64).log()
    given = ratios(logs, torch.zeros(2), torch.ones(2), torch.tensor([0, 2]))
    given.token.copy_(torch.tensor([0.5, 2.0]))  # a logarithm and an exponential round
    result = correct(given, section)
    assert result.weights.tolist() == [0.5, 2.0]
    assert result.kept.tolist() == [True, True]


@pytest.mark.parametrize("far", [-1e4, 1e4])
@pytest.mark.parametrize("weight", ["token", "sequence", "icepop"])
@pytest.mark.parametrize("reject", ["token", "sequence", "geometric"])
def test_far_ratios_stay_finite(far, weight, reject):
    engine = torch.tensor([0.0, far, far / 2])
    rollout = torch.zeros(3)
    given = ratios(engine, rollout, torch.ones(3), torch.tensor([0, 3]))
    section = CorrectionSection(weight=weight, high=1e9, reject=reject)
    result = correct(given, section)
    assert bool(result.weights.isfinite().all())
    sums = {k: float(v) for k, v in (result.sums | mismatch_sums(given, engine, rollout)).items()}
    assert all(
        math.isfinite(v)
        for v in (mismatch_figures(sums, [1e4]) | correction_figures(sums, section)).values()
    )
    assert given.token[1] == pytest.approx(math.exp(math.copysign(20, far)))
    assert given.sequence[0] == pytest.approx(math.exp(math.copysign(20, far)))


def test_the_sum_is_clamped_and_not_its_terms():
    given = ratios(
        torch.tensor([0.0, 30.0, -29.5]),
        torch.zeros(3),
        torch.tensor([0.0, 1.0, 1.0]),
        torch.tensor([0, 3]),
    )
    assert float(given.sequence) == pytest.approx(math.exp(0.5))
    assert float(given.geometric) == pytest.approx(math.exp(0.25))


def test_a_mean_over_one_token_is_that_token():
    given = ratios(
        torch.tensor([0.0, -1.0]),
        torch.tensor([0.0, -2.0]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([0, 2]),
    )
    assert float(given.geometric) == pytest.approx(math.e)


@pytest.mark.parametrize("mask", [[], [0.0, 0.0, 0.0]])
def test_nothing_that_counts_gives_no_figures_and_no_nan(mask):
    section = CorrectionSection(weight="sequence", reject="geometric")
    cu = torch.tensor([0, 3]) if mask else torch.tensor([0])
    logs = -torch.rand(len(mask))
    given = ratios(logs, logs - 3, torch.tensor(mask), cu)
    result = correct(given, section)
    assert bool((result.weights == 1).all())
    assert bool(result.kept.all())
    sums = {k: float(v) for k, v in (result.sums | mismatch_sums(given, logs, logs)).items()}
    assert mismatch_figures(sums, [0.0]) == correction_figures(sums, section) == {}
    assert largest_of(given) == 0.0


def test_all_weights_zero_is_an_effective_size_of_zero():
    _, figures = by_hand([9.0, 0.1], CorrectionSection(weight="icepop"))
    assert figures["correction/ess"] == figures["correction/weight_mean"] == 0.0


def test_weights_carry_no_gradient():
    engine, rollout, mask, cu = drawn()
    engine.requires_grad_()
    given = ratios(engine, rollout, mask, cu)
    result = correct(given, CorrectionSection(weight="token", reject="sequence"))
    assert not result.weights.requires_grad
    assert not any(
        v.requires_grad for v in (result.sums | mismatch_sums(given, engine, rollout)).values()
    )


# --- the figures --------------------------------------------------------------------------------


def figures_of(engine, rollout, mask, cu):
    given = ratios(engine, rollout, mask, cu)
    return mismatch_figures(
        {k: float(v) for k, v in mismatch_sums(given, engine, rollout).items()}, [largest_of(given)]
    )


def test_figures_are_the_formulas_in_float64_loops():
    engine, rollout, mask, cu = drawn()
    p = engine.double().numpy()
    q = rollout.double().numpy()
    rows = [[t for t in d if mask[t]] for d in documents(cu)]
    rows = [row for row in rows if row]
    tokens = [t for row in rows for t in row]
    delta = np.array([p[t] - q[t] for t in tokens])
    r = np.exp(delta)
    whole = np.array([math.exp(sum(p[t] - q[t] for t in row)) for row in rows])
    ppl = [np.array([math.exp(-sum(x[t] for t in row) / len(row)) for row in rows]) for x in (p, q)]
    expected = {
        "kl_k1": np.mean(-delta),
        "kl_k3": np.mean(r - 1 - delta),
        "rms": np.sqrt(np.mean(delta**2)),
        "max": np.abs(delta).max(),
        "token_mult_prob_error": np.mean(np.exp(np.abs(delta))),
        "chi2_token": np.mean(r**2) - 1,
        "chi2_sequence": np.mean(whole**2) - 1,
        "ess_token": r.sum() ** 2 / (len(r) * (r**2).sum()),
        "ess_sequence": whole.sum() ** 2 / (len(whole) * (whole**2).sum()),
        "ppl_engine": ppl[0].mean(),
        "ppl_rollout": ppl[1].mean(),
        "ppl_ratio": (ppl[0] / ppl[1]).mean(),
    }
    assert len(rows) == 5
    assert figures_of(engine, rollout, mask, cu) == pytest.approx(
        {f"mismatch/{k}": v for k, v in expected.items()}, rel=1e-9
    )


def test_figures_estimate_what_they_are_named_after():
    """Draw every token in proportion to q, so that the means are the expectations."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.4, 0.2, 0.4], dtype=torch.float64)
    tokens = torch.tensor([0] * 4 + [1] * 2 + [2] * 4)
    found = figures_of(p.log()[tokens], q.log()[tokens], torch.ones(10), torch.tensor([0, 10]))
    kl = float((q * (q / p).log()).sum())
    assert found["mismatch/kl_k1"] == pytest.approx(kl, abs=1e-12)
    assert found["mismatch/kl_k3"] == pytest.approx(kl, abs=1e-12)
    assert found["mismatch/chi2_token"] == pytest.approx(float(((p - q) ** 2 / q).sum()), abs=1e-12)


def test_equal_log_probs_are_a_perfect_match():
    engine, _, mask, cu = drawn()
    found = figures_of(engine, engine, mask, cu)
    ones = {"token_mult_prob_error", "ess_token", "ess_sequence", "ppl_ratio"}
    for name, value in found.items():
        if "ppl_e" not in name and "ppl_rol" not in name:
            assert value == pytest.approx(
                float(name.removeprefix("mismatch/") in ones), abs=1e-12
            ), name


@pytest.mark.parametrize(
    "parts", [[[0, 1, 2, 3, 4, 5]], [[3], [0, 5], [4, 1], [2]], [[1], [5, 4, 3, 2, 0]]]
)
def test_sums_do_not_depend_on_the_split(parts):
    engine, rollout, mask, cu = drawn()
    batch = Batch(
        input_ids=torch.arange(len(engine)),
        cu_seqlens=cu,
        fields={"e": engine, "r": rollout, "m": mask},
    )
    section = CorrectionSection(
        weight="sequence", cap=1.1, reject="geometric", reject_low=0.95, reject_high=1.05
    )

    def sums(one: Batch) -> dict[str, float]:
        given = ratios(one["e"], one["r"], one["m"], one.cu_seqlens)
        return {
            k: float(v)
            for k, v in (
                mismatch_sums(given, one["e"], one["r"]) | correct(given, section).sums
            ).items()
        }

    whole = sums(batch)
    split = [sums(batch.select(p)) for p in parts]
    assert {k: math.fsum(s[k] for s in split) for k in whole} == pytest.approx(whole, rel=1e-12)


# --- in the loss --------------------------------------------------------------------------------


def loss_batch(**extra):
    engine, rollout, mask, cu = drawn()
    random = torch.Generator().manual_seed(5)
    fields = {
        "rollout_log_probs": rollout,
        "mask": mask,
        "loss_weight": mask,
        "advantages": torch.randn(len(mask), generator=random) * mask,
        "ref_log_probs": engine - 0.3,
        **extra,
    }
    return Batch(input_ids=torch.arange(len(mask)), cu_seqlens=cu, fields=fields), engine


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
@pytest.mark.parametrize("corrects", [False, True])
def test_the_loss_of_an_update_does_not_wait_for_its_device(kind, corrects):
    """Fake tensors have no values: an operation that needs one raises an error."""
    batch, engine = loss_batch()
    section = CorrectionSection(weight="token" if corrects else "none")
    plain = PolicyLoss(kind=kind, on_policy=True, corrected=corrects, entropy=True)
    loss = TokenWatch(MismatchWatch(plain, section))
    batch = batch.with_fields(**{FIELD: torch.arange(len(engine), dtype=torch.int32) - 9})
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = batch.with_computed()
        for name in ("input_ids", "cu_seqlens"):
            object.__setattr__(fake, name, mode.from_tensor(getattr(batch, name)))
        fields = {name: mode.from_tensor(value) for name, value in batch.fields.items()}
        object.__setattr__(fake, "fields", fields)
        log_probs = mode.from_tensor(engine)
        for _ in range(2):
            loss(TokenOutputs(log_probs=log_probs, entropy=log_probs), fake)
        loss.coefficients(fake)
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            _ = loss.observed


@pytest.mark.parametrize(
    "settings", [{}, {"kl_coef": 0.3, "kl_importance": False}, {"entropy_coef": 0.1}]
)
def test_the_weight_multiplies_the_policy_term_alone(settings):
    weights = torch.linspace(0, 2, sum(LENGTHS))
    batch, engine = loss_batch(correction=weights)
    entropy = torch.rand(len(engine), generator=torch.Generator().manual_seed(2)).requires_grad_()

    def gradients(loss, one):
        log_probs = engine.clone().requires_grad_()
        value = loss(TokenOutputs(log_probs=log_probs, entropy=entropy), one).loss
        parts = torch.autograd.grad(
            value, (log_probs, entropy), allow_unused=True, materialize_grads=True
        )
        return value.detach(), *parts

    plain = gradients(PolicyLoss(on_policy=True, **settings), batch)
    zeroed = gradients(
        PolicyLoss(on_policy=True, **settings),
        batch.with_fields(advantages=batch["advantages"] * 0),
    )
    corrected = gradients(PolicyLoss(on_policy=True, corrected=True, **settings), batch)
    policy = -batch.loss_weight * batch["advantages"]
    torch.testing.assert_close(corrected[0], zeroed[0] + (weights * policy).sum())
    torch.testing.assert_close(corrected[1], zeroed[1] + weights * policy)
    torch.testing.assert_close(plain[1], zeroed[1] + policy)
    torch.testing.assert_close(corrected[2], plain[2])


def test_a_kl_with_the_importance_ratio_is_weighted_as_its_samples_are():
    weights = torch.linspace(0, 2, sum(LENGTHS))
    batch, engine = loss_batch(correction=weights)
    without = batch.with_fields(advantages=batch["advantages"] * 0)

    def gradient(**settings):
        log_probs = engine.clone().requires_grad_()
        loss = PolicyLoss(on_policy=True, kl_coef=0.3, **settings)
        return torch.autograd.grad(
            loss(TokenOutputs(log_probs=log_probs), without).loss, log_probs
        )[0]

    torch.testing.assert_close(gradient(corrected=True), weights * gradient())
    torch.testing.assert_close(gradient(), 0.3 * 0.3 * batch.loss_weight)  # r d, of d = 0.3


def test_coefficients_are_the_gradient_of_a_corrected_loss():
    batch, engine = loss_batch(correction=torch.linspace(0, 2, sum(LENGTHS)))
    loss = PolicyLoss(on_policy=True, corrected=True)
    log_probs = engine.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(
        loss(TokenOutputs(log_probs=log_probs), batch).loss, log_probs
    )
    known = loss.coefficients(batch)
    assert known is not None
    torch.testing.assert_close(known, gradient)


def test_the_watch_adds_the_sums_and_leaves_the_loss():
    batch, engine = loss_batch()
    log_probs = engine.clone().requires_grad_()
    plain = PolicyLoss(on_policy=True)
    watch = MismatchWatch(plain)
    result = watch(TokenOutputs(log_probs=log_probs), batch)
    assert torch.equal(result.loss, plain(TokenOutputs(log_probs=log_probs), batch).loss)
    known = watch.coefficients(batch)
    assert known is not None
    assert torch.equal(known, -batch.loss_weight * batch["advantages"])
    seen = {k: float(v) for k, v in result.metrics.items()}
    expected = figures_of(engine, batch["rollout_log_probs"], batch["mask"], batch.cu_seqlens)
    assert mismatch_figures(seen, [watch.observed]) == pytest.approx(expected)


@pytest.mark.parametrize(
    "section",
    [CorrectionSection(weight="token", cap=1.1), CorrectionSection(weight="sequence", cap=3.0)],
)
def test_the_watch_corrects_by_the_log_probs_that_it_is_given(section):
    batch, engine = loss_batch()
    rollout = batch["rollout_log_probs"]
    loss = PolicyLoss(on_policy=True, corrected=True)
    given = ratios(engine, rollout, batch["mask"], batch.cu_seqlens)
    told = correct(given, section)

    def gradient(call, one):
        log_probs = engine.clone().requires_grad_()
        result = call(TokenOutputs(log_probs=log_probs), one)
        return torch.autograd.grad(result.loss, log_probs)[0], result.metrics

    expected, _ = gradient(
        loss, batch.with_fields(correction=told.weights, loss_weight=batch.loss_weight * told.kept)
    )
    watch = MismatchWatch(loss, section)
    got, metrics = gradient(watch, batch)
    assert watch.coefficients(batch) is None, "they depend on the log-probs"
    assert len(told.weights[batch.loss_weight > 0].unique()) > 1
    assert torch.equal(got, expected)
    for name, value in (mismatch_sums(given, engine, rollout) | told.sums).items():
        assert float(metrics[name]) == float(value), name


def test_a_log_prob_that_is_no_number_makes_the_loss_none_and_raises_on_no_rank():
    batch, engine = loss_batch()
    broken = engine.clone()
    broken[1] = math.nan
    watch = MismatchWatch(
        PolicyLoss(on_policy=True, corrected=True), CorrectionSection(weight="token")
    )
    assert math.isnan(watch(TokenOutputs(log_probs=broken), batch).loss)

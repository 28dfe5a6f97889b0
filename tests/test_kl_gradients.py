"""Gradients of KL penalties by exact enumeration of a small policy, as docs/algorithms.md says."""

from __future__ import annotations

import importlib

import pytest
import torch
from layout import ROOT

from engine_api.errors import ConfigError
from engine_trainer.algorithms.losses import ESTIMATORS, PolicyLoss
from engine_trainer.config import KLSection

EXACT = {"rtol": 1e-9, "atol": 1e-12}
FAR_OFF = 0.6


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("kl_gradients")


def test_the_enumeration_has_the_gradients_of_finite_differences(tool) -> None:
    problem = tool.Problem.of(0.85)
    logits = problem.logits.detach()
    for index in [(0, 1), (2, 0), (12, 2)]:
        step = torch.zeros_like(logits)
        step[index] = 1e-6
        up, down = (
            float(tool.Problem(logits=one, sampler=one, reference=problem.reference).divergence())
            for one in (logits + step, logits - step)
        )
        found = problem.sequence_kl().view_as(logits)[index]
        assert float(found) == pytest.approx((up - down) / 2e-6, abs=1e-8)


@pytest.mark.parametrize("distance", [0.035, 0.85])
@pytest.mark.parametrize("by_token", [True, False], ids=["of tokens", "of completions"])
def test_k1_in_the_reward_descends_the_kl_of_sequences(tool, distance, by_token) -> None:
    problem = tool.Problem.of(distance)
    torch.testing.assert_close(
        problem.in_reward("k1", by_token=by_token), problem.sequence_kl(), **EXACT
    )


def test_k2_and_k3_in_the_reward_do_not_and_are_refused(tool) -> None:
    for distance in tool.DISTANCES.values():
        problem = tool.Problem.of(distance)
        for estimator in ("k2", "k3"):
            given, wanted = problem.in_reward(estimator), problem.sequence_kl()
            assert tool.cosine(given, wanted) < 0.6
            assert given.norm() < 0.3 * wanted.norm()
    assert (
        tool.cosine(tool.Problem.of(0.85).in_reward("k3"), tool.Problem.of(0.85).sequence_kl()) < 0
    )
    for estimator in ("k2", "k3"):
        with pytest.raises(ConfigError, match=r"(?s)expected k1 .* got k[23].*push away") as caught:
            KLSection(coefficient=0.1, where="reward", estimator=estimator)
        assert caught.value.field == "algorithm.kl.estimator"


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("drift", [0.0, FAR_OFF], ids=["on policy", "off policy"])
def test_with_the_ratio_every_estimator_in_the_loss_descends_the_kl_of_tokens(
    tool, estimator, drift
) -> None:
    problem = tool.Problem.of(0.85, drift=drift)
    torch.testing.assert_close(
        problem.in_loss(estimator, importance=True), problem.tokens_kl(), **EXACT
    )


def test_without_it_k2_does_on_policy_and_k3_descends_the_reverse(tool) -> None:
    on, off = tool.Problem.of(0.85), tool.Problem.of(0.85, drift=FAR_OFF)
    torch.testing.assert_close(on.in_loss("k2", importance=False), on.tokens_kl(), **EXACT)
    torch.testing.assert_close(
        on.in_loss("k3", importance=False), on.tokens_kl(reverse=True), **EXACT
    )
    assert tool.cosine(on.in_loss("k3", importance=False), on.tokens_kl()) < 0.995
    for estimator in ("k2", "k3"):
        for target in (off.tokens_kl(), off.tokens_kl(reverse=True)):
            assert tool.cosine(off.in_loss(estimator, importance=False), target) < 0.995


def test_the_bare_k1_in_the_loss_has_no_gradient_and_is_refused(tool) -> None:
    on = tool.Problem.of(0.85)
    assert float(on.in_loss("k1", importance=False).abs().max()) < 1e-12
    with pytest.raises(
        ConfigError, match=r"(?s)expectation is 0, whatever the reference is"
    ) as caught:
        KLSection(coefficient=0.1, estimator="k1", importance=False)
    assert caught.value.field == "algorithm.kl.estimator"


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_rollout_that_is_another_policy_is_made_up_for_by_the_correction(tool, estimator) -> None:
    """Samples come from q, old log-probs from p, the gradient is at π.

    The ratio is π / p, the correction p / q.
    """
    problem = tool.Problem.of(0.85, drift=FAR_OFF)
    old = (problem.sampler + problem.logits.detach()) / 2
    corrected = problem.in_loss(estimator, importance=True, old=old, corrected=True)
    # The tolerance is that of the weights, which are float32.
    torch.testing.assert_close(corrected, problem.tokens_kl(), rtol=1e-5, atol=1e-7)
    alone = problem.in_loss(estimator, importance=True, old=old)
    assert tool.cosine(alone, problem.tokens_kl()) < 0.999


def test_the_defaults_are_those_with_the_right_gradient() -> None:
    assert KLSection(coefficient=0.1, where="reward").chosen == "k1"
    in_loss = KLSection(coefficient=0.1)
    assert (in_loss.chosen, in_loss.importance) == ("k3", True)
    loss = PolicyLoss()
    assert (loss.kl_estimator, loss.kl_importance, loss.kl_bound) == ("k3", True, in_loss.bound)


def test_the_page_says_what_is_computed(tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kl_gradients.py", "--check"])
    assert tool.main() == 0, "run `python tools/kl_gradients.py`"

"""``check_loss`` and ``check_advantage``: what they find, and that the built-in ones pass."""

from __future__ import annotations

import pytest
import torch

from engine_api.errors import ConfigError
from engine_trainer.algorithms import (
    Completions,
    CreditTokens,
    LossOutput,
    PolicyTokens,
    advantage,
    policy_loss,
)
from engine_trainer.extensions.built_in import ADVANTAGES, LOSSES
from engine_trainer.testing import CheckFailed, check_advantage, check_loss


@pytest.mark.parametrize("name", LOSSES.built_in)
def test_the_built_in_losses_are_what_a_run_relies_on(name):
    check_loss(name)


def test_options_go_to_the_loss():
    check_loss("ppo", clip_low=0.1, clip_high=0.3, dual_clip=1.2)
    with pytest.raises(CheckFailed, match="unexpected keyword argument 'clip'"):
        check_loss("ppo", clip=0.1)


@pytest.mark.parametrize("name", ADVANTAGES.built_in)
def test_the_built_in_advantages_are_what_a_run_relies_on(name):
    check_advantage(name)


# --- losses that are wrong ------------------------------------------------------------------------


def mean_of_tokens(t: PolicyTokens) -> LossOutput:
    return LossOutput(loss=-(t.weight * t.advantages * t.log_probs).sum() / t.mask.sum())


def mean_of_all(t: PolicyTokens) -> LossOutput:
    return LossOutput(loss=-(t.weight * t.advantages * t.log_probs).mean())


def mean_of_documents(t: PolicyTokens) -> LossOutput:
    sums = t.sum_by_document(t.weight * t.log_probs * t.advantages)
    return LossOutput(loss=-sums.mean())


def unclamped_count(t: PolicyTokens) -> LossOutput:
    sums = t.sum_by_document(t.weight * t.log_probs)
    return LossOutput(loss=(sums / t.sum_by_document(t.mask.double())).sum())


def statistics_of_the_batch(t: PolicyTokens) -> LossOutput:
    scaled = t.advantages - t.advantages.mean()
    return LossOutput(loss=-(t.weight * scaled * t.log_probs).sum())


def no_weight(t: PolicyTokens) -> LossOutput:
    return LossOutput(loss=-(t.mask * t.advantages * t.log_probs).sum())


def masked_tokens_too(t: PolicyTokens) -> LossOutput:
    # exp(0) is 1 where a token carries no loss.
    scale = t.weight.max()
    return LossOutput(loss=scale * t.log_ratio.exp().sum() - scale * t.log_probs.numel() / 2)


def what_was_not_asked_for(t: PolicyTokens) -> LossOutput:
    return LossOutput(loss=(t.weight * (t.log_probs - t.ref_log_probs)).sum())


def one_number_a_token(t: PolicyTokens) -> LossOutput:
    return LossOutput(loss=t.weight * t.log_probs)


def a_bare_number(t: PolicyTokens) -> float:
    return float(t.log_probs.detach().sum())


def without_a_gradient(t: PolicyTokens) -> LossOutput:
    return LossOutput(loss=(t.weight * t.log_probs.detach()).sum())


def divided_already(t: PolicyTokens) -> LossOutput:
    assert t.denominator is not None
    return LossOutput(loss=-(t.weight * t.log_probs).sum() / t.denominator)


def mean_as_a_metric(t: PolicyTokens) -> LossOutput:
    metrics = {"mean_ratio": t.log_ratio.detach()[t.mask].exp().sum() / t.mask.sum().clamp(min=1)}
    return LossOutput(loss=-(t.weight * t.log_probs).sum(), metrics=metrics)


def another_dtype(t: PolicyTokens) -> LossOutput:
    return LossOutput(loss=-(t.weight * t.log_probs).sum().double())


def dice(t: PolicyTokens) -> LossOutput:
    return LossOutput(loss=-(t.weight * t.log_probs).sum() * torch.rand(()))


def changes_its_input(t: PolicyTokens) -> LossOutput:
    loss = -(t.weight * t.log_probs).sum()
    t.advantages.mul_(2.0)
    return LossOutput(loss=loss)


@policy_loss(only_advantages=True)
def wrong_claim(t: PolicyTokens) -> LossOutput:
    return LossOutput(loss=(t.weight * t.log_probs).sum())


class _Square(torch.autograd.Function):
    factor = 2.0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @classmethod
    def backward(cls, ctx, gradient):
        return gradient * cls.factor * ctx.saved_tensors[0]


class _WrongSquare(_Square):
    factor = 1.0


def wrong_backward(t: PolicyTokens) -> LossOutput:
    return LossOutput(loss=(t.weight * _WrongSquare.apply(t.log_probs)).sum())


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (mean_of_tokens, "the loss is a mean"),
        (mean_of_all, "the loss is a mean"),
        (mean_of_documents, "the loss is a mean"),
        (unclamped_count, "is nan"),
        (statistics_of_the_batch, "no sum over documents"),
        (no_weight, "twice the weight give 1 times the loss"),
        (masked_tokens_too, "no sum|more tokens in each prompt"),
        (what_was_not_asked_for, "TypeError.*\n.*ref_log_probs.*None unless"),
        (one_number_a_token, r"tensor of one element, got .*\(\d+,\)"),
        (a_bare_number, "expected a LossOutput, got a float"),
        (without_a_gradient, "has no gradient"),
        (divided_already, "divided by tokens.denominator"),
        (mean_as_a_metric, "metric 'mean_ratio' is no sum"),
        (another_dtype, "float32 log-probs is torch.float64"),
        (dice, "no sum|differs from call to call"),
        (changes_its_input, "changes tokens.advantages in place"),
        (wrong_claim, "although only_advantages=True"),
        (wrong_backward, "difference quotient"),
    ],
)
def test_a_wrong_loss_is_caught(loss, said):
    with pytest.raises(CheckFailed, match=said) as caught:
        check_loss(loss)
    assert "to do:" in str(caught.value)


# --- losses that are right, in ways that a check might mistake ------------------------------------


def stopped_gradient(t: PolicyTokens) -> LossOutput:
    with torch.no_grad():
        factor = (t.log_ratio.exp() - 1).clamp(-0.5, 0.5)
    return LossOutput(loss=(t.weight * factor * t.log_ratio.exp().detach() * t.log_probs).sum())


def own_backward(t: PolicyTokens) -> LossOutput:
    return LossOutput(loss=(t.weight * _Square.apply(t.log_probs) * t.log_probs.detach()).sum())


@policy_loss(needs=("entropy", "ref_log_probs", "weight_versions"))
def reads_all(t: PolicyTokens) -> LossOutput:
    assert t.entropy is not None
    assert t.ref_log_probs is not None
    assert t.weight_versions is not None
    assert t.version is not None
    fresh = 0.5 ** (t.version - t.weight_versions)
    value = fresh * (t.log_probs - t.ref_log_probs) ** 2 - 0.1 * t.entropy
    return LossOutput(loss=(t.weight * value).sum(), metrics={"fresh": (fresh * t.mask).sum()})


@pytest.mark.parametrize("loss", [stopped_gradient, own_backward, reads_all])
def test_a_right_loss_passes(loss):
    check_loss(loss)


def test_autograd_is_as_before():
    apply = torch.autograd.Function.__dict__["apply"]
    check_loss(own_backward)
    assert torch.autograd.Function.__dict__["apply"] is apply


# --- advantages -----------------------------------------------------------------------------------


def first_is_best(c: Completions) -> torch.Tensor:
    return c.rewards - c.rewards[:, :1]


def one_a_group(c: Completions) -> torch.Tensor:
    return c.rewards.mean(-1)


def divides_by_nothing(c: Completions) -> torch.Tensor:
    return (c.rewards - c.rewards.mean(-1, keepdim=True)) / c.rewards.std(-1, keepdim=True)


@advantage(level="token")
def whitened_here(t: CreditTokens) -> torch.Tensor:
    return t.rewards - t.rewards.mean()


@advantage(level="token", critic=True)
def without_targets(t: CreditTokens) -> torch.Tensor:
    return t.rewards


def whole_numbers(c: Completions) -> torch.Tensor:
    return c.rewards.argsort(-1)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (first_is_best, "order of a group's completions"),
        (one_a_group, r"shape \(5, 4\), got one of torch.float64 with the shape \(5,\)"),
        (divides_by_nothing, "numbers that are not finite"),
        (whitened_here, "documents beside it"),
        (without_targets, "expected a tuple of advantages"),
        (whole_numbers, "torch.int64"),
    ],
)
def test_a_wrong_advantage_is_caught(function, said):
    with pytest.raises(CheckFailed, match=said) as caught:
        check_advantage(function)
    assert "to do:" in str(caught.value)


@advantage(level="step")
def over_the_step(t: CreditTokens) -> torch.Tensor:
    return t.rewards - t.rewards.sum() / t.mask.sum()


def test_an_advantage_of_the_whole_step_may_read_all_of_it():
    check_advantage(over_the_step)


def test_decorators_refuse_what_nobody_knows():
    with pytest.raises(ConfigError, match="did you mean ref_log_probs"):
        policy_loss(needs=("reflog_probs",))
    with pytest.raises(ConfigError, match="got 'old_log_probs'"):
        policy_loss(needs=("old_log_probs",))
    with pytest.raises(ConfigError, match="completion, token, step"):
        advantage(level="tokens")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="whitened_here is not for a loss"):
        check_loss(whitened_here)

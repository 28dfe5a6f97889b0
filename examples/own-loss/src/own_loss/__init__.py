"""Tapered off-policy REINFORCE, as a loss for ``algorithm.loss: topr``."""

from __future__ import annotations

from engine_trainer.algorithms import LossOutput, PolicyTokens, policy_loss


@policy_loss(only_advantages=True)
def topr(tokens: PolicyTokens, *, low: float = 0.0, high: float = 1.0) -> LossOutput:
    """Return ``-Σ w A sg(ρ) log π`` (arXiv:2503.14286).

    ρ is 1 where A > 0, so that good completions are always learnt, and elsewhere the ratio of the
    whole completion within [``low``, ``high``], so that completions that the policy has already
    left have no pull.
    """
    counted = tokens.log_ratio.detach() * tokens.mask
    of_document = tokens.sum_by_document(counted)[tokens.document]
    taper = of_document.clamp(max=20.0).exp().clamp(low, high)
    factor = taper.where(tokens.advantages <= 0, 1.0)
    value = -factor * tokens.advantages * tokens.log_probs
    return LossOutput(
        loss=(tokens.weight * value).sum(),
        metrics={"ratio": (factor * tokens.mask).sum()},
    )

"""Advantages, returns, losses and corrections as pure functions.

A loss or an advantage of one's own takes ``PolicyTokens``, ``Completions`` or ``CreditTokens``, and
may say more about itself with the decorators ``policy_loss`` and ``advantage``.
"""

from engine_api.results import LossOutput
from engine_trainer.algorithms.inputs import Completions, CreditTokens, PolicyTokens
from engine_trainer.extensions.traits import advantage, policy_loss

__all__ = [
    "Completions",
    "CreditTokens",
    "LossOutput",
    "PolicyTokens",
    "advantage",
    "policy_loss",
]

"""Checks that the author of a loss or of an advantage runs in a test.

    from engine_trainer.testing import check_loss

    def test_my_loss():
        check_loss(my_loss, clip=0.3)

They draw packed documents with prompts, a tool's tokens and a completion without any token that
counts, and compare what a run relies on: see ``check_loss`` and ``check_advantage``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from engine_trainer.algorithms.checks import Finding, advantage_findings, loss_findings
from engine_trainer.extensions.built_in import ADVANTAGES, LOSSES
from engine_trainer.extensions.registry import FunctionRegistry

SEEDS = (0, 1, 2)


class CheckFailed(AssertionError):
    """A function that a run could not rely on.

    ``finding`` has the parts of the message.
    """

    def __init__(self, name: str, finding: Finding) -> None:
        self.finding = finding
        super().__init__(f"{name}: {finding}")


def check_loss(loss: str | Callable[..., Any], **options: Any) -> None:
    """Check a policy loss on drawn numbers.

    - It returns ``LossOutput`` with a scalar of the log-probs' dtype that has a gradient.
    - Loss, gradient and metrics are sums over documents. They do not depend on order, packing,
      micro-batches or ranks, and a token of twice the weight gives twice the loss. A mean is
      neither.
    - Tokens without loss have no influence, whatever they are, NaN included. A completion without
      any token that counts adds 0.
    - The gradient is that of the value (central differences in float64), where what the loss
      detaches is held constant.
    - It changes no input, and the same tokens give the same loss.
    - With ``only_advantages=True`` a token whose advantage is 0 has no gradient.

    Args:
        loss: the function, or what ``algorithm.loss`` would name.
        options: its options, as in ``algorithm.loss_options``.

    Raises:
        CheckFailed: an ``AssertionError`` that says what is wrong and what to do.
        EngineError: the name of a loss that is not there.
    """
    name, function, traits = _resolve(LOSSES, loss)
    _raise_first(
        name,
        (
            finding
            for seed in SEEDS
            for finding in loss_findings(functools.partial(function, **options), traits, seed=seed)
        ),
    )


def check_advantage(advantage: str | Callable[..., Any], **options: Any) -> None:
    """Check an advantage on drawn numbers.

    - It returns finite floating numbers, one for each completion or each token.
    - They do not depend on the order of groups, completions and documents.
    - At level ``token`` those of a document do not depend on the documents beside it.

    Args:
        advantage: the function, or what ``algorithm.advantage`` would name.
        options: its options, as in ``algorithm.advantage_options``.

    Raises:
        CheckFailed: an ``AssertionError`` that says what is wrong and what to do.
        EngineError: the name of an advantage that is not there.
    """
    name, function, traits = _resolve(ADVANTAGES, advantage)
    _raise_first(
        name,
        (
            finding
            for seed in SEEDS
            for finding in advantage_findings(
                functools.partial(function, **options), traits, seed=seed
            )
        ),
    )


def _resolve(
    registry: FunctionRegistry[Any], given: str | Callable[..., Any]
) -> tuple[str, Callable[..., Any], Any]:
    """Return a function's name, the function and its traits."""
    if isinstance(given, str):
        return given, registry.function(given), registry.traits(given)
    return getattr(given, "__name__", "the function"), given, registry.traits_of(given)


def _raise_first(name: str, findings: Iterator[Finding]) -> None:
    for finding in findings:
        raise CheckFailed(name, finding)

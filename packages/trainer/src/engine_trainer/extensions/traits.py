"""Traits of losses and advantages, and the decorators that state them.

The trainer reads these traits before a model is loaded. A function without a decorator has the
defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from engine_api.config import near_matches
from engine_api.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

LOSS_INPUTS = ("entropy", "ref_log_probs", "weight_versions")
"""Inputs of a loss that the trainer computes only where something reads them."""
ADVANTAGE_INPUTS = ("old_log_probs",)
"""Inputs of an advantage that the trainer computes only where something reads them."""
TRAITS = "__engine_trainer_traits__"


@dataclass(frozen=True, kw_only=True)
class LossTraits:
    """The traits of a policy loss (see ``policy_loss``)."""

    needs: tuple[str, ...] = ()
    """Names out of ``LOSS_INPUTS`` of the inputs that the loss reads."""

    only_advantages: bool = False
    """True if a token whose advantage is 0 has no gradient. Such tokens are then not trained on."""

    whole_sequences: bool = False
    """True if the loss takes one advantage for a whole completion."""

    aggregation: str | None = None
    """The only ``algorithm.aggregation`` that the loss is defined for. None is any."""

    slope: Literal["token", "sequence"] | None = None
    """The derivative by a log-prob where the policy is the one that sampled: -w A of the token, or
    its mean over the completion's tokens. None: it has to be computed.
    """


@dataclass(frozen=True, kw_only=True)
class AdvantageTraits:
    """The traits of an advantage (see ``advantage``)."""

    level: Literal["completion", "token", "step"] = "completion"
    """``completion``: the function takes the rewards of the step's groups. ``token``: it takes
    packed completions, in any division over ranks. ``step``: it takes all completions of the step,
    packed, on every rank.
    """

    whiten: bool = False
    """Default of ``algorithm.whiten``."""

    critic: bool = False
    """True if the function reads a critic's values, and returns advantages and its targets."""

    needs: tuple[str, ...] = ()
    """Names out of ``ADVANTAGE_INPUTS`` of the inputs that the function reads."""


@dataclass(frozen=True, kw_only=True)
class PairTraits:
    """The traits of a loss of preference pairs (see ``preference_loss``)."""

    reference: bool = True
    """True if the loss reads the reference model's log-probs."""

    per_token: bool = False
    """True if a response counts by its mean log-prob, not by the sum. The rewards in the metrics
    are then means, too.
    """


@dataclass(frozen=True, kw_only=True)
class UnpairedTraits:
    """The traits of a loss of labelled completions (see ``unpaired_loss``)."""

    baseline: bool = True
    """True if the loss reads ``kl``. It costs a forward pass over each prompt with the completion
    of another row.
    """


def policy_loss(
    *,
    needs: tuple[str, ...] = (),
    only_advantages: bool = False,
    whole_sequences: bool = False,
    aggregation: str | None = None,
) -> Callable[[F], F]:
    """Return a decorator for a policy loss that has other traits than the defaults.

    The arguments are those of ``LossTraits``.
    """
    _check_needs("policy_loss", needs, LOSS_INPUTS)
    return _mark(
        LossTraits(
            needs=tuple(needs),
            only_advantages=only_advantages,
            whole_sequences=whole_sequences,
            aggregation=aggregation,
        )
    )


def advantage(
    *,
    level: Literal["completion", "token", "step"] = "completion",
    whiten: bool = False,
    critic: bool = False,
    needs: tuple[str, ...] = (),
) -> Callable[[F], F]:
    """Return a decorator for an advantage that has other traits than the defaults.

    The arguments are those of ``AdvantageTraits``.
    """
    levels = ("completion", "token", "step")
    if level not in levels:
        raise ConfigError(
            "advantage.level",
            f"expected one of {', '.join(levels)}, got {level!r}",
            remedy=near_matches(str(level), levels, listed=True),
        )
    _check_needs("advantage", needs, ADVANTAGE_INPUTS)
    return _mark(AdvantageTraits(level=level, whiten=whiten, critic=critic, needs=tuple(needs)))


def preference_loss(*, reference: bool = True, per_token: bool = False) -> Callable[[F], F]:
    """Return a decorator for a loss of pairs that has other traits than the defaults.

    The arguments are those of ``PairTraits``.
    """
    return _mark(PairTraits(reference=reference, per_token=per_token))


def unpaired_loss(*, baseline: bool = True) -> Callable[[F], F]:
    """Return a decorator for a loss of labelled completions with other traits than the defaults.

    The arguments are those of ``UnpairedTraits``.
    """
    return _mark(UnpairedTraits(baseline=baseline))


def _mark(
    traits: LossTraits | AdvantageTraits | PairTraits | UnpairedTraits,
) -> Callable[[F], F]:
    def mark(function: F) -> F:
        setattr(function, TRAITS, traits)
        return function

    return mark


def _check_needs(decorator: str, needs: object, known: tuple[str, ...]) -> None:
    names = needs if isinstance(needs, tuple | list) else (needs,)
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{decorator}.needs",
                f"expected a tuple of names out of {', '.join(known)}, got {name!r:.100}",
                why="other inputs are always there",
                remedy=near_matches(str(name), known, listed=True),
            )

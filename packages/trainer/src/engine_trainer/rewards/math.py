"""The reward that compares mathematical answers with math-verify.

See https://github.com/huggingface/Math-Verify.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from engine_api.errors import ConfigError
from engine_trainer.rewards.sample import RewardError, RewardFn, Sample, Verdict
from engine_trainer.rewards.text import after_marker, last_boxed, require_answer

# Largest exponents, and arguments of factorials, in formulas that are evaluated for the vote and
# for the comparison.
VOTED, COMPARED = 64, 10_000


def math(*, boxed_only: bool = False) -> RewardFn:
    r"""Return a reward of 1 if the answer is mathematically equal to the expected one, else 0.

    The last ``\boxed{…}`` of a completion is its answer, or without one, the last number or formula
    that math-verify finds. The expected answer may be LaTeX, plain (``1/2``), or a solution that
    ends in ``\boxed{…}`` or ``#### …``.

    Args:
        boxed_only: give 0 to a completion without a whole ``\boxed{…}``.

    Raises:
        ConfigError: math-verify is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            "reward.name",
            "'math' needs math-verify",
            remedy="pip install 'math-verify[antlr4_13_2]'",
        )
    # An import in the first call would count against the call's time limit.
    importlib.import_module("math_verify")

    def score(sample: Sample) -> float:
        answer = last_boxed(sample.completion)
        if answer is None and boxed_only:
            return Verdict(0.0)
        gold = _gold(sample)
        given = _parse(_box(answer) if answer is not None else sample.completion)
        return Verdict(float(_verify(gold, given)), _vote(given))

    return score


def _gold(sample: Sample) -> list[Any]:
    text = require_answer(sample, "math")
    gold = _parse(_box(last_boxed(text) or after_marker(text) or text.strip().strip("$")))
    if not gold:
        raise RewardError(
            "math", sample, f"math-verify cannot read the expected answer {text[-80:]!r}"
        )
    return gold


def _vote(given: list[Any]) -> str | None:
    """Return a normal form of the answer's text, for the majority vote.

    Numbers are written as fractions, formulas as sympy writes them.
    """
    if not given:
        return None
    from sympy import Eq, Expr, Integral, Limit, Product, Sum, nsimplify

    first = given[0]
    # The answer of x = 3 is 3, as in the comparison of answers.
    if isinstance(first, Eq) and first.lhs.is_Symbol:
        first = first.rhs
    if (
        isinstance(first, Expr)
        and first.is_number
        and _is_bounded(first, VOTED)
        and not first.has(Integral, Limit, Product, Sum)
    ):
        # A percentage and a product arrive unevaluated, hence doit.
        first = nsimplify(first.doit(), rational=True)
    try:
        return str(first)
    # Python does not write integers of more than 4,300 digits.
    except ValueError:
        return None


def _is_bounded(value: Any, largest: int) -> bool:
    """Return whether every exponent and every argument of a factorial is at most ``largest``.

    Evaluation of a larger one could take longer than a run (2^(2^(2^100))), in a single operation
    that no alarm interrupts.
    """
    from sympy import Basic, Pow, binomial, factorial

    if not isinstance(value, Basic):
        return True
    if not all(_is_bounded(part, largest) for part in value.args):
        return False
    grows: Any = (
        value.exp
        if isinstance(value, Pow)
        else value.args[0]
        if isinstance(value, binomial | factorial)
        else None
    )
    if grows is None or not getattr(grows, "is_number", False):
        return True
    try:
        return abs(complex(grows.evalf(5))) <= largest
    except TypeError:  # infinite
        return False


def _box(text: str) -> str:
    return f"\\boxed{{{text}}}"


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    # The scorer keeps the time limit. math-verify's own alarm would cancel the scorer's, because a
    # process has only one alarm.
    return parse(text, parsing_timeout=0)


def _verify(gold: list[Any], given: list[Any]) -> bool:
    from math_verify import verify

    if not all(_is_bounded(one, COMPARED) for one in (*gold, *given)):
        return str(gold[:1]) == str(given[:1])
    return verify(gold, given, timeout_seconds=0)

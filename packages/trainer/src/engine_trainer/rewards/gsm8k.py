"""The reward for GSM8K, whose answer is the number after ``####``."""

from __future__ import annotations

from engine_trainer.rewards.sample import RewardError, RewardFn, Sample, Verdict
from engine_trainer.rewards.text import (
    after_marker,
    format_number,
    last_number,
    numbers,
    require_answer,
    to_decimal,
)


def gsm8k(*, flexible: bool = False) -> RewardFn:
    """Return a reward of 1 if the number after ``####`` is the expected one, else 0.

    The first number after the last ``####`` counts (Cobbe et al. 2021, arXiv:2110.14168), so the
    answer of ``#### 42 apples in 3 boxes`` is 42. The expected answer may be a whole GSM8K
    solution, in which the first number after its own ``####`` counts. Numbers are compared by
    value: ``1,200``, ``$1200`` and ``1200.0`` are equal.

    Args:
        flexible: in a completion without ``####``, take the last number (verl's "flexible" method).
    """

    def score(sample: Sample) -> float:
        wanted = to_decimal(_expected_number(sample))
        given = after_marker(sample.completion)
        last = last_number(sample.completion) if flexible else None
        found = to_decimal(last if given is None else _first_number(given))
        return Verdict(float(found == wanted), None if found is None else format_number(found))

    return score


def _expected_number(sample: Sample) -> str:
    """Return the expected number.

    Raises:
        RewardError: there is none, or it could be one of several.
    """
    text = require_answer(sample, "gsm8k")
    marked = after_marker(text)
    found = numbers(marked or text)
    if not found:
        raise RewardError("gsm8k", sample, f"the expected answer {text[-80:]!r} is not a number")
    # If the data layout has already removed the ####, the answer comes first.
    if not marked and len(found) > 1 and not text.lstrip(" $-.")[:1].isdecimal():
        raise RewardError(
            "gsm8k",
            sample,
            f"the expected answer {text[-80:]!r} has several numbers",
            remedy="write #### before the one that is the answer",
        )
    return found[0]


def _first_number(text: str) -> str | None:
    return next(iter(numbers(text)), None)

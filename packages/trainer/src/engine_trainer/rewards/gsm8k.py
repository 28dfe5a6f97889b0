"""GSM8K's answers: the number after ``####``."""

from __future__ import annotations

from engine_trainer.rewards.sample import RewardError, RewardFn, Sample, Verdict
from engine_trainer.rewards.text import (
    after_marker,
    exactly,
    expected,
    last_number,
    numbers,
    written,
)


def gsm8k(*, flexible: bool = False) -> RewardFn:
    """1 when the first number after the last ``####`` is the expected one, else 0 (Cobbe et al. 2021, arXiv:2110.14168).

    So ``#### 42 apples in 3 boxes`` says 42. The expected answer may be a whole GSM8K solution: the first number after its
    own ``####`` counts. Numbers are compared as such: ``1,200``, ``$1200`` and ``1200.0`` are equal.

    Args:
        flexible: without a ``####`` the last number of the completion counts (verl's "flexible" method).
    """

    def judge(sample: Sample) -> float:
        wanted = exactly(_wanted(sample))
        given = after_marker(sample.completion)
        last = last_number(sample.completion) if flexible else None
        found = exactly(last if given is None else _first(given))
        return Verdict(float(found == wanted), None if found is None else written(found))

    return judge


def _wanted(sample: Sample) -> str:
    """The expected number. Raises ``RewardError`` where there is none, or where it could be one of several."""
    text = expected(sample, "gsm8k")
    marked = after_marker(text)
    found = numbers(marked or text)
    if not found:
        raise RewardError("gsm8k", sample, f"the expected answer {text[-80:]!r} is not a number")
    # The data's layout has taken a #### away already: then the answer stands first.
    if not marked and len(found) > 1 and not text.lstrip(" $-.")[:1].isdecimal():
        raise RewardError(
            "gsm8k",
            sample,
            f"the expected answer {text[-80:]!r} has several numbers",
            remedy="write #### before the one that is the answer",
        )
    return found[0]


def _first(text: str) -> str | None:
    return next(iter(numbers(text)), None)

"""GSM8K's answers: the number after ``####``."""

from __future__ import annotations

from engine_trainer.rewards.sample import RewardError, RewardFn, Sample, Verdict
from engine_trainer.rewards.text import after_marker, expected, number_in, written


def gsm8k(*, flexible: bool = False) -> RewardFn:
    """1 when the number after the last ``####`` is the expected one, else 0 (Cobbe et al. 2021, arXiv:2110.14168).

    The expected answer may be a whole GSM8K solution: what follows its own ``####`` counts. Numbers are compared as
    such: ``1,200``, ``$1200`` and ``1200.0`` are equal.

    Args:
        flexible: without a ``####`` the last number of the completion counts (verl's "flexible" method).
    """

    def judge(sample: Sample) -> float:
        text = expected(sample, "gsm8k")
        wanted = number_in(after_marker(text) or text)
        if wanted is None:
            raise RewardError("gsm8k", sample, f"the expected answer {text[-80:]!r} is not a number")
        given = after_marker(sample.completion)
        if given is None and flexible:
            given = sample.completion
        found = None if given is None else number_in(given)
        return Verdict(float(found == wanted), None if found is None else written(found))

    return judge

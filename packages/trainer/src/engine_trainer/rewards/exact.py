"""Answers compared as text."""

from __future__ import annotations

from engine_trainer.rewards.sample import RewardFn, Sample, Verdict
from engine_trainer.rewards.text import EXTRACTORS, check_extractor, expected


def exact(*, extract: str = "none", ignore_case: bool = False) -> RewardFn:
    """1 when the extracted answer is the expected one, character for character (outer blanks aside), else 0.

    Args:
        extract: ``none`` (the whole completion), ``marker`` (after ``####``), ``boxed``, ``tags`` (``<answer>``), ``number``.
        ignore_case: compare in lower case.
    """
    check_extractor(extract)

    def judge(sample: Sample) -> float:
        given, wanted = EXTRACTORS[extract](sample.completion), expected(sample, "exact").strip()
        if given is None:
            return Verdict(0.0)
        if ignore_case:
            given, wanted = given.casefold(), wanted.casefold()
        return Verdict(float(given == wanted), given)

    return judge

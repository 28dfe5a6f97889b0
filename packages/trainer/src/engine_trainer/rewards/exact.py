"""Answers compared as text."""

from __future__ import annotations

from engine_trainer.rewards.sample import RewardFn, Sample
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
            return 0.0
        return float(given.casefold() == wanted.casefold() if ignore_case else given == wanted)

    return judge

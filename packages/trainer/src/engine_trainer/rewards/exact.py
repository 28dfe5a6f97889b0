"""The reward that compares answers as text."""

from __future__ import annotations

from engine_trainer.rewards.sample import RewardFn, Sample, Verdict
from engine_trainer.rewards.text import EXTRACTORS, check_extractor, require_answer


def exact(*, extract: str = "none", ignore_case: bool = False) -> RewardFn:
    """Return a reward of 1 if the extracted answer equals the expected one, else 0.

    The two are compared character for character, without outer blanks.

    Args:
        extract: method that extracts the answer: ``none`` (the whole completion), ``marker`` (after
            ``####``), ``boxed``, ``tags`` (``<answer>``), ``number``.
        ignore_case: compare without regard to case.
    """
    check_extractor(extract)

    def score(sample: Sample) -> float:
        given, wanted = (
            EXTRACTORS[extract](sample.completion),
            require_answer(sample, "exact").strip(),
        )
        if given is None:
            return Verdict(0.0)
        if ignore_case:
            given, wanted = given.casefold(), wanted.casefold()
        return Verdict(float(given == wanted), given)

    return score

"""The reward for procedural tasks, which uses reasoning-gym's own scorers.

See https://github.com/open-thought/reasoning-gym.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any, cast

from engine_api.errors import ConfigError
from engine_trainer.rewards.sample import RewardError, RewardFn, Sample, Verdict
from engine_trainer.rewards.text import EXTRACTORS, check_extractor


def reasoning_gym(*, extract: str = "marker", full_match: bool = True) -> RewardFn:
    """Return a reward that the task's own scorer computes for the extracted answer.

    The entry is ``metadata["entry"]``, which ``data.reasoning_gym`` stores there. It names its own
    task.

    Args:
        extract: method that extracts the answer: ``marker`` (after ``####``), ``boxed``, ``tags``
            (``<answer>``), ``number``, ``none`` (the whole completion). A completion without an
            answer gets 0.
        full_match: give only 1 or 0. The scorers themselves give part of a point to an answer that
            contains the right one.

    Raises:
        ConfigError: reasoning-gym is not installed.
    """
    check_extractor(extract)
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(
            "reward.name", "'reasoning_gym' needs reasoning-gym", remedy="pip install reasoning-gym"
        )
    # An import in the first call would count against the call's time limit.
    importlib.import_module("reasoning_gym")

    def score(sample: Sample) -> float:
        answer = EXTRACTORS[extract](sample.completion)
        if answer is None:
            return Verdict(0.0)
        entry = _entry(sample)
        score = float(_scorer(str(entry["metadata"]["source_dataset"]))(answer, entry))
        return Verdict(float(score >= 1.0) if full_match else score, answer.strip())

    return score


def _entry(sample: Sample) -> dict[str, Any]:
    entry = sample.metadata.get("entry")
    if not isinstance(entry, dict) or "source_dataset" not in entry.get("metadata", {}):
        raise RewardError(
            "reasoning_gym",
            sample,
            "the problem has no reasoning-gym entry",
            remedy="use it with data.reasoning_gym, or name another reward",
        )
    return entry


@cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn

    # The library's annotation is ``() -> float``, which is wrong.
    return cast("Callable[[str, dict[str, Any]], float]", get_score_answer_fn(task))

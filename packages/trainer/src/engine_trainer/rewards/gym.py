"""Procedural tasks, judged by reasoning-gym's own scorers (https://github.com/open-thought/reasoning-gym)."""

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
    """What the task's own scorer gives for the extracted answer.

    The entry is ``metadata["entry"]``, as ``data.reasoning_gym`` puts it there; it names its own task.

    Args:
        extract: where the answer stands: ``marker`` (after ``####``), ``boxed``, ``tags`` (``<answer>``), ``number``,
            ``none`` (the whole completion). A completion without one gets 0.
        full_match: 1 or 0 only: the scorers give part of a point to an answer that contains the right one.

    Raises ``ConfigError`` when reasoning-gym is not installed.
    """
    check_extractor(extract)
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(
            "reward.name", "'reasoning_gym' needs reasoning-gym", remedy="pip install reasoning-gym"
        )
    importlib.import_module("reasoning_gym")  # now: in the first call the time limit would count it

    def judge(sample: Sample) -> float:
        answer = EXTRACTORS[extract](sample.completion)
        if answer is None:
            return Verdict(0.0)
        entry = _entry(sample)
        score = float(_scorer(str(entry["metadata"]["source_dataset"]))(answer, entry))
        return Verdict(float(score >= 1.0) if full_match else score, answer.strip())

    return judge


def _entry(sample: Sample) -> dict[str, Any]:
    entry = sample.metadata.get("entry")
    if not isinstance(entry, dict) or "source_dataset" not in entry.get("metadata", {}):
        raise RewardError(
            "reasoning_gym",
            sample,
            "the problem carries no reasoning-gym entry",
            remedy="use it with data.reasoning_gym, or name another reward",
        )
    return entry


@cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn

    # Its annotation says ``() -> float``.
    return cast("Callable[[str, dict[str, Any]], float]", get_score_answer_fn(task))

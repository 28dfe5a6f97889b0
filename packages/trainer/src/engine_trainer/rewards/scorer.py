"""Runs reward functions over completions and adds them up."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine_api.errors import ConfigError, EngineError
from engine_trainer.rewards.deadline import DeadlineExceeded, deadline
from engine_trainer.rewards.registry import create
from engine_trainer.rewards.sample import RewardError, RewardFn, Sample

COMBINE = "combine"  # the name under which several rewards are given: kwargs.rewards, a list

log = logging.getLogger("engine_trainer")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedReward:
    """A reward function with its name, its weight in the sum and its time limit."""

    name: str
    function: RewardFn
    weight: float = 1.0
    timeout_s: float | None = 10.0  # a call


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What one completion got."""

    total: float  # Σ weight · part
    parts: dict[str, float]  # by reward name, unweighted
    correct: bool  # the first reward function gave at least 1
    timeouts: int = 0


class Scorer:
    """Several rewards as one: their weighted sum."""

    def __init__(self, rewards: Sequence[WeightedReward]) -> None:
        if not rewards or len({r.name for r in rewards}) < len(rewards):
            raise ConfigError(
                "reward.kwargs.rewards", f"names {[r.name for r in rewards]}", remedy="name each reward once"
            )
        self.rewards = tuple(rewards)

    @staticmethod
    def from_names(name: str, kwargs: Mapping[str, Any], timeout_s: float | None) -> Scorer:
        """One reward by name; or, as ``combine``, the weighted sum of ``kwargs["rewards"]``.

        Each of those is a mapping with ``name`` and, if wanted, ``weight`` (1), ``kwargs`` and ``timeout_s``.
        """
        if name != COMBINE:
            return Scorer([WeightedReward(name=name, function=create(name, kwargs), timeout_s=timeout_s)])
        return Scorer([_part(part, timeout_s) for part in kwargs.get("rewards", ())])

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """One ``Score`` a sample, in order.

        A call that takes longer than its limit counts 0 and is counted in ``timeouts``: a policy can write what
        keeps any checker busy, and that is no reason to end a run.

        Raises:
            RewardError: a function raised, or returned something that is not a finite number.
        """
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        parts, timeouts = {}, 0
        for reward in self.rewards:
            value = _call(reward, sample)
            timeouts += value is None
            parts[reward.name] = 0.0 if value is None else value
        total = math.fsum(r.weight * parts[r.name] for r in self.rewards)
        return Score(total=total, parts=parts, correct=parts[self.rewards[0].name] >= 1.0, timeouts=timeouts)


def _part(part: Mapping[str, Any], timeout_s: float | None) -> WeightedReward:
    unknown = set(part) - {"name", "weight", "kwargs", "timeout_s"}
    if unknown or "name" not in part:
        raise ConfigError(
            "reward.kwargs.rewards", f"{dict(part)}", remedy="give name, weight, kwargs, timeout_s; name is needed"
        )
    return WeightedReward(name=part["name"], function=create(part["name"], part.get("kwargs")), weight=part.get("weight", 1.0),
                          timeout_s=part.get("timeout_s", timeout_s))  # fmt: skip


def _call(reward: WeightedReward, sample: Sample) -> float | None:
    try:
        with deadline(reward.timeout_s):
            value = reward.function(sample)
    except DeadlineExceeded:
        log.warning(
            "reward %r took longer than %s s, counted as 0: %.200r", reward.name, reward.timeout_s, sample.completion
        )
        return None
    except EngineError:
        raise
    except Exception as error:  # a user's function may raise anything; it is named, and all ranks end together
        raise RewardError(reward.name, sample, f"it raised {type(error).__name__}: {error}") from error
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise RewardError(reward.name, sample, f"it returned {value!r}, not a number") from error
    if not math.isfinite(number):
        raise RewardError(reward.name, sample, f"it returned {number}, not a finite number")
    return number

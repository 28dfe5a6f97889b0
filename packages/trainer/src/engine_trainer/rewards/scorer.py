"""The scorer, which runs reward functions on completions and adds up their results."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from engine_api.codec import register
from engine_api.errors import ConfigError, EngineError
from engine_trainer.config.combined_reward import COMBINE, parts_of, refuse_limits_without_workers
from engine_trainer.config.sections import RewardSection
from engine_trainer.rewards.calls import Outcome, call_all
from engine_trainer.rewards.registry import RewardSpec, module_of
from engine_trainer.rewards.sample import RewardError, RewardFn, Sample, Verdict
from engine_trainer.rewards.worker_pool import Workers

log = logging.getLogger("engine_trainer")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedReward:
    """A reward with its name and its weight in the sum.

    Attributes:
        name: Name in metrics and errors.
        function: Reward function; None if ``Workers`` run it.
        weight: Factor of the reward in the sum.
        timeout_s: Time limit of a call, in seconds, which only ``Workers`` can keep; None: no
            limit.
    """

    name: str
    function: RewardFn | None = None
    weight: float = 1.0
    timeout_s: float | None = None


@register
@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The score of one completion."""

    total: float
    """Weighted sum of the parts, Σ weight · part."""
    parts: dict[str, float]
    """Unweighted rewards by name."""
    correct: bool
    """True if the first reward function returned at least 1."""
    answer: str | None = None
    """Answer that the first reward function found in the completion.

    None without a ``Verdict``.
    """
    timed_out: tuple[str, ...] = ()
    """Names of the rewards that took too long and count 0."""
    failed: tuple[str, ...] = ()
    """Names of the rewards that raised or returned no finite number and count 0."""
    problems: tuple[str, ...] = ()
    """Descriptions of the failures, in the order of ``failed``."""


class Scorer:
    """The weighted sum of several rewards.

    Args:
        rewards: the rewards, each with a different name.
        workers: processes that run the rewards; None: this process runs them.
        concurrency: concurrent calls of a coroutine function in this process.
        max_failures: number of calls in this scorer's life that may raise or return no finite
            number, and count 0 (``Failures`` limits their number in the run).
        max_timeouts: number of consecutive calls of one reward that may take too long, and count 0;
            None: any number.
    """

    def __init__(
        self,
        rewards: Sequence[WeightedReward],
        *,
        workers: Workers | None = None,
        concurrency: int = 64,
        max_failures: int = 0,
        max_timeouts: int | None = None,
    ) -> None:
        if not rewards or len({r.name for r in rewards}) < len(rewards):
            raise ConfigError(
                "reward.kwargs.rewards",
                f"expected rewards with different names, got {[r.name for r in rewards]}",
                remedy="name each reward once",
            )
        if workers is None:
            refuse_limits_without_workers({reward.name: reward.timeout_s for reward in rewards})
        self.rewards = tuple(rewards)
        self.workers = workers
        self.concurrency = concurrency
        self.max_failures = max_failures
        self.max_timeouts = max_timeouts
        self._failures = 0
        # Number of consecutive timeouts of each reward.
        self._timeouts = dict.fromkeys((r.name for r in rewards), 0)

    @staticmethod
    def from_section(section: RewardSection) -> Scorer:
        """Build the scorer of a ``reward`` section.

        It has one reward, or for ``combine`` the weighted sum of ``kwargs["rewards"]``, each of
        which is an ``engine_trainer.config.combined_reward.RewardPart``.

        Raises:
            ConfigError: the section is invalid, or a reward cannot be created.
            PluginError: an installed reward cannot be loaded.
        """
        parts = _parts(section)
        workers = None
        if section.workers:
            specs = [replace(spec, module=module_of(spec.name or "")) for spec, _ in parts]
            workers = Workers(specs, count=section.workers, concurrency=section.concurrency)
            workers.start()
        rewards = [
            WeightedReward(
                name=spec.title,
                function=None if workers else spec.make(),
                weight=weight,
                timeout_s=spec.timeout_s,
            )
            for spec, weight in parts
        ]
        return Scorer(
            rewards,
            workers=workers,
            concurrency=section.concurrency,
            max_failures=section.max_failures,
            max_timeouts=section.max_timeouts,
        )

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Return one ``Score`` per sample, in order.

        A call that takes longer than its limit counts 0, because a policy can write a text that
        keeps any checker busy, and that is no reason to end a run. A failed call counts 0 too, up
        to ``max_failures``. The ``Score`` names both.

        Raises:
            RewardError: there are more failures, or more consecutive timeouts, than allowed.
            EngineError: a reward raised it on purpose, for example for data without an answer.
        """
        outcomes = [self._call_reward(place, samples) for place in range(len(self.rewards))]
        return [
            self._score(sample, [one[i] for one in outcomes]) for i, sample in enumerate(samples)
        ]

    def close(self) -> None:
        """End the processes (idempotent)."""
        if self.workers is not None:
            self.workers.close()

    # --- inside ---------------------------------------------------------------------------------

    def _call_reward(self, place: int, samples: Sequence[Sample]) -> list[Outcome]:
        reward = self.rewards[place]
        found: dict[int, Outcome] = {}
        for number, outcome in self._calls(place, samples):
            self._watch(reward, samples[number], outcome)
            found[number] = outcome
        return [found[i] for i in range(len(samples))]

    def _calls(self, place: int, samples: Sequence[Sample]) -> Iterator[tuple[int, Outcome]]:
        if self.workers is not None:
            return self.workers.run(place, samples)
        function = self.rewards[place].function
        assert function is not None, "without workers every reward has one"
        return call_all(function, samples, concurrency=self.concurrency)

    def _watch(self, reward: WeightedReward, sample: Sample, outcome: Outcome) -> None:
        """Count failures and timeouts, and raise if there are too many."""
        if outcome.error is not None:
            raise _named(reward, sample, outcome.error) from outcome.cause
        self._timeouts[reward.name] = self._timeouts[reward.name] + 1 if outcome.timed_out else 0
        if outcome.timed_out:
            log.warning(
                "reward %r took longer than %s s, counted as 0: %.200r",
                reward.name,
                reward.timeout_s,
                sample.completion,
            )
            if self.max_timeouts is not None and self._timeouts[reward.name] > self.max_timeouts:
                raise RewardError(
                    reward.name,
                    sample,
                    f"{self._timeouts[reward.name]} calls in a row "
                    f"took longer than {reward.timeout_s} s",
                    remedy="check whether the service that it calls still responds, and move "
                    "its imports to the top of its file, where their time does not "
                    "count; reward.max_timeouts allows more timeouts",
                )
        if outcome.problem:
            self._failures += 1
            if self._failures > self.max_failures:
                raise RewardError.failed(
                    reward.name, sample, outcome.problem, self._failures, self.max_failures
                ) from outcome.cause
            log.warning("reward %r failed, counted as 0: %s", reward.name, outcome.problem)

    def _score(self, sample: Sample, outcomes: Sequence[Outcome]) -> Score:
        named = list(zip(self.rewards, outcomes, strict=True))
        parts = {r.name: float(o.value) if o.value is not None else 0.0 for r, o in named}
        first = outcomes[0].value
        return Score(
            total=self._total(sample, parts),
            parts=parts,
            correct=parts[self.rewards[0].name] >= 1.0,
            answer=first.answer if isinstance(first, Verdict) else None,
            timed_out=tuple(r.name for r, o in named if o.timed_out),
            failed=tuple(r.name for r, o in named if o.problem),
            problems=tuple(o.problem for o in outcomes if o.problem),
        )

    def _total(self, sample: Sample, parts: Mapping[str, float]) -> float:
        with suppress(OverflowError):
            total = math.fsum(r.weight * parts[r.name] for r in self.rewards)
            if math.isfinite(total):
                return total
        raise RewardError(
            COMBINE,
            sample,
            f"expected a finite weighted sum, got a sum of {dict(parts)}",
            remedy="give smaller weights, or bound the rewards",
        )


def _named(reward: WeightedReward, sample: Sample, error: EngineError) -> EngineError:
    """Return an error that names the reward function and the sample."""
    if isinstance(error, RewardError):
        return error
    return RewardError(
        reward.name, sample, f"it raised {type(error).__name__}: {error.what}", remedy=error.remedy
    )


def failure_figures(scores: Sequence[Score]) -> dict[str, float]:
    """Return the counts ``reward/timeouts`` and ``reward/failures`` of these completions.

    Each reward that had any has a count of its own, too.
    """
    figures: dict[str, float] = {}
    for kind, named in (
        ("timeouts", [s.timed_out for s in scores]),
        ("failures", [s.failed for s in scores]),
    ):
        names = [name for row in named for name in row]
        figures[f"reward/{kind}"] = float(len(names))
        figures |= {
            f"reward/{kind}/{name}": float(names.count(name)) for name in sorted(set(names))
        }
    return figures


def _parts(section: RewardSection) -> list[tuple[RewardSpec, float]]:
    if section.name != COMBINE:
        spec = RewardSpec(
            name=section.name,
            function=section.function,
            kwargs=dict(section.kwargs),
            timeout_s=section.timeout_s,
        )
        return [(spec, 1.0)]
    return [
        (
            RewardSpec(
                name=p.name, function=p.function, kwargs=dict(p.kwargs or {}), timeout_s=p.timeout_s
            ),
            p.weight,
        )
        for p in parts_of(section.kwargs, section.timeout_s)
    ]

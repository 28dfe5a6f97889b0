"""Where a step's experience comes from: generated before the step, or beside the one before it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from engine_trainer.rl.experience import Experience, staleness_figures
from engine_trainer.sampling.sampler import Sampler

Collect = Callable[
    [int, int], Experience
]  # (step, position of the first prompt), within ``sampler.serving``


class Source(Protocol):
    """Gives out one step's experience after the other."""

    def take(self, step: int) -> Experience:
        """The experience of ``step``. Raises ``RolloutError``, ``RewardError``."""
        ...

    def settle(self) -> None:
        """Nothing is generated when this returns: the rollout may be used for something else until the next ``take``."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Synchronous:
    """Sync, then generate: every token is the current policy's."""

    def __init__(self, sampler: Sampler, collect: Collect, position: int) -> None:
        self._sampler, self._collect, self._position = sampler, collect, position

    def take(self, step: int) -> Experience:
        """See ``Source``."""
        with self._sampler.serving():
            experience = self._collect(step, self._position)
        self._position = experience.position
        return experience

    def settle(self) -> None:
        """See ``Source``."""

    def close(self) -> None:
        """See ``Source``."""


class OneStepOff:
    """While a step is trained on, the next one is generated, by the weights that the step began with.

    As reproducible as ``Synchronous``; but a run that is resumed generates its first step with newer weights than the
    one that was left alone.
    """

    def __init__(
        self,
        sampler: Sampler,
        collect: Collect,
        position: int,
        oldest: Callable[[], int],
        total_steps: int,
    ) -> None:
        self._sampler, self._collect, self._position = sampler, collect, position
        self._oldest, self._total_steps = oldest, total_steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="generate")
        self._next: Future[Experience] | None = None

    def take(self, step: int) -> Experience:
        """See ``Source``."""
        coming = self._begin(step) if self._next is None else self._next
        with self._sampler.timers.phase("wait"):
            experience = coming.result()
        self._position, self._next = experience.position, None
        if step < self._total_steps:
            self._next = self._begin(step + 1)
        version = self._sampler.policy.weight_version
        figures = (
            staleness_figures(experience.groups, version, self._oldest())
            if experience.groups
            else {}
        )
        return replace(experience, metrics=experience.metrics | figures)

    def settle(self) -> None:
        """See ``Source``."""
        if self._next is not None:
            self._next.exception()  # waits; raised by the next take

    def close(self) -> None:
        """See ``Source``; what runs ends with its workers."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self, step: int) -> Future[Experience]:
        """Bring the weights of now, which the engine must not change meanwhile; then generate in the background."""
        with self._sampler.timers.phase("sync"):
            self._sampler.sync()
        return self._thread.submit(self._collect, step, self._position)

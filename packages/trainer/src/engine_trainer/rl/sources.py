"""Sources of a step's experience, generated before the step or during the step before it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Protocol

from engine_trainer.rl.experience import Experience, staleness_figures
from engine_trainer.sampling.sampler import Sampler

LOOK_S = 0.1
"""Seconds between two looks at replicas that may have started."""

Collect = Callable[[int, int], Experience]
"""Collects from (step, position of the first prompt), within ``sampler.serving``."""


class Source(Protocol):
    """A source of experience, one step after the other."""

    def take(self, step: int) -> Experience:
        """Return the experience of ``step``. Raises ``RolloutError``, ``RewardError``."""
        ...

    def settle(self) -> None:
        """Wait until nothing is generated.

        The rollout may then be used for other work until the next ``take``.
        """
        ...

    def close(self) -> None:
        """Close the source (idempotent)."""
        ...


class Synchronous:
    """A source that syncs, then generates, so that every token is the current policy's."""

    def __init__(self, sampler: Sampler, collect: Collect, position: int) -> None:
        self._sampler = sampler
        self._collect = collect
        self._position = position

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
    """A source that generates the next step while the current one is trained on.

    It generates with the weights that the current step began with. It is as reproducible as
    ``Synchronous``; but a resumed run generates its first step with newer weights than an
    uninterrupted run does.
    """

    def __init__(
        self,
        sampler: Sampler,
        collect: Collect,
        position: int,
        oldest: Callable[[], int],
        total_steps: int,
    ) -> None:
        self._sampler = sampler
        self._collect = collect
        self._position = position
        self._oldest = oldest
        self._total_steps = total_steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="generate")
        self._next: Future[Experience] | None = None

    def take(self, step: int) -> Experience:
        """See ``Source``."""
        generation = self._begin(step) if self._next is None else self._next
        with self._sampler.timers.phase("wait"):
            self._await(generation)
            experience = generation.result()
        self._position = experience.position
        self._next = None
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
        """Wait for the generation that runs (see ``Source``)."""
        if self._next is not None:
            # The next take raises the error.
            self._await(self._next)

    def close(self) -> None:
        """Close the source (see ``Source``).

        A generation that runs ends with its workers.
        """
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _await(self, generation: Future[Experience]) -> None:
        """Wait for a generation, and bring the weights to replicas that start meanwhile.

        The thread that generates must not call the engine, and may wait for such a replica.
        """
        while not wait([generation], timeout=LOOK_S).done:
            self._sampler.rollouts.admit()

    def _begin(self, step: int) -> Future[Experience]:
        """Sync the current weights, then generate in the background.

        The engine must not change its weights during the sync.
        """
        with self._sampler.timers.phase("sync"):
            self._sampler.sync()
        return self._thread.submit(self._collect, step, self._position)

"""Generation in the background, by a rollout that takes weights while it generates.

Groups are submitted once, and run to their ends whatever comes between. A call only begins new ones
and collects those that are complete, so that the process is soon free for a weight sync.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from engine_api.errors import RolloutError
from engine_api.rollout import Completion, Generation, InFlightRollout, SamplingParams
from engine_trainer.agent.generators import derive
from engine_trainer.data import Prompt
from engine_trainer.placement.replica import Replica, ScoredCompletion
from engine_trainer.utils.completions import require_completions

WAIT_S = 0.05
"""Longest time in seconds that a call waits for a complete group: a weight sync may be due."""
LOOK_S = 0.005
"""Seconds between two looks at the generations."""


@dataclass(kw_only=True)
class _Task:
    """A prompt whose completions are generated."""

    key: int
    prompt: Prompt
    sampling: SamplingParams
    generation: Generation
    may_be_lost: bool = False
    """True if it ran during a sync that failed, which ends generations."""


class InFlightRollouts:
    """The groups that one replica is generating.

    Args:
        replica: its rollout was made with ``in_flight``.
        sampling: parameters of whole completions; its seed is not read.
    """

    def __init__(self, replica: Replica, sampling: SamplingParams) -> None:
        self._replica = replica
        self._rollout = cast("InFlightRollout", replica.rollout)
        self._sampling = sampling
        self._tasks: list[_Task] = []

    @property
    def tokens_generated(self) -> int:
        """See ``InFlightRollout.tokens_generated``."""
        return self._rollout.tokens_generated

    def advance(
        self, new: Sequence[tuple[int, Prompt]], seed: int
    ) -> list[tuple[int, list[ScoredCompletion]]]:
        """Begin ``new`` groups, and return those that are complete, scored, by key.

        It waits briefly while none is complete. Raises ``RolloutError``, ``RewardError``.
        """
        with self._replica.timers.phase("generate"):
            self._tasks += [
                self._begin(key, prompt, replace(self._sampling, seed=derive(seed, place)))
                for place, (key, prompt) in enumerate(new)
            ]
            done = self._collect()
        with self._replica.timers.phase("reward"):
            return [
                (task.key, self._replica.score([task.prompt] * len(found), found))
                for task, found in done
            ]

    def note_failed_sync(self) -> None:
        """Note that a weight sync failed: groups that it ends are begun again, not errors.

        Another sync comes before the next ``advance``, or the run ends.
        """
        for task in self._tasks:
            task.may_be_lost = True

    def close(self) -> None:
        """Do nothing, because the rollout ends its generations when it is closed."""

    def _begin(self, key: int, prompt: Prompt, sampling: SamplingParams) -> _Task:
        generation = self._rollout.submit(prompt.tokens, sampling)
        return _Task(key=key, prompt=prompt, sampling=sampling, generation=generation)

    def _collect(self) -> list[tuple[_Task, list[Completion]]]:
        """Wait briefly, and return the groups that are complete."""
        end = time.monotonic() + WAIT_S
        while True:
            ended = [task for task in self._tasks if task.generation.done()]
            if ended or not self._tasks or time.monotonic() >= end:
                break
            time.sleep(LOOK_S)
        self._tasks = [task for task in self._tasks if task not in ended]
        done: list[tuple[_Task, list[Completion]]] = []
        for task in ended:
            try:
                found = task.generation.result()
            except RolloutError:
                if not task.may_be_lost:
                    raise
                self._tasks.append(self._begin(task.key, task.prompt, task.sampling))
            else:
                require_completions(found, [0], task.sampling.n)
                done.append((task, found))
        return done

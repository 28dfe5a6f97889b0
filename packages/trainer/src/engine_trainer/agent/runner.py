"""The runner of an agent function for many trajectories at once."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

from engine_api.errors import ConfigError, EngineError
from engine_api.rollout import AsyncRollout, Completion, Rollout, SamplingParams
from engine_trainer.agent.episode import (
    AgentError,
    Clock,
    Episode,
    EpisodeOver,
    Generator,
    Trajectory,
    about,
)
from engine_trainer.agent.generators import BatchingGenerator, SubmittingGenerator
from engine_trainer.config.sections import AgentSection
from engine_trainer.data import ChatTokenizer, Prompt
from engine_trainer.extensions.functions import (
    is_async,
    load_function,
    require_arguments,
    run_past_exits,
)
from engine_trainer.rewards.deadline import Alarm, DeadlineExceeded, alarm
from engine_trainer.utils.threads import event_loop

log = logging.getLogger("engine_trainer")
AgentFn = Callable[[Episode], Awaitable[Trajectory]]
FAREWELL_S = 2.0
"""Seconds that functions have to end when they are cancelled."""
BEAT_S = 0.25
"""Seconds between two signs that functions leave the event loop free."""


class AgentLoop:
    """The function of ``agent``, over a rollout.

    Raises ``ConfigError`` when there is no such function, or it is not ``async def``.
    """

    def __init__(self, section: AgentSection, tokenizer: ChatTokenizer) -> None:
        self.section = section
        self.tokenizer = tokenizer
        self.function = _load(section.function, section.kwargs)
        self._failures = 0

    def run(
        self, rollout: Rollout, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> list[list[Trajectory]]:
        """Return ``sampling.n`` trajectories for each prompt.

        ``sampling.max_new_tokens`` limits each trajectory as a whole.

        Raises:
            RolloutError: the rollout failed.
            AgentError: the function raised more often than ``agent.max_failures``, or does not
                return a trajectory.
        """
        if not prompts:
            return []
        with event_loop(FAREWELL_S) as loop, self._alarm() as hang_alarm:
            found = run_past_exits(loop, self._run(rollout, prompts, sampling, hang_alarm))
        return [[found[i * sampling.n + k] for k in range(sampling.n)] for i in range(len(prompts))]

    def _alarm(self) -> AbstractContextManager[Alarm | None]:
        """Return an alarm for a function that never awaits.

        Such a function blocks the event loop, and no limit of the loop's own takes effect.
        """
        limit = self.section.timeout_s
        # The alarm is a signal, which only the main thread receives.
        if limit is None or threading.current_thread() is not threading.main_thread():
            return nullcontext()
        return alarm(limit + BEAT_S, again=True)

    async def _run(
        self,
        rollout: Rollout,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        hang_alarm: Alarm | None,
    ) -> dict[int, Trajectory]:
        asked = [(prompt, k) for prompt in prompts for k in range(sampling.n)]
        slots = min(self.section.concurrency, len(asked))
        generator = _generator(rollout, sampling, _names(prompts, sampling.n), slots, hang_alarm)
        episodes = enumerate(
            self._episode(number, prompt, generator, sampling)
            for number, (prompt, _) in enumerate(asked)
        )
        found: dict[int, Trajectory] = {}
        tasks = [
            asyncio.create_task(self._run_slot(episodes, generator, found)) for _ in range(slots)
        ]
        beat = asyncio.create_task(_beat(hang_alarm))
        try:
            await asyncio.gather(*tasks)
        finally:
            await _end(*tasks, seconds=2 * FAREWELL_S)
            beat.cancel()
        return found

    async def converse(
        self, number: int, prompt: Prompt, generator: Generator, sampling: SamplingParams
    ) -> Trajectory:
        """Return one trajectory with the given number. Raises the errors of ``run``."""
        return await self._one(self._episode(number, prompt, generator, sampling))

    def _episode(
        self, number: int, prompt: Prompt, generator: Generator, sampling: SamplingParams
    ) -> Episode:
        return Episode(
            number,
            prompt,
            generator,
            self.tokenizer,
            max_tokens=sampling.max_new_tokens,
            max_turns=self.section.max_turns,
            max_turn_tokens=self.section.max_turn_tokens,
        )

    async def _run_slot(
        self,
        episodes: Iterator[tuple[int, Episode]],
        generator: SubmittingGenerator | BatchingGenerator,
        found: dict[int, Trajectory],
    ) -> None:
        """Run one trajectory after the other."""
        for number, episode in episodes:
            found[number] = await self._one(episode)
            # The rollout's error ends the run, even if the function has caught it.
            if generator.failed is not None:
                raise generator.failed
        generator.leave()

    async def _one(self, episode: Episode) -> Trajectory:
        """Run the function in a task of its own.

        One that ignores its cancellation is left behind, and blocks no one.
        """
        clock = Clock(self.section.timeout_s)
        episode.clock = clock
        talk = asyncio.create_task(_awaited(self.function(episode)))
        out = asyncio.create_task(clock.out.wait())
        clock.go()
        try:
            await asyncio.wait((talk, out), return_when=asyncio.FIRST_COMPLETED)
        finally:
            late = not talk.done()
            out.cancel()
            await _end(talk, seconds=FAREWELL_S)
            episode.leave()
        return self._ended(episode, talk, late)

    def _ended(self, episode: Episode, talk: asyncio.Task[Trajectory], late: bool) -> Trajectory:
        """Return the trajectory of a task that has ended.

        ``late`` is True if its time was up.
        """
        try:
            if talk.done():
                return _checked(talk.result(), episode.prompt)
        except EpisodeOver:
            return episode.close("limit")
        except EngineError:
            raise
        except (Exception, SystemExit, DeadlineExceeded, asyncio.CancelledError) as error:  # noqa: BLE001 - counted and named
            # A user's function may raise anything; the error is counted and named.
            late = isinstance(error, DeadlineExceeded) or (
                late and isinstance(error, TimeoutError | asyncio.CancelledError)
            )
            if not late:
                return episode.close("failed", self._fail(episode, error))
        log.warning(
            "agent.function took longer than %s s: %.200r",
            self.section.timeout_s,
            episode.prompt.text,
        )
        return episode.close("timeout")

    def _fail(self, episode: Episode, error: BaseException) -> str:
        self._failures += 1
        problem = f"it raised {type(error).__name__}: {error}"
        if self._failures > self.section.max_failures:
            raise AgentError.failed(
                problem, episode.prompt, self._failures, self.section.max_failures
            ) from error
        log.warning("agent.function failed, the trajectory ends there: %s", problem)
        return problem


def _load(target: str, kwargs: Mapping[str, Any]) -> AgentFn:
    function = load_function(target, "agent.function")
    if not is_async(function):
        raise ConfigError(
            "agent.function",
            f"{target} is not async",
            why="it awaits the model",
            remedy="write async def; a slow tool runs in a thread with "
            "await asyncio.to_thread(tool, …)",
        )
    require_arguments(function, "agent.function", ["episode"], kwargs)
    return cast("AgentFn", partial(function, **kwargs))


def _checked(value: object, prompt: Prompt) -> Trajectory:
    if not isinstance(value, Trajectory):
        raise AgentError(
            f"it returned {type(value).__name__}",
            where="agent.function",
            why=f"expected a Trajectory; {about(prompt)}",
            remedy="return episode.end()",
        )
    return value


async def _awaited(talk: Awaitable[Trajectory]) -> Trajectory:
    return await talk


async def _end(*tasks: asyncio.Task[Any], seconds: float) -> None:
    """Cancel tasks, wait for them at most ``seconds``, and read their errors."""
    for task in tasks:
        task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=seconds)
    for task in done:
        if not task.cancelled():
            task.exception()


async def _beat(hang_alarm: Alarm | None) -> None:
    """Put the alarm off as long as the event loop is free."""
    while hang_alarm is not None:
        hang_alarm.restart()
        await asyncio.sleep(BEAT_S)


def _generator(
    rollout: Rollout,
    sampling: SamplingParams,
    names: Sequence[Any],
    slots: int,
    hang_alarm: Alarm | None,
) -> SubmittingGenerator | BatchingGenerator:
    if isinstance(rollout, AsyncRollout):
        return SubmittingGenerator(rollout, sampling, names)
    if hang_alarm is not None:
        rollout = cast("Rollout", _AlarmFreeRollout(rollout, hang_alarm))
    return BatchingGenerator(rollout, replace(sampling, n=1), slots)


class _AlarmFreeRollout:
    """A rollout whose calls stop the alarm, which is meant for the functions alone."""

    def __init__(self, rollout: Rollout, hang_alarm: Alarm) -> None:
        self._rollout = rollout
        self._hang_alarm = hang_alarm

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[Completion]:
        with self._hang_alarm.stopped():
            return self._rollout.generate(prompts, sampling)


def _names(prompts: Sequence[Prompt], n: int) -> list[Any]:
    """Return for each trajectory a name that is the same wherever it runs.

    It has the prompt, the count of its earlier occurrences here, and the number of the sample.
    """
    seen: dict[tuple[int, ...], int] = {}
    names: list[Any] = []
    for prompt in prompts:
        key = tuple(prompt.tokens)
        seen[key] = seen.get(key, -1) + 1
        names += [(key, seen[key], k) for k in range(n)]
    return names

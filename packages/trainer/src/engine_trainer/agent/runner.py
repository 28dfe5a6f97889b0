"""Runs an agent function for many trajectories at once."""

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
from engine_trainer.agent.generators import Batched, Submitted
from engine_trainer.config.sections import AgentSection
from engine_trainer.data import ChatTokenizer, Prompt
from engine_trainer.rewards.deadline import Alarm, DeadlineExceeded, alarm
from engine_trainer.utils.functions import (
    is_async,
    load_function,
    require_arguments,
    run_past_exits,
)
from engine_trainer.utils.threads import event_loop

log = logging.getLogger("engine_trainer")
AgentFn = Callable[[Episode], Awaitable[Trajectory]]
FAREWELL_S = 2.0  # for functions to let go when they are cancelled
BEAT_S = 0.25  # between two signs that functions leave the event loop free


class AgentLoop:
    """The function of ``agent``, over a rollout.

    Raises ``ConfigError`` when there is no such function, or it is not ``async def``.
    """

    def __init__(self, section: AgentSection, tokenizer: ChatTokenizer) -> None:
        self.section, self.tokenizer = section, tokenizer
        self.function = _load(section.function, section.kwargs)
        self._failures = 0

    def run(
        self, rollout: Rollout, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> list[list[Trajectory]]:
        """``sampling.n`` trajectories for each prompt; ``sampling.max_new_tokens`` holds for each as a whole.

        Raises:
            RolloutError: the rollout failed.
            AgentError: the function raised more often than ``agent.max_failures``, or does not return a trajectory.
        """
        if not prompts:
            return []
        with event_loop(FAREWELL_S) as loop, self._alarm() as held:
            found = run_past_exits(loop, self._run(rollout, prompts, sampling, held))
        return [[found[i * sampling.n + k] for k in range(sampling.n)] for i in range(len(prompts))]

    def _alarm(self) -> AbstractContextManager[Alarm | None]:
        """For a function that never awaits: it holds the event loop, and no limit of the loop's own comes."""
        limit = self.section.timeout_s
        if (
            limit is None or threading.current_thread() is not threading.main_thread()
        ):  # no signal comes through there
            return nullcontext()
        return alarm(limit + BEAT_S, again=True)

    async def _run(
        self,
        rollout: Rollout,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        held: Alarm | None,
    ) -> dict[int, Trajectory]:
        asked = [(prompt, k) for prompt in prompts for k in range(sampling.n)]
        places = min(self.section.concurrency, len(asked))
        generator = _generator(rollout, sampling, _names(prompts, sampling.n), places, held)
        episodes = enumerate(
            self._episode(number, prompt, generator, sampling)
            for number, (prompt, _) in enumerate(asked)
        )
        found: dict[int, Trajectory] = {}
        tasks = [
            asyncio.create_task(self._place(episodes, generator, found)) for _ in range(places)
        ]
        beat = asyncio.create_task(_beat(held))
        try:
            await asyncio.gather(*tasks)
        finally:
            await _end(*tasks, seconds=2 * FAREWELL_S)
            beat.cancel()
        return found

    async def converse(
        self, number: int, prompt: Prompt, generator: Generator, sampling: SamplingParams
    ) -> Trajectory:
        """One trajectory, of whichever number. Raises as ``run``."""
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

    async def _place(
        self,
        episodes: Iterator[tuple[int, Episode]],
        generator: Submitted | Batched,
        found: dict[int, Trajectory],
    ) -> None:
        """One trajectory after the other."""
        for number, episode in episodes:
            found[number] = await self._one(episode)
            if generator.failed is not None:  # whatever its function made of it
                raise generator.failed
        generator.leave()

    async def _one(self, episode: Episode) -> Trajectory:
        """The function in a task of its own: one that pays no heed to its cancellation is left behind, and holds nobody."""
        episode.clock = clock = Clock(self.section.timeout_s)
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
        """``late``: its time was up."""
        try:
            if talk.done():
                return _checked(talk.result(), episode.prompt)
        except EpisodeOver:
            return episode.close("limit")
        except EngineError:
            raise
        except (Exception, SystemExit, DeadlineExceeded, asyncio.CancelledError) as error:  # noqa: BLE001 - a user's function may raise anything; it is counted and named
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
        said = f"it raised {type(error).__name__}: {error}"
        if self._failures > self.section.max_failures:
            raise AgentError.failed(
                said, episode.prompt, self._failures, self.section.max_failures
            ) from error
        log.warning("agent.function failed, the trajectory ends there: %s", said)
        return said


def _load(target: str, kwargs: Mapping[str, Any]) -> AgentFn:
    function = load_function(target, "agent.function")
    if not is_async(function):
        raise ConfigError(
            "agent.function",
            f"{target} is not async",
            why="it awaits the model",
            remedy="write async def; a slow tool runs beside it with await asyncio.to_thread(tool, …)",
        )
    require_arguments(function, "agent.function", ["episode"], kwargs)
    return cast("AgentFn", partial(function, **kwargs))


def _checked(value: object, prompt: Prompt) -> Trajectory:
    if not isinstance(value, Trajectory):
        raise AgentError(
            f"it returned {type(value).__name__}",
            where="agent.function",
            why=f"a trajectory is needed; {about(prompt)}",
            remedy="return episode.end()",
        )
    return value


async def _awaited(talk: Awaitable[Trajectory]) -> Trajectory:
    return await talk


async def _end(*tasks: asyncio.Task[Any], seconds: float) -> None:
    """Cancel tasks and wait for them, no longer than that; what they raise is read."""
    for task in tasks:
        task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=seconds)
    for task in done:
        if not task.cancelled():
            task.exception()


async def _beat(held: Alarm | None) -> None:
    """Put the alarm off as long as the event loop turns."""
    while held is not None:
        held.restart()
        await asyncio.sleep(BEAT_S)


def _generator(
    rollout: Rollout,
    sampling: SamplingParams,
    names: Sequence[Any],
    places: int,
    held: Alarm | None,
) -> Submitted | Batched:
    if isinstance(rollout, AsyncRollout):
        return Submitted(rollout, sampling, names)
    return Batched(
        rollout if held is None else cast("Rollout", _Unhurried(rollout, held)),
        replace(sampling, n=1),
        places,
    )


class _Unhurried:
    """A rollout that holds the event loop for as long as it takes: the alarm is for the functions."""

    def __init__(self, rollout: Rollout, held: Alarm) -> None:
        self._rollout, self._held = rollout, held

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[Completion]:
        with self._held.stopped():
            return self._rollout.generate(prompts, sampling)


def _names(prompts: Sequence[Prompt], n: int) -> list[Any]:
    """What tells trajectories apart wherever they run: the prompt, how often it came before here, and which sample."""
    seen: dict[tuple[int, ...], int] = {}
    names: list[Any] = []
    for prompt in prompts:
        key = tuple(prompt.tokens)
        seen[key] = seen.get(key, -1) + 1
        names += [(key, seen[key], k) for k in range(n)]
    return names

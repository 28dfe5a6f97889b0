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
from engine_trainer.agent.episode import AgentError, Episode, EpisodeOver, Generator, Trajectory
from engine_trainer.agent.generators import Batched, Submitted
from engine_trainer.data import ChatTokenizer, Prompt
from engine_trainer.functions import is_async, load_function, require_arguments, run_past_exits
from engine_trainer.rewards.deadline import Alarm, DeadlineExceeded, alarm
from engine_trainer.sections import AgentSection
from engine_trainer.threads import DaemonThreads

log = logging.getLogger("engine_trainer")
AgentFn = Callable[[Episode], Awaitable[Trajectory]]
BEAT_S = 0.25  # between two signs that functions leave the event loop free


class AgentLoop:
    """The function of ``agent``, over a rollout.

    Raises ``ConfigError`` when there is no such function, or it is not ``async def``.
    """

    def __init__(self, section: AgentSection, tokenizer: ChatTokenizer) -> None:
        self.section, self.tokenizer = section, tokenizer
        self.function = _load(section.function, section.kwargs)
        self._failures = 0

    def run(self, rollout: Rollout, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[list[Trajectory]]:
        """``sampling.n`` trajectories for each prompt; ``sampling.max_new_tokens`` holds for each as a whole.

        Raises:
            RolloutError: the rollout failed.
            AgentError: the function raised more often than ``agent.max_failures``, or does not return a trajectory.
        """
        if not prompts:
            return []
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            loop.set_default_executor(DaemonThreads())  # of tools: asyncio.to_thread
            with self._alarm() as held:
                found = run_past_exits(loop, self._run(rollout, prompts, sampling, held))
        return [[found[i * sampling.n + k] for k in range(sampling.n)] for i in range(len(prompts))]

    def _alarm(self) -> AbstractContextManager[Alarm | None]:
        """For a function that never awaits: it holds the event loop, and no limit of the loop's own comes."""
        limit = self.section.timeout_s
        if limit is None or threading.current_thread() is not threading.main_thread():  # no signal comes through there
            return nullcontext()
        return alarm(limit + BEAT_S, again=True)

    async def _run(
        self, rollout: Rollout, prompts: Sequence[Prompt], sampling: SamplingParams, held: Alarm | None
    ) -> dict[int, Trajectory]:
        asked = [(prompt, k) for prompt in prompts for k in range(sampling.n)]
        places = min(self.section.concurrency, len(asked))
        generator = _generator(rollout, sampling, _names(prompts, sampling.n), places, held)
        episodes = enumerate(
            self._episode(number, prompt, generator, sampling) for number, (prompt, _) in enumerate(asked)
        )
        found: dict[int, Trajectory] = {}
        tasks = [asyncio.create_task(self._place(episodes, generator, found)) for _ in range(places)]
        beat = asyncio.create_task(_beat(held))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            beat.cancel()
        return found

    async def converse(self, number: int, prompt: Prompt, generator: Generator, sampling: SamplingParams) -> Trajectory:
        """One trajectory, of whichever number. Raises as ``run``."""
        return await self._one(self._episode(number, prompt, generator, sampling))

    def _episode(self, number: int, prompt: Prompt, generator: Generator, sampling: SamplingParams) -> Episode:
        return Episode(number, prompt, generator, self.tokenizer, max_tokens=sampling.max_new_tokens,
                       max_turns=self.section.max_turns, max_turn_tokens=self.section.max_turn_tokens)  # fmt: skip

    async def _place(
        self, episodes: Iterator[tuple[int, Episode]], generator: Submitted | Batched, found: dict[int, Trajectory]
    ) -> None:
        """One trajectory after the other."""
        for number, episode in episodes:
            found[number] = await self._one(episode)
        generator.leave()

    async def _one(self, episode: Episode) -> Trajectory:
        clock = asyncio.timeout(self.section.timeout_s)
        try:
            async with clock as episode.clock:
                return _checked(await self.function(episode))
        except EpisodeOver:
            return episode.close("limit")
        except EngineError:
            raise
        except (Exception, SystemExit, DeadlineExceeded) as error:  # noqa: BLE001 - a user's function may raise anything; it is counted and named
            if isinstance(error, DeadlineExceeded) or (isinstance(error, TimeoutError) and clock.expired()):
                log.warning("agent.function took longer than %s s: %.200r", self.section.timeout_s, episode.prompt.text)
                return episode.close("timeout")
            return episode.close("failed", self._fail(episode, error))

    def _fail(self, episode: Episode, error: BaseException) -> str:
        self._failures += 1
        said = f"it raised {type(error).__name__}: {error}"
        if self._failures > self.section.max_failures:
            raise AgentError.failed(said, episode.prompt, self._failures, self.section.max_failures) from error
        log.warning("agent.function failed, the trajectory ends there: %s", said)
        return said


def _load(target: str, kwargs: Mapping[str, Any]) -> AgentFn:
    function = load_function(target, "agent.function")
    if not is_async(function):
        raise ConfigError("agent.function", f"{target} is not async", why="it awaits the model",
                          remedy="write async def; a slow tool runs beside it with await asyncio.to_thread(tool, …)")  # fmt: skip
    require_arguments(function, "agent.function", "episode", **kwargs)
    return cast("AgentFn", partial(function, **kwargs))


def _checked(value: object) -> Trajectory:
    if not isinstance(value, Trajectory):
        raise AgentError(f"it returned {type(value).__name__}", where="agent.function", why="a trajectory is needed",
                         remedy="return episode.end()")  # fmt: skip
    return value


async def _beat(held: Alarm | None) -> None:
    """Put the alarm off as long as the event loop turns."""
    while held is not None:
        held.restart()
        await asyncio.sleep(BEAT_S)


def _generator(
    rollout: Rollout, sampling: SamplingParams, names: Sequence[Any], places: int, held: Alarm | None
) -> Submitted | Batched:
    if isinstance(rollout, AsyncRollout):
        return Submitted(rollout, sampling, names)
    return Batched(
        rollout if held is None else cast("Rollout", _Unhurried(rollout, held)), replace(sampling, n=1), places
    )


class _Unhurried:
    """A rollout that holds the event loop for as long as it takes: the alarm is for the functions."""

    def __init__(self, rollout: Rollout, held: Alarm) -> None:
        self._rollout, self._held = rollout, held

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Completion]:
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

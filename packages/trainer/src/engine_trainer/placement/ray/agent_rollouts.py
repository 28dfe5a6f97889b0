"""Conversations in slices, so that weights may change after each slice.

A conversation continues with the new weights. The functions run on an event loop in a thread of its
own, so that their tools work while the model generates and while weights are synced. The model is
asked in slices as for plain completions (``partial_rollouts``).
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine_api.rollout import SamplingParams
from engine_trainer.agent import AgentError, AgentLoop, Trajectory
from engine_trainer.agent.generators import SlicedGenerator
from engine_trainer.data import Prompt
from engine_trainer.placement.replica import Replica, ScoredCompletion
from engine_trainer.utils.threads import event_loop

FAREWELL_S = 2.0
"""Seconds that functions have to end when they are cancelled."""


@dataclass(kw_only=True)
class _Group:
    """A prompt with its conversations so far.

    They are fewer than wanted until all have begun.
    """

    key: int
    prompt: Prompt
    conversations: list[Future[Trajectory]] = field(default_factory=list[Future[Trajectory]])


class AgentRollouts:
    """The conversations that one replica is running, at most ``agent.concurrency`` at a time.

    Args:
        sampling: parameters of whole conversations; its seed is not read.
        slice_tokens: maximum number of tokens per turn and call.
    """

    def __init__(
        self, replica: Replica, agent: AgentLoop, sampling: SamplingParams, slice_tokens: int
    ) -> None:
        self._replica = replica
        self._agent = agent
        self._sampling = sampling
        self._turns = SlicedGenerator(sampling, slice_tokens)
        self._groups: list[_Group] = []
        self._numbers = itertools.count()
        # Time by time.monotonic since when the loop has not responded.
        self._pinged_at: float | None = None
        loops: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=_serve, args=(loops,), name="converse", daemon=True)
        self._thread.start()
        self._loop = loops.result()

    def advance(
        self, new: Sequence[tuple[int, Prompt]], seed: int
    ) -> list[tuple[int, list[ScoredCompletion]]]:
        """Generate one slice of every requested turn, and return the complete groups by key.

        The groups are scored. It waits for no tool: without requests it returns soon, so that
        weights may be synced.

        Raises ``RolloutError``, ``RewardError``, ``AgentError``.
        """
        self._watch()
        self._groups += [_Group(key=key, prompt=prompt) for key, prompt in new]
        self._begin()
        with self._replica.timers.phase("generate"):
            self._turns.advance(self._replica.rollout, seed)
        ended = {id(group): self._ended(group) for group in self._groups}
        done = [group for group in self._groups if ended[id(group)]]
        self._groups = [group for group in self._groups if not ended[id(group)]]
        with self._replica.timers.phase("reward"):
            return [
                (
                    g.key,
                    self._replica.score_trajectories(
                        [(g.prompt, f.result()) for f in g.conversations]
                    ),
                )
                for g in done
            ]

    def close(self) -> None:
        """Cancel the running conversations (idempotent).

        A function that blocks the loop is not waited for.
        """
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(2 * FAREWELL_S)

    # --- inside ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Raise ``AgentError`` where a function blocks the event loop.

        No other call here would notice it.
        """
        limit = self._agent.section.timeout_s
        if self._pinged_at is None:
            self._pinged_at = time.monotonic()
            self._loop.call_soon_threadsafe(self._pong)
        elif limit is not None and time.monotonic() - self._pinged_at > limit:
            raise AgentError(
                f"a tool has blocked all conversations for longer than {limit:g} s",
                where="agent.function",
                why="it blocks the event loop instead of awaiting; agent.timeout_s bounds it",
                remedy="await asyncio.to_thread(tool, …)",
            )

    def _pong(self) -> None:
        self._pinged_at = None

    def _begin(self) -> None:
        """Start as many conversations as there are free slots, in the order of their groups."""
        free = self._agent.section.concurrency - sum(
            not f.done() for group in self._groups for f in group.conversations
        )
        for group in self._groups:
            for _ in range(min(free, self._sampling.n - len(group.conversations))):
                self._turns.enter()
                conversation = asyncio.run_coroutine_threadsafe(
                    self._converse(group.prompt), self._loop
                )
                # The callback runs once the result can be read.
                conversation.add_done_callback(lambda _: self._turns.leave())
                group.conversations.append(conversation)
                free -= 1

    async def _converse(self, prompt: Prompt) -> Trajectory:
        try:
            return await self._agent.converse(
                next(self._numbers), prompt, self._turns, self._sampling
            )
        except KeyboardInterrupt as error:
            # The function raised it itself: that of a signal is raised in the main thread.
            raise AgentError.failed(
                f"it raised {type(error).__name__}: {error}", prompt, 1, 0
            ) from error

    def _ended(self, group: _Group) -> bool:
        """Return whether all conversations of a group have ended.

        Raises the error of a failed one.
        """
        for future in group.conversations:
            if future.done():
                future.result()
        return len(group.conversations) == self._sampling.n and all(
            future.done() for future in group.conversations
        )


def _serve(made: Future[asyncio.AbstractEventLoop]) -> None:
    with event_loop(FAREWELL_S) as loop:
        made.set_result(loop)
        while True:
            try:
                return loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # A task that a function started raised it: the error reaches whoever awaits that
                # task, and other conversations continue.
                continue

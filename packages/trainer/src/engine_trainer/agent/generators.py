"""Generators that bring the turns of episodes to a rollout.

Each turn is submitted by itself where the rollout generates in the background, or many turns are
generated in one batch, or in slices.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from engine_api.errors import RolloutError
from engine_api.rollout import AsyncRollout, Completion, Rollout, SamplingParams
from engine_trainer.agent.episode import Request
from engine_trainer.utils.completions import require_completions
from engine_trainer.utils.experts import join_experts
from engine_trainer.utils.threads import DaemonThreads

if TYPE_CHECKING:
    import torch

TOGETHER_S = 0.02
"""Seconds to wait for conversations about to request a turn, to be in the same slice."""
PATIENCE_S = 0.1
"""Seconds to wait while all conversations wait for tools: no weights can be synced meanwhile."""
ABORTS = 100
"""Aborts in a row without a token, after which a rollout is taken as not serving."""


def derive(seed: int | None, *parts: Any) -> int | None:
    """Return a different seed for each combination of ``parts``.

    None stays None.
    """
    if seed is None:
        return None
    return int.from_bytes(hashlib.sha256(repr((seed, parts)).encode()).digest()[:8], "big") >> 1


def sampling_of(request: Request, sampling: SamplingParams, seed: int | None) -> SamplingParams:
    """Return one turn's sampling parameters."""
    stops = tuple(dict.fromkeys([*sampling.stop_token_ids, *request.stop_token_ids]))
    return replace(
        sampling, n=1, max_new_tokens=request.max_new_tokens, stop_token_ids=stops, seed=seed
    )


class SubmittingGenerator:
    """A generator that submits each turn by itself.

    A turn that a weight sync aborted is continued with the new weights. A turn's random numbers are
    a function of the seed, the episode's first prompt, the number of its sample, and the turn.

    Attributes:
        failed: the rollout's error. A function may catch it as if it were its tool's, therefore the
            runner looks here.
    """

    def __init__(
        self, rollout: AsyncRollout, sampling: SamplingParams, names: Sequence[Any]
    ) -> None:
        self._rollout = rollout
        self._sampling = sampling
        self._names = names
        self._threads = DaemonThreads()  # one thread waits for each turn
        self.failed: Exception | None = None

    async def generate(self, request: Request) -> Completion:
        """See ``Generator``."""
        parts: list[Completion] = []
        empty = 0
        while True:
            done = sum(len(p.tokens) for p in parts)
            left = replace(
                request,
                tokens=[*request.tokens, *(t for p in parts for t in p.tokens)],
                max_new_tokens=request.max_new_tokens - done,
            )
            parts.append(await self._once(left, len(parts)))
            empty = 0 if parts[-1].tokens else empty + 1
            if (
                parts[-1].finish_reason != "abort"
                or done + len(parts[-1].tokens) >= request.max_new_tokens
            ):
                return _joined(parts)
            if empty >= ABORTS:
                raise RolloutError(
                    f"a turn was aborted {ABORTS} times without a token",
                    where="agent",
                    remedy="see the rollout's log",
                )

    def leave(self) -> None:
        """Do nothing when a trajectory has ended, because no other one waits for it."""

    async def _once(self, request: Request, part: int) -> Completion:
        seed = derive(self._sampling.seed, self._names[request.number], request.turn, part)
        try:
            generation = self._rollout.submit(
                request.tokens, sampling_of(request, self._sampling, seed)
            )
            try:
                (completion,) = await asyncio.get_running_loop().run_in_executor(
                    self._threads, generation.result
                )
            except asyncio.CancelledError:
                # The abort lets the waiting thread return.
                generation.abort()
                raise
        except Exception as error:
            # The function may catch the error, but the run must end with it.
            self.failed = self.failed or error
            raise
        return completion


@dataclass(frozen=True, kw_only=True)
class _Waiting:
    request: Request
    result: asyncio.Future[Completion]


class BatchingGenerator:
    """A generator that runs a batch when every running trajectory waits for a turn.

    No order of events decides which turns a batch has, so a run repeats exactly where the functions
    do. A batch's random numbers come from the seed and its number.

    Args:
        rollout: generates while everything else waits.
        sampling: parameters of all turns.
        running: number of concurrent trajectories; each slot ends with ``leave``.

    Attributes:
        failed: see ``SubmittingGenerator``.
    """

    def __init__(self, rollout: Rollout, sampling: SamplingParams, running: int) -> None:
        self._rollout = rollout
        self._sampling = sampling
        self._running = running
        self._waiting: list[_Waiting] = []
        self._batches = 0
        self.failed: Exception | None = None

    async def generate(self, request: Request) -> Completion:
        """See ``Generator``."""
        mine = _Waiting(request=request, result=asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        self._generate_when_all_wait()
        try:
            return await mine.result
        finally:
            # It still waits only if it was cancelled.
            if mine in self._waiting:
                self._waiting.remove(mine)

    def leave(self) -> None:
        """Give up the slot of a trajectory."""
        self._running -= 1
        self._generate_when_all_wait()

    def _generate_when_all_wait(self) -> None:
        if not self._waiting or len(self._waiting) < self._running:
            return
        batch = sorted(self._waiting, key=lambda w: w.request.number)
        self._waiting = []
        # A cancelled trajectory that has not run since is still among the waiting ones.
        batch = [waiting for waiting in batch if not waiting.result.done()]

        def seed(kind: int) -> int | None:
            return derive(self._sampling.seed, self._batches + kind)

        try:
            completions = generate_all(
                self._rollout, [w.request for w in batch], self._sampling, seed
            )
        except Exception as error:  # noqa: BLE001 - raised in all waiting trajectories
            self.failed = self.failed or error
            for waiting in batch:
                waiting.result.set_exception(error)
            return
        self._batches += len({_kind(w.request) for w in batch})
        for waiting, completion in zip(batch, completions, strict=True):
            waiting.result.set_result(completion)


@dataclass(kw_only=True, eq=False)
class _Turn:
    """A waiting turn.

    ``parts`` holds its slices so far.
    """

    request: Request
    result: Future[Completion] = field(default_factory=Future[Completion])
    parts: list[Completion] = field(default_factory=list[Completion])
    empty: int = 0
    """Number of slices in a row without a token."""

    def left(self, slice_tokens: int) -> Request:
        """Return the request for the next slice, whose prompt includes the tokens so far."""
        done = [token for part in self.parts for token in part.tokens]
        most = min(slice_tokens, self.request.max_new_tokens - len(done))
        return replace(self.request, tokens=[*self.request.tokens, *done], max_new_tokens=most)

    def add(self, part: Completion) -> None:
        """Add the completion of a slice.

        Raises ``RolloutError`` after too many slices without a token.
        """
        self.parts.append(part)
        self.empty = 0 if part.tokens or self.complete else self.empty + 1
        if self.empty >= ABORTS:
            raise empty_slices_error(self.empty)

    @property
    def complete(self) -> bool:
        """True if the turn stopped or has all of its tokens."""
        full = sum(len(part.tokens) for part in self.parts) >= self.request.max_new_tokens
        return full or self.parts[-1].finish_reason == "stop"


class SlicedGenerator:
    """A generator whose turns are generated a slice at a time, in ``advance``.

    It is called in a different thread than the episodes'; between slices weights may change. A turn
    that was begun continues in the next slice with the weights then. Meanwhile a conversation's
    other work goes on, above all its tools.

    Args:
        sampling: parameters of all turns; its seed is not read.
        slice_tokens: maximum number of tokens per turn and call.
    """

    def __init__(self, sampling: SamplingParams, slice_tokens: int) -> None:
        self._sampling = sampling
        self._slice = slice_tokens
        self._waiting: list[_Turn] = []
        self._busy = 0  # running trajectories that do not wait for the model
        self._changed = threading.Condition()

    async def generate(self, request: Request) -> Completion:
        """Return one turn, between ``enter`` and ``leave`` (see ``Generator``)."""
        turn = _Turn(request=request)
        with self._changed:
            self._waiting.append(turn)
            self._busy -= 1
            self._changed.notify_all()
        try:
            return await asyncio.wrap_future(turn.result)
        finally:
            # Has an effect where the turn was cancelled.
            self._forget(turn)

    def enter(self) -> None:
        """Register a trajectory before its function begins, in any thread."""
        with self._changed:
            self._busy += 1

    def leave(self) -> None:
        """Remove a trajectory that has ended."""
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()

    def advance(self, rollout: Rollout, seed: int) -> None:
        """Generate one slice of every requested turn.

        Generates nothing where all conversations wait for tools. Raises ``RolloutError``.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._busy == 0, TOGETHER_S)
            self._changed.wait_for(lambda: bool(self._waiting) or self._busy == 0, PATIENCE_S)
            turns = sorted(self._waiting, key=lambda turn: turn.request.number)
        asked = [turn.left(self._slice) for turn in turns]
        for turn, part in zip(
            turns,
            generate_all(rollout, asked, self._sampling, lambda kind: derive(seed, kind)),
            strict=True,
        ):
            turn.add(part)
            if turn.complete and self._forget(turn) and turn.result.set_running_or_notify_cancel():
                turn.result.set_result(_joined(turn.parts))

    def _forget(self, turn: _Turn) -> bool:
        """Remove a turn and return whether it was still waited for."""
        with self._changed:
            if turn not in self._waiting:
                return False
            self._waiting.remove(turn)
            self._busy += 1
            return True


def generate_all(
    rollout: Rollout,
    requests: Sequence[Request],
    sampling: SamplingParams,
    seed: Callable[[int], int | None],
) -> list[Completion]:
    """Return one completion for each request, in order.

    Requests with equal limits and stops are in one batch. Raises ``RolloutError``.

    Args:
        seed: returns the seed of the ``kind``-th batch, from 1.
    """
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for index, request in enumerate(requests):
        kinds.setdefault(_kind(request), []).append(index)
    found: dict[int, Completion] = {}
    for number, indices in enumerate(kinds.values(), start=1):
        same = [requests[index] for index in indices]
        completions = rollout.generate(
            [r.tokens for r in same], sampling_of(same[0], sampling, seed(number))
        )
        require_completions(completions, range(len(same)), 1)
        found |= {indices[completion.prompt_index]: completion for completion in completions}
    return [found[index] for index in range(len(requests))]


def empty_slices_error(slices: int) -> RolloutError:
    """Return the error of a rollout that would be called for ever."""
    return RolloutError(
        f"{slices} slices without a token, and no end",
        where="overlap.mode: full",
        why="the rollout neither stops nor continues",
        remedy="see the rollout's log, and check that its context is long enough",
    )


def _kind(request: Request) -> tuple[Any, ...]:
    return request.max_new_tokens, request.stop_token_ids


def _joined(parts: Sequence[Completion]) -> Completion:
    if len(parts) == 1:
        return parts[0]
    experts: torch.Tensor | None = None
    for part in parts:
        experts = join_experts(experts, part.routed_experts)
    return Completion(
        prompt_index=0,
        tokens=[t for p in parts for t in p.tokens],
        log_probs=[v for p in parts for v in p.log_probs],
        weight_versions=[v for p in parts for v in p.weight_versions],
        finish_reason=parts[-1].finish_reason,
        routed_experts=experts,
        passes=sum(p.passes for p in parts),
    )

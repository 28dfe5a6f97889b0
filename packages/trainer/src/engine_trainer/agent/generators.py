"""How episodes reach a rollout: each turn by itself where it generates in the background, many turns in one batch, or in slices."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from engine_api.errors import RolloutError
from engine_api.rollout import AsyncRollout, Completion, Rollout, SamplingParams
from engine_trainer.agent.episode import Request
from engine_trainer.utils.threads import DaemonThreads

TOGETHER_S = 0.02  # for conversations that are about to ask for a turn, to be in the same slice
PATIENCE_S = 0.1  # while all of them wait for tools: no weights can come meanwhile
ABORTS = 100  # in a row without a token: a rollout that only ever aborts is not serving


def derive(seed: int | None, *parts: Any) -> int | None:
    """Another seed for each combination of ``parts``; None stays None."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.sha256(repr((seed, parts)).encode()).digest()[:8], "big") >> 1


def sampling_of(request: Request, sampling: SamplingParams, seed: int | None) -> SamplingParams:
    """One turn's parameters."""
    stops = tuple(dict.fromkeys([*sampling.stop_token_ids, *request.stop_token_ids]))
    return replace(
        sampling, n=1, max_new_tokens=request.max_new_tokens, stop_token_ids=stops, seed=seed
    )


class Submitted:
    """Each turn is submitted by itself. A turn that a weight sync aborted is continued with the new weights.

    A turn's random numbers are a function of the seed, the episode's first prompt, which of its samples it is, and the turn.

    Attributes:
        failed: what the rollout raised. A function may catch it as if it were its tool's: whoever runs functions looks here.
    """

    def __init__(
        self, rollout: AsyncRollout, sampling: SamplingParams, names: Sequence[Any]
    ) -> None:
        self._rollout, self._sampling, self._names = rollout, sampling, names
        self._threads = DaemonThreads()  # one waits for each turn
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
        """A trajectory's place is empty; nobody waits for it."""

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
                generation.abort()  # its thread returns
                raise
        except Exception as error:  # the function may catch any: the run ends of it all the same
            self.failed = self.failed or error
            raise
        return completion


@dataclass(frozen=True, kw_only=True)
class _Waiting:
    request: Request
    answer: asyncio.Future[Completion]


class Batched:
    """A batch is generated when every trajectory that runs waits for one: no order of events decides what is in it.

    So a run repeats exactly where the functions do. A batch's random numbers come from the seed and its number.

    Args:
        rollout: generates while everything else waits.
        sampling: of all turns.
        running: trajectories at the same time; each place ends with ``leave``.

    Attributes:
        failed: see ``Submitted``.
    """

    def __init__(self, rollout: Rollout, sampling: SamplingParams, running: int) -> None:
        self._rollout, self._sampling, self._running = rollout, sampling, running
        self._waiting: list[_Waiting] = []
        self._batches = 0
        self.failed: Exception | None = None

    async def generate(self, request: Request) -> Completion:
        """See ``Generator``."""
        mine = _Waiting(request=request, answer=asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        self._generate_when_all_wait()
        try:
            return await mine.answer
        finally:
            if mine in self._waiting:  # it was cancelled
                self._waiting.remove(mine)

    def leave(self) -> None:
        """A trajectory's place is empty and stays so."""
        self._running -= 1
        self._generate_when_all_wait()

    def _generate_when_all_wait(self) -> None:
        if not self._waiting or len(self._waiting) < self._running:
            return
        batch, self._waiting = sorted(self._waiting, key=lambda w: w.request.number), []
        batch = [
            one for one in batch if not one.answer.done()
        ]  # one was cancelled, and has not run since

        def seed(kind: int) -> int | None:
            return derive(self._sampling.seed, self._batches + kind)

        try:
            completions = generate_all(
                self._rollout, [w.request for w in batch], self._sampling, seed
            )
        except Exception as error:  # noqa: BLE001 - raised in all that wait, not in the one that came last alone
            self.failed = self.failed or error
            for one in batch:
                one.answer.set_exception(error)
            return
        self._batches += len({_kind(w.request) for w in batch})
        for one, completion in zip(batch, completions, strict=True):
            one.answer.set_result(completion)


@dataclass(kw_only=True, eq=False)
class _Turn:
    """One that waits; ``said`` is what it has so far."""

    request: Request
    answer: Future[Completion] = field(default_factory=Future[Completion])
    said: list[Completion] = field(default_factory=list[Completion])
    empty: int = 0  # slices in a row without a token

    def left(self, slice_tokens: int) -> Request:
        """The next slice, of what was said so far as the prompt."""
        done = [token for part in self.said for token in part.tokens]
        most = min(slice_tokens, self.request.max_new_tokens - len(done))
        return replace(self.request, tokens=[*self.request.tokens, *done], max_new_tokens=most)

    def add(self, said: Completion) -> None:
        """What the next slice gave. Raises ``RolloutError`` after too many that gave nothing."""
        self.said.append(said)
        self.empty = 0 if said.tokens or self.complete else self.empty + 1
        if self.empty >= ABORTS:
            raise nothing_said(self.empty)

    @property
    def complete(self) -> bool:
        """Whether nothing is to follow: it stopped, or has all of its tokens."""
        full = sum(len(part.tokens) for part in self.said) >= self.request.max_new_tokens
        return full or self.said[-1].finish_reason == "stop"


class Sliced:
    """Turns are generated a slice at a time, in ``advance``, in another thread than the episodes': in between weights may change.

    A turn that was begun goes on in the next slice, whatever the weights are then. What a conversation does beside asking,
    its tools above all, goes on meanwhile.

    Args:
        sampling: of all turns; its seed is not read.
        slice_tokens: at most so many tokens a turn and call.
    """

    def __init__(self, sampling: SamplingParams, slice_tokens: int) -> None:
        self._sampling, self._slice = sampling, slice_tokens
        self._waiting: list[_Turn] = []
        self._busy = 0  # trajectories that run and do not wait for the model
        self._changed = threading.Condition()

    async def generate(self, request: Request) -> Completion:
        """See ``Generator``; within ``enter`` and ``leave``."""
        turn = _Turn(request=request)
        with self._changed:
            self._waiting.append(turn)
            self._busy -= 1
            self._changed.notify_all()
        try:
            return await asyncio.wrap_future(turn.answer)
        finally:
            self._forget(turn)  # where it was cancelled

    def enter(self) -> None:
        """A trajectory begins; before its function does, in any thread."""
        with self._changed:
            self._busy += 1

    def leave(self) -> None:
        """It has ended."""
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()

    def advance(self, rollout: Rollout, seed: int) -> None:
        """One slice of every turn that is asked for; of none where all conversations wait for tools. Raises ``RolloutError``."""
        with self._changed:
            self._changed.wait_for(lambda: self._busy == 0, TOGETHER_S)
            self._changed.wait_for(lambda: bool(self._waiting) or self._busy == 0, PATIENCE_S)
            turns = sorted(self._waiting, key=lambda turn: turn.request.number)
        asked = [turn.left(self._slice) for turn in turns]
        for turn, said in zip(
            turns,
            generate_all(rollout, asked, self._sampling, lambda kind: derive(seed, kind)),
            strict=True,
        ):
            turn.add(said)
            if turn.complete and self._forget(turn) and turn.answer.set_running_or_notify_cancel():
                turn.answer.set_result(_joined(turn.said))

    def _forget(self, turn: _Turn) -> bool:
        """Whether it was still waited for."""
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
    """One completion for each request, in order; those with equal limits and stops in one batch. Raises ``RolloutError``.

    Args:
        seed: of the ``kind``-th batch, from 1.
    """
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for place, request in enumerate(requests):
        kinds.setdefault(_kind(request), []).append(place)
    found: dict[int, Completion] = {}
    for number, places in enumerate(kinds.values(), start=1):
        same = [requests[place] for place in places]
        completions = rollout.generate(
            [r.tokens for r in same], sampling_of(same[0], sampling, seed(number))
        )
        found |= {places[completion.prompt_index]: completion for completion in completions}
    return [found[place] for place in range(len(requests))]


def nothing_said(slices: int) -> RolloutError:
    """The error of a rollout that would be asked for ever."""
    return RolloutError(
        f"{slices} slices without a token, and no end",
        where="overlap.mode: full",
        why="the rollout neither stops nor goes on",
        remedy="see the rollout's log; is its context long enough?",
    )


def _kind(request: Request) -> tuple[Any, ...]:
    return request.max_new_tokens, request.stop_token_ids


def _joined(parts: Sequence[Completion]) -> Completion:
    if len(parts) == 1:
        return parts[0]
    return Completion(
        prompt_index=0,
        tokens=[t for p in parts for t in p.tokens],
        log_probs=[v for p in parts for v in p.log_probs],
        weight_versions=[v for p in parts for v in p.weight_versions],
        finish_reason=parts[-1].finish_reason,
    )

"""How episodes reach a rollout: each turn by itself where it generates in the background, else many turns in one batch."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine_api.errors import RolloutError
from engine_api.rollout import AsyncRollout, Completion, Rollout, SamplingParams
from engine_trainer.agent.episode import Request
from engine_trainer.threads import DaemonThreads

ABORTS = 100  # in a row without a token: a rollout that only ever aborts is not serving


def derive(seed: int | None, *parts: Any) -> int | None:
    """Another seed for each combination of ``parts``; None stays None."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.sha256(repr((seed, parts)).encode()).digest()[:8], "big") >> 1


def sampling_of(request: Request, sampling: SamplingParams, seed: int | None) -> SamplingParams:
    """One turn's parameters."""
    stops = tuple(dict.fromkeys([*sampling.stop_token_ids, *request.stop_token_ids]))
    return replace(sampling, n=1, max_new_tokens=request.max_new_tokens, stop_token_ids=stops, seed=seed)


class Submitted:
    """Each turn is submitted by itself. A turn that a weight sync aborted is continued with the new weights.

    A turn's random numbers are a function of the seed, the episode's first prompt, which of its samples it is, and the turn.
    """

    def __init__(self, rollout: AsyncRollout, sampling: SamplingParams, names: Sequence[Any]) -> None:
        self._rollout, self._sampling, self._names = rollout, sampling, names
        self._threads = DaemonThreads()  # one waits for each turn

    async def generate(self, request: Request) -> Completion:
        """See ``Generator``."""
        parts: list[Completion] = []
        empty = 0
        while True:
            done = sum(len(p.tokens) for p in parts)
            left = replace(request, tokens=[*request.tokens, *(t for p in parts for t in p.tokens)],
                           max_new_tokens=request.max_new_tokens - done)  # fmt: skip
            parts.append(await self._once(left, len(parts)))
            empty = 0 if parts[-1].tokens else empty + 1
            if parts[-1].finish_reason != "abort" or done + len(parts[-1].tokens) >= request.max_new_tokens:
                return _joined(parts)
            if empty >= ABORTS:
                raise RolloutError(
                    f"a turn was aborted {ABORTS} times without a token", where="agent", remedy="see the rollout's log"
                )

    def leave(self) -> None:
        """A trajectory's place is empty; nobody waits for it."""

    async def _once(self, request: Request, part: int) -> Completion:
        seed = derive(self._sampling.seed, self._names[request.number], request.turn, part)
        generation = self._rollout.submit(request.tokens, sampling_of(request, self._sampling, seed))
        try:
            (completion,) = await asyncio.get_running_loop().run_in_executor(self._threads, generation.result)
        except asyncio.CancelledError:
            generation.abort()  # its thread returns
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
    """

    def __init__(self, rollout: Rollout, sampling: SamplingParams, running: int) -> None:
        self._rollout, self._sampling, self._running = rollout, sampling, running
        self._waiting: list[_Waiting] = []
        self._batches = 0

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
        kinds: dict[tuple[Any, ...], list[_Waiting]] = {}
        for one in batch:
            kinds.setdefault((one.request.max_new_tokens, one.request.stop_token_ids), []).append(one)
        for same in kinds.values():
            self._batches += 1
            sampling = sampling_of(same[0].request, self._sampling, derive(self._sampling.seed, self._batches))
            completions = self._rollout.generate([w.request.tokens for w in same], sampling)
            for completion in completions:
                same[completion.prompt_index].answer.set_result(completion)


def _joined(parts: Sequence[Completion]) -> Completion:
    if len(parts) == 1:
        return parts[0]
    return Completion(
        prompt_index=0, tokens=[t for p in parts for t in p.tokens], log_probs=[v for p in parts for v in p.log_probs],
        weight_versions=[v for p in parts for v in p.weight_versions], finish_reason=parts[-1].finish_reason,
    )  # fmt: skip

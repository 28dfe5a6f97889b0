"""Completions of one prompt that SGLang generates in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from engine_api.errors import EngineError, RolloutError
from engine_api.rollout import Completion
from rollout_fp8.failures import describe_error
from rollout_fp8.sglang import private
from rollout_fp8.sglang.host import Host

WHERE = "rollout 'sglang'"
# Seconds between attempts to abort: SGLang overlooks a request that it is about to take.
AGAIN_S = 0.02


class SglangGeneration:
    """Generation by SGLang.

    See ``engine_api.rollout.Generation``.

    Args:
        host: SGLang's engine.
        answers: future of the answers of ``Engine.async_generate``, one for each completion.
        rids: the requests' ids.
        read: returns the completions of the answers.
    """

    def __init__(
        self,
        host: Host,
        answers: Future[list[Mapping[str, Any]]],
        rids: Sequence[str],
        read: Callable[[list[Mapping[str, Any]]], list[Completion]],
    ) -> None:
        self._host = host
        self._answers = answers
        self._rids = rids
        self._read = read

    def done(self) -> bool:
        """Return whether ``result`` would return at once."""
        return self._answers.done()

    def result(self, timeout_s: float | None = None) -> list[Completion]:
        """Wait for the completions, and return them.

        Raises:
            RolloutError: SGLang failed or refused the request.
            TimeoutError: there is no result after ``timeout_s``.
        """
        return self._read(answers_of(self._answers, timeout_s))

    def abort(self) -> None:
        """Stop generating.

        ``result`` then returns the tokens so far.

        After the end it does nothing.
        """
        if not self._host.problem:
            self._host.spawn(self._abort)

    async def _abort(self) -> None:
        while True:
            for rid in self._rids:
                private.abort(self._host.engine, rid)
            if self.done():
                return
            await asyncio.sleep(AGAIN_S)


def answers_of(
    future: Future[list[Mapping[str, Any]]], timeout_s: float | None = None
) -> list[Mapping[str, Any]]:
    """Return a request's answers.

    SGLang's errors become a ``RolloutError``.
    """
    try:
        return future.result(timeout_s)
    except EngineError:
        raise
    except (Exception, CancelledError) as error:
        if isinstance(error, FutureTimeout) and not future.done():
            raise
        raise RolloutError(
            "SGLang did not respond",
            where=WHERE,
            why=describe_error(error),
            remedy="see its own messages for details; lower batch_size if memory ran out",
        ) from error

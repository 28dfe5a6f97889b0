"""Completions of one prompt that SGLang makes in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from engine_api.errors import EngineError, RolloutError
from engine_api.rollout import Completion
from rollout_fp8.sglang import private
from rollout_fp8.sglang.host import Host

WHERE = "rollout 'sglang'"
AGAIN_S = 0.02  # between attempts to abort: SGLang overlooks a request that it is about to take


class SglangGeneration:
    """See ``engine_api.rollout.Generation``.

    Args:
        host: SGLang's engine.
        answers: what ``Engine.async_generate`` gives, one answer a completion.
        rids: the requests' ids.
        read: makes completions of the answers.
    """

    def __init__(
        self,
        host: Host,
        answers: Future[list[Mapping[str, Any]]],
        rids: Sequence[str],
        read: Callable[[list[Mapping[str, Any]]], list[Completion]],
    ) -> None:
        self._host, self._answers, self._rids, self._read = host, answers, rids, read

    def done(self) -> bool:
        """Whether ``result`` would return at once."""
        return self._answers.done()

    def result(self, timeout_s: float | None = None) -> list[Completion]:
        """Wait. Raises ``RolloutError`` when SGLang failed or refused, ``TimeoutError`` after ``timeout_s``."""
        return self._read(answers_of(self._answers, timeout_s))

    def abort(self) -> None:
        """Stop here; ``result`` gives what there is. It does nothing after the end."""
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
    """What a request came to; SGLang's errors become a ``RolloutError``."""
    try:
        return future.result(timeout_s)
    except EngineError:
        raise
    except (Exception, CancelledError) as error:
        if isinstance(error, FutureTimeout) and not future.done():
            raise
        raise RolloutError(
            "SGLang did not answer",
            where=WHERE,
            why=f"{type(error).__name__}: {error}",
            remedy="its own messages say more; lower batch_size if memory ran out",
        ) from error

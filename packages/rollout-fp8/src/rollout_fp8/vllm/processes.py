"""The processes of an engine that does not live in this one: all of them are needed, and vLLM's calls do not notice their end.

A call that is under way waits for an answer for ever, and so does a step (vLLM 0.32.0); with several workers, vLLM's own process may
go on without one for half a minute. So they are watched here.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar

from engine_api.errors import EngineError, RolloutError

WHERE = "rollout 'vllm'"
POLL_S = 0.2
GRACE_S = 1.0  # for the end of a process to be seen, once something else has told of it
T = TypeVar("T")


class Processes:
    """Watches them. When one ends by itself, the others are killed.

    Args:
        numbers: their process ids.
        ended: is then called with which one it was, on a thread of its own.
    """

    def __init__(self, numbers: Collection[int], ended: Callable[[str], None]) -> None:
        self.problem = ""  # which one has ended
        self._ended = ended
        try:
            self._handles = {os.pidfd_open(number): number for number in numbers}
        except OSError as error:
            raise RolloutError("vLLM's processes cannot be watched", where=WHERE, why=f"pidfd_open: {error}",
                               remedy="a kernel of 5.3 or newer, in a container that lets it through, or rollout.options.executor=in_process") from error  # fmt: skip
        self._told, tell = os.pipe()
        self._tell: int | None = tell  # closing it ends the thread
        self._thread = threading.Thread(target=self._watch, name="vllm-processes", daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """What it returns or raises. Raises ``RolloutError`` when a process is gone."""
        called: Future[T] = Future()
        # A daemon, that nobody joins: vLLM may leave it waiting.
        threading.Thread(target=_settle, args=(called, function, args, kwargs), daemon=True).start()
        while not wait([called], POLL_S).done:
            if self.problem:
                raise self._gone()
        try:
            return called.result()
        except EngineError:
            raise
        except (
            Exception
        ) as error:  # vLLM raises what its workers did, without their types, and anything once they are gone
            self.explain(error)
            raise RolloutError("a call of vLLM failed", where=WHERE, why=f"{type(error).__name__}: {error}",
                               remedy="its own messages say more") from error  # fmt: skip

    def explain(self, error: Exception) -> None:
        """Raises ``RolloutError`` from ``error`` where a process has ended: what it had open is closed a moment before that is known."""
        self._thread.join(GRACE_S)
        if self.problem:
            raise self._gone() from error

    def close(self) -> None:
        """They may end from here on; idempotent."""
        if self._tell is not None:
            os.close(self._tell)
            self._tell = None
        self._thread.join()

    def _gone(self) -> RolloutError:
        return RolloutError("vLLM has ended", where=WHERE, why=self.problem,
                            remedy="see its messages for the reason (out of memory?); close this rollout and create another one")  # fmt: skip

    def _watch(self) -> None:
        waiting = select.poll()
        for handle in (self._told, *self._handles):
            waiting.register(handle, select.POLLIN)
        ready = [handle for handle, _ in waiting.poll()]
        if self._told not in ready:
            self.problem = f"its process {self._handles[ready[0]]} has ended"
            for handle in self._handles:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            self._ended(self.problem)
        for handle in (self._told, *self._handles):
            os.close(handle)


class Watched:
    """The engine in them: its calls end when they do."""

    def __init__(self, engine: Any, processes: Processes) -> None:
        self._engine, self._processes = engine, processes

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._engine, name)
        return lambda *args, **kwargs: self._processes.call(method, *args, **kwargs)


def processes_of(engine: Any, ended: Callable[[str], None]) -> Processes:
    """Of an engine whose workers have our extension; arguments as of ``Processes``."""
    told = engine.collective_rpc("rollout_fp8_processes")
    return Processes({number for numbers in told for number in numbers} - {os.getpid()}, ended)


def _settle(future: Future[T], function: Callable[..., T], args: Any, kwargs: Any) -> None:
    try:
        future.set_result(function(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets it
        future.set_exception(error)

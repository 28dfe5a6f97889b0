"""Watch on the processes of an engine that does not live in this process.

The engine needs all of them, and vLLM's calls do not notice their end: a call that is under way
waits for an answer for ever, and so does a step (vLLM 0.32.0). With several workers, vLLM's own
process may continue without one of them for half a minute. So they are watched here.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar

from engine_api.errors import EngineError, RolloutError
from rollout_fp8.failures import describe_error

log = logging.getLogger("rollout_fp8")

WHERE = "rollout 'vllm'"
POLL_S = 0.2
# Seconds for the end of a process to be seen, once another error indicates it.
GRACE_S = 1.0
T = TypeVar("T")
_HAS_ENDED = "its process {} has ended"


class Processes:
    """Watcher of processes.

    When one ends by itself, the others are killed. Where they cannot be watched, a warning says so,
    and calls are made unwatched.

    Args:
        numbers: their process ids.
        ended: called with the message that names the ended process, on a thread of its own.

    Raises:
        RolloutError: one of them is gone already.
    """

    def __init__(self, numbers: Collection[int], ended: Callable[[str], None]) -> None:
        # Message that names the ended process.
        self.problem = ""
        self._ended = ended
        self._handles = _handles_of(numbers)
        self._stop_read, stop_write = os.pipe()
        # Closing it ends the thread.
        self._stop_write: int | None = stop_write
        self._thread = threading.Thread(target=self._watch, name="vllm-processes", daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function, and return its result.

        Raises ``RolloutError`` when a process is gone.
        """
        called: Future[T] = Future()
        # A daemon thread that is never joined: vLLM may leave it waiting.
        threading.Thread(target=_settle, args=(called, function, args, kwargs), daemon=True).start()
        while not wait([called], POLL_S).done:
            if self.problem:
                raise _ended_error(self.problem)
        try:
            return called.result()
        except EngineError:
            raise
        except Exception as error:
            # vLLM raises its workers' errors without their types, and any error once the workers
            # are gone.
            self.explain(error)
            raise RolloutError(
                "a call of vLLM failed",
                where=WHERE,
                why=describe_error(error),
                remedy="see its own messages for details",
            ) from error

    def explain(self, error: Exception) -> None:
        """Raise ``RolloutError`` from ``error`` where a process has ended.

        Its connections are closed a moment before its end is known.
        """
        self._thread.join(GRACE_S)
        if self.problem:
            raise _ended_error(self.problem) from error

    def close(self) -> None:
        """Stop watching: the processes may end from here on (idempotent)."""
        if self._stop_write is not None:
            os.close(self._stop_write)
            self._stop_write = None
        self._thread.join()

    def _watch(self) -> None:
        waiting = select.poll()
        for handle in (self._stop_read, *self._handles):
            waiting.register(handle, select.POLLIN)
        ready = [handle for handle, _ in waiting.poll()]
        if self._stop_read not in ready:
            self.problem = _HAS_ENDED.format(self._handles[ready[0]])
            for handle in self._handles:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            self._ended(self.problem)
        for handle in (self._stop_read, *self._handles):
            os.close(handle)


class WatchedEngine:
    """Engine in watched processes: its calls end when they do."""

    def __init__(self, engine: Any, processes: Processes) -> None:
        self._engine = engine
        self._processes = processes

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._engine, name)
        return lambda *args, **kwargs: self._processes.call(method, *args, **kwargs)


def processes_of(engine: Any, ended: Callable[[str], None]) -> Processes:
    """Return the watcher of an engine whose workers have our extension (see ``Processes``)."""
    found = engine.collective_rpc("rollout_fp8_processes")
    numbers = {number for pair in found for number in pair}
    return Processes(numbers - {os.getpid()}, ended)


def _handles_of(numbers: Collection[int]) -> dict[int, int]:
    """Return each process's number by its handle.

    There are none, and a warning, where handles are not available.
    """
    handles: dict[int, int] = {}
    try:
        for number in numbers:
            handle = os.pidfd_open(number)
            handles[handle] = number
            # Sends nothing, and fails where no signal could be sent.
            signal.pidfd_send_signal(handle, 0)
    except (AttributeError, OSError) as error:
        # A Python that was built without them, or a kernel or container that refuses them.
        for handle in handles:
            os.close(handle)
        if isinstance(error, ProcessLookupError):
            raise _ended_error(_HAS_ENDED.format(number)) from error
        log.warning(
            "%s: a process of vLLM that is killed will be noticed late, and a call that waits "
            "for it may wait for ever, because processes cannot be watched here (%s). Watching "
            "needs Linux 5.3 or newer, a container that allows pidfd_open, and a Python that "
            "was built with os.pidfd_open (conda's is not)",
            WHERE,
            error,
        )
        return {}
    return handles


def _ended_error(why: str) -> RolloutError:
    return RolloutError(
        "vLLM has ended",
        where=WHERE,
        why=why,
        remedy="see its messages for the reason (out of memory?); "
        "close this rollout and create another one",
    )


def _settle(future: Future[T], function: Callable[..., T], args: Any, kwargs: Any) -> None:
    try:
        future.set_result(function(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - the caller that waits for the future gets it
        future.set_exception(error)

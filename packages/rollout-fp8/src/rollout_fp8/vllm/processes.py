"""The processes of an engine that does not live in this one: all of them are needed, and vLLM's calls do not notice their end.

A call that is under way waits for an answer for ever, and so does a step (vLLM 0.32.0); with
several workers, vLLM's own process may go on without one for half a minute. So they are watched
here.
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

log = logging.getLogger("rollout_fp8")

WHERE = "rollout 'vllm'"
POLL_S = 0.2
GRACE_S = 1.0  # for the end of a process to be seen, once something else has told of it
T = TypeVar("T")
_HAS_ENDED = "its process {} has ended"


class Processes:
    """Watches them. When one ends by itself, the others are killed. Where it cannot watch, it says so, and calls alone are made.

    Args:
        numbers: their process ids.
        ended: is then called with which one it was, on a thread of its own.

    Raises ``RolloutError`` when one of them is gone already.
    """

    def __init__(self, numbers: Collection[int], ended: Callable[[str], None]) -> None:
        self.problem = ""  # which one has ended
        self._ended = ended
        self._handles = _handles_of(numbers)
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
                raise _gone(self.problem)
        try:
            return called.result()
        except EngineError:
            raise
        except Exception as error:  # vLLM raises what its workers did, without their types, and anything once they are gone
            self.explain(error)
            raise RolloutError(
                "a call of vLLM failed",
                where=WHERE,
                why=f"{type(error).__name__}: {error}",
                remedy="its own messages say more",
            ) from error

    def explain(self, error: Exception) -> None:
        """Raises ``RolloutError`` from ``error`` where a process has ended: what it had open is closed a moment before that is known."""
        self._thread.join(GRACE_S)
        if self.problem:
            raise _gone(self.problem) from error

    def close(self) -> None:
        """They may end from here on; idempotent."""
        if self._tell is not None:
            os.close(self._tell)
            self._tell = None
        self._thread.join()

    def _watch(self) -> None:
        waiting = select.poll()
        for handle in (self._told, *self._handles):
            waiting.register(handle, select.POLLIN)
        ready = [handle for handle, _ in waiting.poll()]
        if self._told not in ready:
            self.problem = _HAS_ENDED.format(self._handles[ready[0]])
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


def _handles_of(numbers: Collection[int]) -> dict[int, int]:
    """Each process's number by a handle of it; none, and a warning, where there are no such handles."""
    handles: dict[int, int] = {}
    try:
        for number in numbers:
            handle = os.pidfd_open(number)
            handles[handle] = number
            signal.pidfd_send_signal(handle, 0)  # sends nothing: whether it can be sent one
    except (
        AttributeError,
        OSError,
    ) as error:  # a Python that was built without them; a kernel or container
        for handle in handles:
            os.close(handle)
        if isinstance(error, ProcessLookupError):
            raise _gone(_HAS_ENDED.format(number)) from error
        log.warning(
            "%s: a process of vLLM that is killed will be noticed late: a call that waits for it may wait for ever. They cannot be "
            "watched here (%s): that takes Linux 5.3 or newer, a container that lets pidfd_open through, and a Python that was "
            "built with os.pidfd_open, as conda's is not",
            WHERE,
            error,
        )
        return {}
    return handles


def _gone(why: str) -> RolloutError:
    return RolloutError(
        "vLLM has ended",
        where=WHERE,
        why=why,
        remedy="see its messages for the reason (out of memory?); close this rollout and create another one",
    )


def _settle(future: Future[T], function: Callable[..., T], args: Any, kwargs: Any) -> None:
    try:
        future.set_result(function(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets it
        future.set_exception(error)

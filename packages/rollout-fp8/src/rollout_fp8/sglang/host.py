"""Host of SGLang's engine on its own thread, where it answers in the background.

A failure of SGLang then does not end this process.

``sglang.Engine`` runs its event loop only inside its own blocking calls. Here the thread runs the
loop between calls, and every blocking call is made on the thread: completions continue meanwhile.

When a process of SGLang fails it sends SIGQUIT to its parent, which would end the trainer. A
handler takes it instead, and everything that waits gets an error. It can only be installed from the
main thread; a rollout that is created on another thread ends with the process.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from engine_api.errors import EngineError, RolloutError
from rollout_fp8.failures import describe_error
from rollout_fp8.sglang import private

T = TypeVar("T")
# Seconds for SGLang's constructor to see that its processes are gone; later its thread ends the
# rest.
ABANDON_S = 30.0
WHERE = "rollout 'sglang'"


class Host:
    """Owner of the thread, the loop and the engine.

    Nothing is started until ``open``, so that the caller holds the host before there is anything to
    end.

    Args:
        make: constructs the engine; called on the thread.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.engine: Any = None
        # Reason why nothing works any more.
        self.problem = ""
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: set[Future[Any]] = set()
        self._spawned: set[Future[Any]] = set()
        # Those of the spawned coroutines that have begun.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = False
        # SIGQUIT's earlier handler.
        self._previous: Any = None
        self._started: Future[None] = Future()
        # A daemon thread: a rollout that was never closed must not keep the interpreter from
        # ending.
        self._thread = threading.Thread(target=self._run, args=(make,), name="sglang", daemon=True)

    def open(self) -> None:
        """Start the thread and SGLang, and wait until it is up.

        An interrupt at any moment leaves nothing behind.

        Raises:
            RolloutError: the engine did not start.
        """
        older = set(multiprocessing.active_children())
        try:
            self._take_signal()
            self._thread.start()
            self._started.result()
        # SGLang raises any error that stopped it, and an interrupt must leave no process behind
        # either.
        except BaseException as error:
            self._abandon(older)
            if not isinstance(error, Exception):
                raise
            raise RolloutError(
                "SGLang did not start",
                where=WHERE,
                why=describe_error(error),
                remedy="see its own messages above; out of memory: lower "
                "rollout.options.gpu_memory_utilization or batch_size; no memory for the "
                "cache in addition to the weights: raise it; no kernel: another "
                "rollout.options.attention_backend",
            ) from error

    def start(self, function: Callable[[], T]) -> Future[T]:
        """Begin a blocking call of the engine on its thread.

        Completions continue meanwhile.
        """
        future: Future[T] = Future()
        self._expect(future)
        self._jobs.put(partial(_settle, future, partial(self._do, function)))
        self._wake()
        return future

    def call(self, function: Callable[[], T]) -> T:
        """Do ``start``, and wait for the result.

        Raises ``RolloutError`` when SGLang fails meanwhile.
        """
        return self.start(function).result()

    def spawn(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run a coroutine on the engine's loop, in the background."""
        with self._lock:
            loop = self._require_loop()
            future = asyncio.run_coroutine_threadsafe(self._guarded(work), loop)
            self._spawned.add(future)
        future.add_done_callback(self._spawned.discard)
        return future

    def check(self) -> None:
        """Raise ``RolloutError`` when SGLang has failed."""
        if self.problem:
            raise self._ended()

    def close(self) -> None:
        """End SGLang's processes and the thread (idempotent).

        Every other child of this process ends too (see ``private``).
        """
        if self.engine is None:
            return
        engine = self.engine
        self.engine = None
        self._fail("it is closed")
        private.shut_down(engine)
        self._thread.join()
        self._restore_signal_handler()

    # --- the thread -----------------------------------------------------------------------------

    def _run(self, make: Callable[[], Any]) -> None:
        _settle(self._started, partial(self._make, make))
        loop = self._loop
        if loop is None:
            return
        while not self.problem:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                self._idle = True
                # Until a call comes.
                loop.run_forever()
                self._idle = False
            else:
                job()
        for task in self._tasks:
            task.cancel()
        loop.run_until_complete(_all(self._tasks))
        loop.close()
        # From here on no call can add a future.
        with self._lock:
            left = [*self._waiting, *self._spawned]
        for future in left:
            if not future.done():
                future.set_exception(self._ended())

    def _do(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except EngineError:
            raise
        except Exception as error:
            # A call of SGLang may raise anything, and does when its loop is stopped.
            if self.problem:
                raise self._ended() from error
            raise RolloutError(
                "a call of SGLang failed",
                where=WHERE,
                why=describe_error(error),
                remedy="see its own messages for details",
            ) from error

    async def _guarded(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        task = asyncio.current_task()
        assert task is not None, "it runs on the loop"
        self._tasks.add(task)
        try:
            return await work()
        except asyncio.CancelledError:
            raise self._ended() from None
        finally:
            self._tasks.discard(task)

    def _ended(self) -> RolloutError:
        return RolloutError(
            "SGLang has ended",
            where=WHERE,
            why=self.problem,
            remedy="close this rollout and create another",
        )

    def _make(self, make: Callable[[], Any]) -> None:
        with self._lock:
            # The start was interrupted before this thread had begun to run.
            if self.problem:
                raise self._ended()
        engine = make()
        with self._lock:
            if not self.problem:
                loop = private.loop_of(engine)
                self.engine = engine
                self._loop = loop
                return
        # No caller waits for it any more.
        private.shut_down(engine)
        private.loop_of(engine).close()
        raise self._ended()

    def _abandon(self, older: Collection[Any]) -> None:
        """End everything that a failed or interrupted start has left.

        ``older``, the children before the start, are not ended. SGLang's constructor waits for its
        processes: once they are gone it ends, and the thread with it.
        """
        with self._lock:
            self.problem = self.problem or "its start was cancelled"
        deadline = time.monotonic() + ABANDON_S
        over = False
        try:
            while not over:
                # Read before the processes are: SGLang may have started one more since.
                over = (
                    not self._thread.is_alive()
                    or self.engine is not None
                    or time.monotonic() > deadline
                )
                for child in set(multiprocessing.active_children()) - set(older):
                    child.kill()
                    child.join()
                if not over:
                    self._thread.join(0.1)
            # The engine may have come up just then.
            self.close()
        finally:
            self._restore_signal_handler()

    def _wake(self) -> None:
        self._require_loop().call_soon_threadsafe(self._stop_if_idle)

    def _stop_if_idle(self) -> None:
        # Inside a blocking call the loop must continue: stopping it would break the call.
        if self._idle and self._loop is not None:
            self._loop.stop()

    def _require_loop(self) -> asyncio.AbstractEventLoop:
        self.check()
        assert self._loop is not None, "the constructor waits for it"
        return self._loop

    def _expect(self, future: Future[Any]) -> None:
        with self._lock:
            self.check()
            self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)

    # --- failure --------------------------------------------------------------------------------

    def _fail(self, problem: str) -> None:
        self.problem = self.problem or problem
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _take_signal(self) -> None:
        if threading.current_thread() is threading.main_thread():
            # Kept before it is replaced, so that an interrupt between the two finds the handler to
            # restore.
            self._previous = signal.getsignal(signal.SIGQUIT)
            signal.signal(signal.SIGQUIT, self._on_signal)

    def _restore_signal_handler(self) -> None:
        if threading.current_thread() is threading.main_thread() and self._previous is not None:
            signal.signal(signal.SIGQUIT, self._previous)
            self._previous = None

    def _on_signal(self, signum: int, frame: Any) -> None:
        self._fail("one of its processes failed; see its own messages for the reason")
        if callable(self._previous):
            self._previous(signum, frame)


async def _all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def _settle(future: Future[T], function: Callable[[], T]) -> None:
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001 - the caller that waits for the future gets it
        if not future.done():
            future.set_exception(error)
    else:
        if not future.done():
            future.set_result(result)

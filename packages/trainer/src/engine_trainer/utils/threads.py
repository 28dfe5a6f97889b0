"""Threads that nobody waits for: a call that never returns must not hold an event loop, nor the end of the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


class DaemonThreads(ThreadPoolExecutor):
    """A daemon thread a call, as the default executor of an event loop (``asyncio.to_thread``).

    The standard one is joined when the loop closes and when the interpreter ends, however long that takes. It is a
    ``ThreadPoolExecutor`` because event loops take no other.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See ``Executor.submit``; there is no queue."""
        future: Future[Any] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - whatever it is belongs to who waits for the future
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=work, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing is waited for."""


@contextmanager
def event_loop(grace_s: float) -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that waits ``grace_s`` for what was cancelled at its end; ``asyncio.Runner`` would wait for ever."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(DaemonThreads())
    try:
        yield loop
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=grace_s))
        loop.run_until_complete(
            asyncio.wait([loop.create_task(loop.shutdown_asyncgens())], timeout=grace_s)
        )
        loop.close()

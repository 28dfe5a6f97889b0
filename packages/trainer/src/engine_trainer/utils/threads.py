"""Threads that are never joined.

A call that never returns must not block an event loop or the end of the process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


class DaemonThreads(ThreadPoolExecutor):
    """An executor with one daemon thread for each call, the default executor of an event loop.

    ``asyncio.to_thread`` uses it then. The threads of the standard executor are joined when the
    loop closes and when the interpreter ends, however long that takes. The class is a
    ``ThreadPoolExecutor`` because event loops accept no other executor.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start the call at once in a thread of its own, without a queue.

        See ``Executor.submit``.
        """
        future: Future[Any] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - the code that awaits the future gets it
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=work, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Return at once, without waiting for any call."""


@contextmanager
def event_loop(grace_s: float) -> Iterator[asyncio.AbstractEventLoop]:
    """Yield an event loop whose remaining tasks are cancelled at its end.

    The loop waits at most ``grace_s`` seconds for the cancelled tasks, and as long again for
    asynchronous generators to close. ``asyncio.Runner`` would wait forever.
    """
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

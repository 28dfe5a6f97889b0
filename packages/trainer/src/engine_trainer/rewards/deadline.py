"""An alarm around Python code that may run for ever."""

from __future__ import annotations

import asyncio
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from engine_api.errors import ConfigError

# Seconds until the alarm checks again whether the code that it must not interrupt has ended.
RETRY_S = 0.1
# Prefix of the file names of the import system's own frames.
IMPORTING = "<frozen importlib"
# Files of the functions that Python calls for a weak set or mapping whose object has gone.
_OF_WEAK_REFERENCES = {
    kind.__init__.__code__.co_filename for kind in (weakref.WeakSet, weakref.WeakValueDictionary)
}


class DeadlineExceeded(BaseException):
    """The exception for a time limit that has passed.

    It does not derive from ``Exception``, so that a checker's own ``except Exception`` does not
    catch it.
    """


class Alarm:
    """The clock of ``alarm``, which raises after ``seconds`` unless it is restarted."""

    def __init__(self, seconds: float, *, again: bool) -> None:
        self.seconds = seconds
        self._again = again

    def restart(self) -> None:
        """Give the body the full time again."""
        signal.setitimer(signal.ITIMER_REAL, self.seconds, self.seconds if self._again else 0.0)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Lift the limit in the body, and give the full time again after it."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        try:
            yield
        finally:
            self.restart()

    def ring(self, number: int, frame: FrameType | None) -> None:
        """Raise ``DeadlineExceeded``, or ring again soon if raising would be wrong.

        An exception in the middle of an import can leave a C module half initialized, and its next
        use would end the process. Python drops what a finalizer raises. While an event loop waits,
        none of its functions blocks it, so the delay is the process's own.
        """
        del number
        if _imports(frame) or _finalizes(frame) or _event_loop_waits():
            signal.setitimer(signal.ITIMER_REAL, RETRY_S, self.seconds if self._again else 0.0)
            return
        raise DeadlineExceeded


@contextmanager
def alarm(seconds: float, *, again: bool = False) -> Iterator[Alarm]:
    """Raise ``DeadlineExceeded`` in the body after ``seconds`` of wall time.

    The alarm uses ``SIGALRM``, which interrupts Python code but neither an import nor a call that
    stays inside C. It is therefore not a strict limit. Code that must end runs in a process of its
    own, which another process kills (``worker_pool``).

    Args:
        seconds: Time until it raises.
        again: Raise again each time the same number of seconds has passed, for a body that
            continues with something else.

    Raises:
        ConfigError: the caller is not in the main thread, where alone signals arrive.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "timeout_s",
            "a time limit needs the main thread",
            why="SIGALRM enforces it, and Python handles signals in the main thread only",
            remedy="set timeout_s: null, or run it in the main thread",
        )
    made = Alarm(seconds, again=again)
    before = signal.signal(signal.SIGALRM, made.ring)
    made.restart()
    try:
        yield made
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _event_loop_waits() -> bool:
    """Return whether an event loop runs in this thread and none of its tasks is running."""
    try:
        return asyncio.current_task() is None
    except RuntimeError:  # no event loop runs
        return False


def _imports(frame: FrameType | None) -> bool:
    """Return whether the import system is among a frame and its callers."""
    return any(one.f_code.co_filename.startswith(IMPORTING) for one in _list_frames(frame))


def _finalizes(frame: FrameType | None) -> bool:
    """Return whether a finalizer is among a frame and its callers."""
    return any(
        one.f_code.co_name == "__del__" or one.f_code.co_filename in _OF_WEAK_REFERENCES
        for one in _list_frames(frame)
    )


def _list_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back

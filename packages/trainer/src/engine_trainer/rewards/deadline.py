"""An alarm around Python code that may run for ever."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from engine_api.errors import ConfigError

RETRY_S = 0.1  # until the next look whether what the alarm must not interrupt has ended
IMPORTING = "<frozen importlib"  # how the file names of the import system's own frames begin


class DeadlineExceeded(BaseException):
    """The time is up. Not an ``Exception``: a checker's own ``except Exception`` must not eat it."""


class Alarm:
    """The clock of ``alarm``; ``seconds``: after which it raises, unless it is put off."""

    def __init__(self, seconds: float, *, again: bool) -> None:
        self.seconds = seconds
        self._again = again

    def restart(self) -> None:
        """Give the body all of the time again."""
        signal.setitimer(signal.ITIMER_REAL, self.seconds, self.seconds if self._again else 0.0)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Lift the limit in the body, and give all of the time again after it."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        try:
            yield
        finally:
            self.restart()

    def ring(self, number: int, frame: FrameType | None) -> None:
        """Raise ``DeadlineExceeded``, or ring again soon where that would be wrong.

        In the middle of an import an exception out of nowhere leaves a module in C half made, and the next use of it ends
        the process. While an event loop waits, none of its functions holds it: it was the process that came late.
        """
        del number
        if _imports(frame) or _event_loop_waits():
            signal.setitimer(signal.ITIMER_REAL, RETRY_S, self.seconds if self._again else 0.0)
            return
        raise DeadlineExceeded


@contextmanager
def alarm(seconds: float, *, again: bool = False) -> Iterator[Alarm]:
    """Raise ``DeadlineExceeded`` in the body after ``seconds`` of wall time.

    It comes by ``SIGALRM``, which interrupts Python code and neither an import nor a call that stays inside C. It is
    therefore no bound by itself: what must end is in a process of its own, which another one kills (``workers``).

    Args:
        seconds: Until it raises.
        again: Raise after as many seconds again, for a body that goes on with something else.

    Raises ``ConfigError`` outside the main thread, where no signal arrives.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "timeout_s",
            "a time limit needs the main thread",
            why="it is kept by SIGALRM",
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
    """Return whether an event loop runs in this thread, and none of its tasks does."""
    try:
        return asyncio.current_task() is None
    except RuntimeError:  # no event loop runs
        return False


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORTING):
            return True
        frame = frame.f_back
    return False

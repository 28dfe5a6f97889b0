"""A deadline around a piece of Python that may run for ever."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from engine_api.errors import ConfigError


class DeadlineExceeded(BaseException):
    """The time is up. Not an ``Exception``: a checker's own ``except Exception`` must not eat it."""


@contextmanager
def deadline(seconds: float | None, *, again: bool = False) -> Iterator[None]:
    """Raise ``DeadlineExceeded`` in the body after ``seconds`` of wall time; None: no limit.

    ``again``: and after as many seconds again, for a body that goes on with something else.

    Raises ``ConfigError`` outside the main thread.
    """
    if seconds is None:
        yield
        return
    with alarm(seconds, again=again):
        yield


class Alarm:
    """The clock of ``alarm``; ``seconds``: after which it raises, unless it is put off."""

    def __init__(self, seconds: float, *, again: bool) -> None:
        self.seconds, self._again = seconds, again

    def restart(self) -> None:
        """All of the time again."""
        signal.setitimer(signal.ITIMER_REAL, self.seconds, self.seconds if self._again else 0.0)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """No limit in the body; all of the time again after it."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        try:
            yield
        finally:
            self.restart()


@contextmanager
def alarm(seconds: float, *, again: bool = False) -> Iterator[Alarm]:
    """``deadline``, with its clock.

    By ``SIGALRM``, which interrupts Python code (not a call that stays inside C) and needs the main thread:
    a thread cannot be stopped from outside, and a process for each call costs more than most rewards.

    Raises ``ConfigError`` outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("reward.timeout_s", "a time limit needs the main thread", why="it is kept by SIGALRM",
                          remedy="set reward.workers: 1 (a process of its own keeps the time), or timeout_s: null")  # fmt: skip
    before = signal.signal(signal.SIGALRM, _raise)
    made = Alarm(seconds, again=again)
    made.restart()
    try:
        yield made
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _raise(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise DeadlineExceeded

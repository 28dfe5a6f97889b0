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
def deadline(seconds: float | None) -> Iterator[None]:
    """Raise ``DeadlineExceeded`` in the body after ``seconds`` of wall time; None: no limit.

    By ``SIGALRM``, which interrupts Python code (not a call that stays inside C) and needs the main thread:
    a thread cannot be stopped from outside, and a process for each call costs more than most rewards.

    Raises ``ConfigError`` outside the main thread.
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("reward.timeout_s", "a time limit needs the main thread", why="it is kept by SIGALRM",
                          remedy="score in the main thread, or set timeout_s: null")  # fmt: skip
    before = signal.signal(signal.SIGALRM, _raise)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _raise(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise DeadlineExceeded

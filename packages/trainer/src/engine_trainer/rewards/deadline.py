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

    By ``SIGALRM``, which interrupts Python code (not a call that stays inside C) and needs the main thread:
    a thread cannot be stopped from outside, and a process for each call costs more than most rewards.

    Raises ``ConfigError`` outside the main thread.
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("reward.timeout_s", "a time limit needs the main thread", why="it is kept by SIGALRM",
                          remedy="set reward.workers: 1 (a process of its own keeps the time), or timeout_s: null")  # fmt: skip
    before = signal.signal(signal.SIGALRM, _raise)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds if again else 0.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _raise(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise DeadlineExceeded

"""The alarm raises in the body, and not where what is raised is lost."""

from __future__ import annotations

import signal
import sys
import time
import weakref
from collections.abc import Callable
from types import FrameType

import pytest

from engine_trainer.rewards.deadline import RETRY_S, Alarm, DeadlineExceeded, alarm


def wait_for(seconds: float) -> None:
    """Run Python code for a time, so that an alarm can interrupt it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


class Slow:
    """An object whose finalizer runs for longer than the limit."""

    ended = False

    def __del__(self) -> None:
        wait_for(0.3)
        Slow.ended = True


def finalize_and_go_on() -> None:
    one = Slow()
    del one
    wait_for(60)


def test_a_limit_that_passes_in_a_finalizer_is_raised_after_it() -> None:
    """Python would drop the exception, and the body would run for ever."""
    Slow.ended = False
    with pytest.raises(DeadlineExceeded), alarm(0.1):
        finalize_and_go_on()
    assert Slow.ended


class Key:
    """An object that a weak set can hold."""


def fill_set(key: Key) -> object:
    return weakref.WeakSet([key])


def fill_mapping(key: Key) -> object:
    return weakref.WeakValueDictionary({"key": key})


@pytest.mark.parametrize("fill", [fill_set, fill_mapping])
def test_the_callback_of_a_weak_set_or_mapping_is_a_finalizer(
    fill: Callable[[Key], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: list[FrameType] = []
    key = Key()
    held = fill(key)
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: frames.append(frame) if event == "call" else None)
    try:
        del key
    finally:
        sys.setprofile(before)
    del held
    armed: list[float] = []
    monkeypatch.setattr(signal, "setitimer", lambda _, seconds, __: armed.append(seconds))
    (callback,) = frames
    Alarm(1.0, again=False).ring(signal.SIGALRM, callback)
    assert armed == [RETRY_S]
    with pytest.raises(DeadlineExceeded):
        Alarm(1.0, again=False).ring(signal.SIGALRM, callback.f_back)

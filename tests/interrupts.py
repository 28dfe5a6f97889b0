"""Interrupts at chosen places of a function: lines of given files and returns of their functions.

A user presses Ctrl-C at any time, and code that starts processes must leave none behind at any
place. So a test has to try every place; a signal at some time of a busy machine tries one of them,
a different one each time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Place:
    """A line of a file that is about to run, or the return to a function that is watched too.

    A value that is returned to a caller outside is complete and belongs to the caller: whether that
    caller loses it is not checked.
    """

    file: str
    line: int
    event: str

    def __str__(self) -> str:
        return f"{self.event} {self.file.rpartition('/')[2]}:{self.line}"


@contextmanager
def _watching(modules: tuple[ModuleType, ...], seen: Callable[[Place], None]) -> Iterator[None]:
    files = {module.__file__ for module in modules}

    def local(frame: FrameType, event: str, _: object) -> Any:
        caller = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
        if event == "line" or (event == "return" and caller in files):
            seen(Place(file=frame.f_code.co_filename, line=frame.f_lineno, event=event))
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: local if frame.f_code.co_filename in files else None)
    try:
        yield
    finally:
        sys.settrace(before)


def places_of(function: Callable[[], object], *modules: ModuleType) -> list[Place]:
    """Run ``function`` and return the distinct places of ``modules`` that this thread passed.

    The places are in the order of the first pass.
    """
    found: dict[Place, None] = {}
    with _watching(modules, found.setdefault):
        function()
    return list(found)


def interrupted_at(place: Place, function: Callable[[], object], *modules: ModuleType) -> bool:
    """Run ``function`` and raise ``KeyboardInterrupt`` where it passes ``place`` first.

    Returns whether the interrupt ended the function.
    """
    reached = False

    def interrupt(passed: Place) -> None:
        nonlocal reached
        if passed == place and not reached:
            reached = True
            raise KeyboardInterrupt

    try:
        with _watching(modules, interrupt):
            function()
    except KeyboardInterrupt:
        return True
    return False

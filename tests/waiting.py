"""Functions that let tests wait for a condition, never for a time.

A test that sleeps and then looks, or that looks right after a signal, passes on an idle machine and
fails on a busy one. These functions look until the condition is true. ``DEADLINE_S`` only ends a
test whose condition never comes: it is no statement about how long anything takes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

DEADLINE_S = 600.0
# This is longer than any test may take (pyproject.toml): a wait that ends before was ended by the
# code under test.
NEVER_S = 3600.0
T = TypeVar("T")


def until(condition: Callable[[], T], *, missing: str | Callable[[], object] = "") -> T:
    """Call ``condition`` until its result is true, and return that result.

    Args:
        condition: The condition to wait for; it may raise, to give up.
        missing: The text of the failure after ``DEADLINE_S``, or a function that makes it.
    """
    end = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        if time.monotonic() > end:
            said = missing() if callable(missing) else missing
            raise AssertionError(said or f"{condition} did not come true within {DEADLINE_S:g} s")
        time.sleep(0.02)
    return found


def runs(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def children(of: int | None = None) -> set[int]:
    """Return the process ids of the running children of a process (default: this one)."""
    parent = str(os.getpid() if of is None else of)
    found: set[int] = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[1] == parent and fields[0] not in "ZX":
                found.add(int(folder.name))
    return found

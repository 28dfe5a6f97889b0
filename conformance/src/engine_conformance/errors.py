"""Reasons why a run does not happen.

A defect of an engine is a status, never an exception here.
"""

from __future__ import annotations

__all__ = ["CannotRun", "UsageError"]


class UsageError(ValueError):
    """A request that makes no sense.

    The text says what would.
    """


class CannotRun(RuntimeError):
    """A run from which nothing about the engine would follow.

    The text says why and what to do.
    """

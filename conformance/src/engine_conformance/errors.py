"""Why a run does not happen. What an engine does wrong is never an exception here: it is a status."""

from __future__ import annotations

__all__ = ["CannotRun", "UsageError"]


class UsageError(ValueError):
    """The request makes no sense; the text says what would."""


class CannotRun(RuntimeError):
    """Nothing can be said of the engine here; the text says why and what to do."""

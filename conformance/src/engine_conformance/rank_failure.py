"""Reports of failed ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["REFUSED", "FailedRank", "FailureKind", "RankError"]

# Begins the note of an error that an engine raised over the model of a case.
REFUSED = "the engine cannot build a model of the family"

FailureKind = Literal["raised", "died", "stalled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedRank:
    """The failure of one rank.

    ``kind``: ``raised`` (``text`` is the traceback, ``exception`` the class's full
    name), ``died`` (the exit code, and the stack of a crash), or ``stalled`` (the stack
    where it was). ``output`` is the end of what the rank printed.
    """

    rank: int
    kind: FailureKind
    text: str
    exception: str = ""
    output: str = ""

    @property
    def error(self) -> str:
        """The error that was raised, without its traceback."""
        start = self.text.rfind(f"{self.exception}: ")
        return self.text[max(0, start) :].strip()


class RankError(AssertionError):
    """The failure of a function on some rank.

    ``failures`` has every rank that did not return.
    """

    def __init__(
        self, function: str, world: int, failures: Sequence[FailedRank], seconds: float
    ) -> None:
        self.function = function
        self.world = world
        self.failures = tuple(failures)
        ranks = [failure.rank for failure in failures]
        lines = [f"{function} failed on rank(s) {ranks} of {world} after {seconds:.1f} s"]
        # A case's own verdict first: other ranks may have died of the connection that it closed.
        ordered = sorted(
            failures, key=lambda failure: not failure.exception.endswith("ConformanceFailure")
        )
        lines += [_described(failure) for failure in ordered]
        super().__init__("\n".join(lines))

    @property
    def refusal(self) -> str | None:
        """The reason why the engine could not build the case's model, or None."""
        told = [one.text for one in self.failures if one.text.startswith(REFUSED)]
        return told[0] if told else None

    @property
    def timed_out(self) -> bool:
        """True if the deadline passed and no rank raised or died."""
        return all(failure.kind == "stalled" for failure in self.failures)

    def raised_everywhere(self, *errors: type[Exception]) -> bool:
        """Return whether every rank raised one of ``errors``."""
        names = {f"{error.__module__}.{error.__qualname__}" for error in errors}
        return len(self.failures) == self.world and all(
            failure.exception in names for failure in self.failures
        )


def _described(failure: FailedRank) -> str:
    text = f"--- rank {failure.rank} {failure.kind}\n{failure.text.rstrip()}"
    return f"{text}\n--- rank {failure.rank} printed\n{failure.output}" if failure.output else text

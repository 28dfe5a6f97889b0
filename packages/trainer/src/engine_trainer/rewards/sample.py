"""The input and output of a reward function, and the error for one that fails."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from engine_api.errors import EngineError

# Largest number of characters of a prompt or completion in an error.
SHOWN = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One completion to be scored.

    Attributes:
        prompt: the prompt's text, as the model saw it.
        messages: the prompt as messages, with the system prompt; empty in a conversation with
            tools.
        completion: the completion's text, without special tokens. In a conversation with tools, the
            text of all the model's turns, without the tools' results.
        answer: the expected answer; None if the data has none.
        metadata: the data's other columns for the problem (reasoning-gym's record is ``entry``).
        finished: false if the completion reached the token limit.
    """

    prompt: str
    completion: str
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    finished: bool = True
    messages: Sequence[Mapping[str, Any]] = ()


class Verdict(float):
    """A reward with the answer found in the completion, for an evaluation's majority vote.

    Two completions vote for the same answer if ``answer`` is the same text. None does not vote.
    """

    answer: str | None

    def __new__(cls, value: float, answer: str | None = None) -> Self:
        """Return ``value`` with ``answer``."""
        made = super().__new__(cls, value)
        made.answer = answer
        return made


class RewardFn(Protocol):
    """A function that returns how good a completion is.

    Rewards that verify an answer return 1 or 0, as a ``Verdict``. The function may be
    ``async def``; its calls then run concurrently on one event loop.
    """

    def __call__(self, sample: Sample, /) -> float | Awaitable[float]:
        """Score one completion."""
        ...


class RewardError(EngineError):
    """The error for a reward function that raised, returned no number or did not reply.

    ``__cause__`` is the exception of the function, if it was raised in this process.
    """

    def __init__(self, function: str, sample: Sample, what: str, *, remedy: str = "") -> None:
        self.function, self.prompt, self.completion = function, sample.prompt, sample.completion
        why = (
            f"prompt {_short(sample.prompt)}\n       completion {_short(sample.completion)}\n"
            f"       answer {_short(str(sample.answer))}"
        )
        super().__init__(
            what,
            where=f"reward {function!r}",
            why=why,
            remedy=remedy or "fix the function, or the data that it cannot score",
        )

    @classmethod
    def failed(cls, function: str, sample: Sample, problem: str, count: int, most: int) -> Self:
        """Build the error for failure number ``count``, where a run allows ``most``."""
        return cls(
            function,
            sample,
            problem + (f"; failed calls: {count}" if most else ""),
            remedy="fix the function, or the data that it cannot score; reward.max_failures "
            "lets some calls count 0",
        )


def _short(text: str) -> str:
    return repr(text) if len(text) <= SHOWN else f"{text[:SHOWN]!r}… ({len(text)} characters)"

"""What a reward function sees and gives, and the error for one that fails."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from engine_api.errors import EngineError

SHOWN = 400  # characters of a prompt or completion in an error


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One completion to be judged.

    Attributes:
        prompt: the prompt's text, as the model saw it.
        completion: the completion's text, without special tokens. Of a conversation with tools: what the model said in
            all its turns, without the tools' results.
        answer: the expected answer, where the data has one.
        metadata: what else the data says about the problem (its other columns; reasoning-gym's ``entry``).
        finished: false when the completion ran into the token limit.
    """

    prompt: str
    completion: str
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    finished: bool = True


class Verdict(float):
    """A reward that also says which answer it found in the completion, for the majority vote of an evaluation.

    Two completions vote for the same answer when ``answer`` is the same text; None does not vote.
    """

    answer: str | None

    def __new__(cls, value: float, answer: str | None = None) -> Self:
        """``value`` with ``answer``."""
        made = super().__new__(cls, value)
        made.answer = answer
        return made


class RewardFn(Protocol):
    """A number that says how good a completion is; rewards that verify an answer give 1 or 0, as a ``Verdict``.

    It may be ``async def``: calls then run side by side on one event loop.
    """

    def __call__(self, sample: Sample, /) -> float | Awaitable[float]:
        """Judge one completion."""
        ...


class RewardError(EngineError):
    """A reward function raised, returned no number or did not answer; ``__cause__`` is what it raised, where it was here."""

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
            remedy=remedy or "mend the function, or the data that it cannot judge",
        )

    @classmethod
    def failed(cls, function: str, sample: Sample, problem: str, count: int, most: int) -> Self:
        """The failure that was one too many: the ``count``-th, of which a run bears ``most``."""
        return cls(
            function,
            sample,
            problem + (f"; failed calls: {count}" if most else ""),
            remedy="mend the function, or the data that it cannot judge; reward.max_failures lets some calls count 0",
        )


def _short(text: str) -> str:
    return repr(text) if len(text) <= SHOWN else f"{text[:SHOWN]!r}… ({len(text)} characters)"

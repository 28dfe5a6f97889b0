"""How the SFT response to a generated problem is written: the answer alone, or the steps that lead to it.

Every form ends in a line ``#### answer``, as GSM8K does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine_api.config import near_matches
from engine_api.errors import ConfigError

Entry = Mapping[str, Any]


def write_response(form: str, entry: Entry) -> str:
    """The response to a reasoning-gym entry in a form: ``answer``, or ``worked`` (steps, for the tasks in ``WORKED``).

    Raises ``ConfigError`` for an unknown form, or a task that nobody wrote the steps for.
    """
    if form == "answer":
        return _closing(entry["answer"])
    if form != "worked":
        raise ConfigError(
            "data.reasoning_gym.response",
            f"unknown form {form!r}",
            remedy=near_matches(form, ["answer", "worked"]),
        )
    task = str(entry["metadata"]["source_dataset"])
    if task not in WORKED:
        raise ConfigError(
            "data.reasoning_gym.response",
            f"no worked answers for {task!r}",
            why=f"there are some for: {', '.join(sorted(WORKED))}",
            remedy="use response: answer",
        )
    return WORKED[task](entry)


def _leg_counting(entry: Entry) -> str:
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    parts = [
        (count, int(ANIMALS[animal])) for animal, count in entry["metadata"]["animals"].items()
    ]
    steps = [f"{count}*{legs}={count * legs}" for count, legs in parts]
    return _sum(
        steps, parts[0][0] * parts[0][1], [("+", count * legs) for count, legs in parts[1:]]
    )


def _chain_sum(entry: Entry) -> str:
    words = str(entry["metadata"]["expression"]).split()
    return _sum([], int(words[0]), list(zip(words[1::2], map(int, words[2::2]), strict=True)))


def _sum(steps: list[str], total: int, terms: list[tuple[str, int]]) -> str:
    for sign, term in terms:
        result = total + term if sign == "+" else total - term
        steps.append(f"{total}{sign}{term}={result}")
        total = result
    return f"{', '.join(steps)}\n{_closing(total)}" if steps else _closing(total)


def _closing(answer: object) -> str:
    return f"#### {answer}"


WORKED: dict[str, Callable[[Entry], str]] = {"leg_counting": _leg_counting, "chain_sum": _chain_sum}

"""SFT responses to generated problems, as the answer alone or with the steps that lead to it.

Every form ends in a line ``#### answer``, as in GSM8K.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine_api.config import near_matches
from engine_api.errors import ConfigError

Entry = Mapping[str, Any]


def write_response(form: str, entry: Entry) -> str:
    """Return the response to a reasoning-gym entry in a given form.

    The form is ``answer``, or ``worked`` (with steps, for the tasks in ``WORKED``).

    Raises:
        ConfigError: the form is unknown, or no steps exist for the task.
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

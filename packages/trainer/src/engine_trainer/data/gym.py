"""Procedurally generated problems from reasoning-gym, split by their own text.

A question is held out if and only if its SHA-256 falls into the held-out share. No question can
therefore be on both sides, for any seed, size or order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Literal

from engine_api.config import near_matches
from engine_api.errors import ConfigError
from engine_trainer.config.sections import GymSection
from engine_trainer.data.layouts import Example
from engine_trainer.data.worked import write_response
from engine_trainer.errors import DataError

Side = Literal["train", "heldout"]
# Number of questions drawn per wanted question before the task counts as too small.
PATIENCE = 50


def is_heldout(question: str, share: float) -> bool:
    """Return whether a question belongs to the held-out side, which depends on its text alone."""
    return _falls_below(question, share)


def _falls_below(text: str, share: float) -> bool:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def gym_examples(section: GymSection, side: Side) -> list[Example]:
    """Return the section's problems of one side, all different, each with its response.

    ``metadata["entry"]`` is reasoning-gym's own record, which its scorer takes.

    Raises:
        ConfigError: an unknown task, or settings that it refuses.
        DataError: the task has fewer different questions than asked for.
    """
    first, count = (section.skip, section.size) if side == "train" else (0, section.heldout_size)
    chosen: list[Example] = []
    seen: set[str] = set()
    if count <= 0:
        return chosen
    for number, entry in enumerate(_stream(section, (first + count) * PATIENCE)):
        question = str(entry["question"])
        if question in seen or is_heldout(question, section.heldout_share) != (side == "heldout"):
            continue
        seen.add(question)
        if len(seen) > first:
            chosen.append(_example(entry, _form(section, question), number))
        if len(chosen) == count:
            return chosen
    raise DataError(
        f"expected {first + count} different {side} questions, got {len(seen)}",
        file="reasoning_gym",
        why=f"{(first + count) * PATIENCE} were drawn",
        remedy="ask for fewer, or widen the tasks' settings",
    )


def _form(section: GymSection, question: str) -> str:
    """Return the form of a question's response, which depends on the question's text alone."""
    if section.response != "worked" or _falls_below(f"worked {question}", section.worked_share):
        return section.response
    return "answer"


def _stream(section: GymSection, size: int) -> Iterator[dict[str, Any]]:
    try:
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            "data.reasoning_gym",
            "reasoning-gym is not installed",
            remedy="pip install 'engine-trainer[gym]'",
        ) from error
    for index, task in enumerate(section.datasets):
        if task.name not in DATASETS:
            raise ConfigError(
                f"data.reasoning_gym.datasets[{index}].name",
                f"unknown task {task.name!r}",
                remedy=near_matches(task.name, list(DATASETS)),
            )
    specs = [
        DatasetSpec(name=t.name, weight=t.weight, config=dict(t.config)) for t in section.datasets
    ]
    try:
        # reasoning-gym draws item i from Random(seed + i), so near seeds would share most of their
        # questions without the factor.
        mixture = reasoning_gym.create_dataset(
            "composite", seed=1_000_003 * (section.seed + 1), size=size, datasets=specs
        )
    # Each task checks its settings in its own way, and may raise any exception.
    except Exception as error:
        raise _refused(error) from error
    return _entries(mixture, size)


def _entries(mixture: Any, size: int) -> Iterator[dict[str, Any]]:
    for index in range(size):
        try:
            entry = mixture[index]
        # Settings that a task does not check fail where it draws a question.
        except Exception as error:
            raise _refused(error) from error
        yield entry


def _refused(error: Exception) -> ConfigError:
    return ConfigError(
        "data.reasoning_gym.datasets",
        "reasoning-gym refuses the settings",
        why=f"{type(error).__name__}: {error}"[:500],
        remedy="see the tasks' own configuration classes",
    )


def _example(entry: dict[str, Any], response: str, number: int) -> Example:
    task = str(entry["metadata"]["source_dataset"])
    turns = [
        {"role": "user", "content": str(entry["question"])},
        {"role": "assistant", "content": write_response(response, entry)},
    ]
    return Example(
        messages=turns,
        answer=str(entry["answer"]),
        file=f"reasoning_gym/{task}",
        number=number + 1,
        metadata={"entry": entry, "data_source": f"reasoning_gym/{task}"},
    )

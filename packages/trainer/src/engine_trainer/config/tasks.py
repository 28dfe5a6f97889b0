"""The task that a configuration file is for, recognized by its keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from engine_api.config import near_matches
from engine_api.errors import ConfigError
from engine_trainer.config.loading import read_tree

Tree = Mapping[Any, Any]

# The first condition that holds decides.
_SIGNS: Sequence[tuple[str, Callable[[Tree], bool]]] = (
    ("rl", lambda tree: bool({"algorithm", "agent", "launcher", "ray", "overlap"} & tree.keys())),
    ("dpo", lambda tree: "dpo" in tree),
    ("kto", lambda tree: "kto" in tree or "max_rows" in _below(tree, "eval")),
    ("rm", lambda tree: _below(tree, "engine").get("model_type") == "value_model"),
    ("dpo", lambda tree: "max_pairs" in _below(tree, "eval")),
    ("sft", lambda tree: "batch_size" in tree),
    ("rl", lambda tree: "reward" in tree),
    ("sft", lambda _: True),
)


def find_task(
    path: Path | str, overrides: Sequence[str], tasks: Sequence[str], given: str | None = None
) -> str:
    """Return the task of a configuration file.

    Args:
        path: the file.
        overrides: the overrides, whose keys count, too.
        tasks: the tasks to choose from.
        given: the task, if the user names one.

    Raises ``ConfigError`` for a file that cannot be read, and a task that is not in ``tasks``.
    """
    task = given
    if task is None:
        tree = OmegaConf.to_container(read_tree(path, overrides), resolve=False)
        assert isinstance(tree, dict)
        task = next(task for task, holds in _SIGNS if holds(tree))
    if task in tasks:
        return task
    if given is not None:
        raise ConfigError(
            "--task",
            f"expected one of {', '.join(tasks)}, got {given!r:.100}",
            remedy=near_matches(given, list(tasks), listed=True),
        )
    raise ConfigError(
        str(path),
        f"expected a file of {' or '.join(tasks)}, got one of {task}",
        remedy=f"name another file, or give --task {tasks[0]} if its keys mislead",
    )


def _below(tree: Tree, key: str) -> Tree:
    section = tree.get(key)
    return section if isinstance(section, Mapping) else {}

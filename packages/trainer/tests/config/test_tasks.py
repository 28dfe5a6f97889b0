"""The task of a configuration file, told by its keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from engine_api.errors import ConfigError
from engine_trainer.config.tasks import find_task

TASKS = ("sft", "rl", "dpo", "kto", "rm")
RECIPES = Path(__file__).parents[4] / "recipes"


def write(folder, tree):
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.parametrize(
    ("tree", "task"),
    [
        ({}, "sft"),
        ({"data": {"source": "x"}, "batch_size": 2}, "sft"),
        ({"batch_size": 2, "reward": {"name": "exact"}}, "sft"),
        ({"reward": {"name": "exact"}}, "rl"),
        ({"algorithm": {}}, "rl"),
        ({"batch_size": 2, "dpo": {"beta": 1}}, "dpo"),
        ({"batch_size": 2, "eval": {"source": "x", "max_pairs": 2}}, "dpo"),
        ({"batch_size": 2, "kto": {"beta": 1}}, "kto"),
        ({"batch_size": 2, "eval": {"source": "x", "max_rows": 2}}, "kto"),
        ({"engine": {"model_type": "value_model"}, "batch_size": 2}, "rm"),
        ({"engine": {"model": "${x}"}, "eval": None}, "sft"),
    ],
)
def test_keys_tell_the_task(tmp_path, tree, task):
    assert find_task(write(tmp_path, tree), [], TASKS) == task


def test_overrides_count_and_a_given_task_decides(tmp_path):
    path = write(tmp_path, {"batch_size": 2})
    assert find_task(path, ["dpo.beta=1"], TASKS) == "dpo"
    assert find_task(path, ["dpo.beta=1"], TASKS, "rm") == "rm"


def test_a_file_of_another_task_is_refused(tmp_path):
    path = write(tmp_path, {"dpo": {}})
    with pytest.raises(ConfigError, match=r"expected a file of rl or sft, got one of dpo"):
        find_task(path, [], ("rl", "sft"))
    with pytest.raises(ConfigError, match="expected one of rl, sft, got 'sftt'"):
        find_task(path, [], ("rl", "sft"), "sftt")


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_told_by_its_keys(path):
    """The first line names the schema of the recipe's task."""
    line = path.read_text().splitlines()[0]
    assert find_task(path, [], TASKS) == line.rpartition("/")[2].removesuffix(".json")

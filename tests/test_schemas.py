"""The JSON schemas of configurations: what a YAML language server underlines, and what it takes."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from omegaconf import OmegaConf

from engine_api.errors import ConfigError
from engine_trainer.cli import CONFIGS, main
from engine_trainer.config.loading import from_tree

ROOT = Path(__file__).parents[1]
RECIPES = sorted(ROOT.glob("recipes/*/*.yaml"))
SCHEMA_LINE = re.compile(r"# yaml-language-server: \$schema=(\S+)")
# Each is a small edit of a recipe, and the key that is wrong in it.
MISTAKES = {
    "a misspelt section": ({"algorythm": {}}, "algorythm"),
    "a misspelt key": ({"engine": {"optimizer": {"learning_rate": 1e-6}}}, "learning_rate"),
    "text for a number": ({"run": {"steps": "many"}}, "run.steps"),
    "a number for true or false": ({"run": {"report": 1}}, "run.report"),
    "an unknown choice": ({"launcher": "slurm"}, "launcher"),
    "a scalar for a section": ({"rollout": "vllm"}, "rollout"),
    "a number for a list of two": ({"engine": {"optimizer": {"betas": 0.9}}}, "betas"),
}


def schema_of(recipe: Path) -> dict[str, Any]:
    """Return the schema that a recipe's first line names."""
    named = SCHEMA_LINE.match(recipe.read_text())
    assert named is not None, f"{recipe} names no schema in its first line"
    return json.loads((recipe.parent / named[1]).resolve(strict=True).read_text())


def tree_of(recipe: Path) -> Any:
    """Return a recipe's own values, with its references as text."""
    return OmegaConf.to_container(OmegaConf.load(recipe), resolve=False)


def problems(schema: dict[str, Any], tree: Any) -> list[str]:
    """Return each error of a file and the key that it is at."""
    found = jsonschema.Draft202012Validator(schema).iter_errors(tree)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_recipe_names_its_schema_and_fits_it(recipe: Path) -> None:
    assert not problems(schema_of(recipe), tree_of(recipe))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_underlined_where_it_stands_and_refused_by_the_trainer(mistake: str) -> None:
    recipe = ROOT / "recipes/rl/dapo.yaml"
    edit, key = MISTAKES[mistake]
    given = {"engine": {"model": {"path": "model"}}}
    wrong = OmegaConf.to_container(OmegaConf.merge(tree_of(recipe), given, edit), resolve=False)

    (found,) = problems(schema_of(recipe), wrong)

    assert key in found
    with pytest.raises(ConfigError, match=re.escape(key)):
        from_tree(CONFIGS["rl"], wrong)


@pytest.mark.parametrize("task", CONFIGS)
def test_the_schema_of_a_task_is_valid_and_printed(
    task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schema", task]) == 0

    printed = capsys.readouterr().out
    shipped = resources.files("engine_trainer.config") / "schemas" / f"{task}.json"
    assert printed == shipped.read_text()
    jsonschema.Draft202012Validator.check_schema(json.loads(printed))


def test_the_schema_of_a_misspelt_task_names_the_near_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["schema", "rll"]) == 2

    assert "did you mean rl?" in capsys.readouterr().err

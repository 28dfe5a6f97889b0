from __future__ import annotations

import json

import pytest
import yaml
from layout import ROOT

from engine_trainer.cli import CONFIGS
from engine_trainer.config.explain import explain
from engine_trainer.config.loading import from_tree, load_config, schema_text, to_plain

RECIPES = sorted(ROOT.glob("recipes/*/*.yaml"))


def task_of(recipe):
    return recipe.read_text().splitlines()[0].rpartition("/")[2].removesuffix(".json")


def load(recipe):
    """Load a recipe with the values that recipes leave to the command line."""
    given = ["engine.model.path=model", "run.output_dir=out"]
    if recipe.parent.name == "sft":
        given.append("data.source=rows.jsonl")
    return load_config(CONFIGS[task_of(recipe)], recipe, given)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_an_explained_configuration_reads_back_equal(recipe):
    task = task_of(recipe)
    config = load(recipe)

    text = explain(to_plain(config), json.loads(schema_text(task)))

    assert yaml.safe_load(text) == to_plain(config)
    assert from_tree(CONFIGS[task], yaml.safe_load(text)) == config


def test_meaning_and_allowed_values_stand_above_a_key():
    config = load(ROOT / "recipes/rl/dapo.yaml")
    lines = explain(to_plain(config), json.loads(schema_text("rl"))).splitlines()

    assert lines[0] == "# Engine of the policy."
    at = lines.index("    name: constant")
    assert lines[at - 2 : at] == [
        "    # Shape of the learning rate after warm-up.",
        "    # One of: constant, linear, cosine.",
    ]
    assert all(len(line) <= 100 for line in lines if line.lstrip().startswith("#"))


def test_null_is_named_where_it_is_allowed_in_addition_to_a_choice():
    schema = {
        "properties": {
            "a": {"description": "A.", "anyOf": [{"anyOf": [{"enum": ["x"]}]}, {"type": "null"}]}
        }
    }
    assert explain({"a": None}, schema) == "# A.\n# One of: x, null.\na: null\n"

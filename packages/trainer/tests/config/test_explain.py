from __future__ import annotations

import json
from dataclasses import replace
from itertools import takewhile

import pytest
import yaml
from layout import ROOT

from engine_trainer.cli import CONFIGS
from engine_trainer.config.explain import explain, installed_names
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


def keys_of(node, path=""):
    """Yield the dotted name and the line of every key, except those of a plug-in or a function."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield f"{path}{key.value}", key.start_mark.line
            if not key.value.endswith(("kwargs", "options")):
                yield from keys_of(value, f"{path}{key.value}.")


def undescribed(schema, path=""):
    """Yield the properties of a schema without a description, in sections that may be null too."""
    for key, part in schema.get("properties", {}).items():
        if not part.get("description"):
            yield f"{path}{key}"
        yield from undescribed(part, f"{path}{key}.")
    for part in schema.get("anyOf", ()):
        yield from undescribed(part, path)


@pytest.mark.parametrize("task", CONFIGS)
def test_every_key_has_a_meaning_above_it(task):
    schema = json.loads(schema_text(task))
    assert list(undescribed(schema)) == []
    recipes = [one for one in RECIPES if CONFIGS[task_of(one)] is CONFIGS[task]]
    assert recipes
    seen = {}
    for recipe in recipes:
        text = explain(to_plain(load(recipe)), schema)
        lines = text.splitlines()
        for key, line in keys_of(yaml.compose(text)):
            seen[key] = lines[line - 1].lstrip() if line else ""
    assert {key: above for key, above in seen.items() if not above.startswith("# ")} == {}
    assert seen.keys() >= {"engine", "engine.model.path", "data.source", "run.seed"}


def test_names_of_plugins_are_those_that_are_installed():
    names = installed_names()
    assert "local" in names["rollout.name"]
    config = to_plain(load(ROOT / "recipes/rl/dapo.yaml"))
    lines = explain(config, json.loads(schema_text("rl")), names).splitlines()
    for key, value in (("model_type", "language_model"), ("backend", "fsdp2"), ("name", "vllm")):
        at = lines.index(f"  {key}: {value}")
        section = "rollout" if key == "name" else "engine"
        before = takewhile(lambda line: line.startswith("  #"), reversed(lines[:at]))
        comment = " ".join(line.removeprefix("  # ") for line in reversed(list(before)))
        assert comment.endswith(f"Installed here: {', '.join(names[f'{section}.{key}'])}.")


def test_null_is_named_where_it_is_allowed_in_addition_to_a_choice():
    schema = {
        "properties": {
            "a": {"description": "A.", "anyOf": [{"anyOf": [{"enum": ["x"]}]}, {"type": "null"}]}
        }
    }
    assert explain({"a": None}, schema) == "# A.\n# One of: x, null.\na: null\n"


def test_a_value_that_is_auto_is_explained_and_its_types_are_named():
    config = load(ROOT / "recipes/rl/gsm8k_grpo.yaml")
    text = explain(to_plain(config), json.loads(schema_text("rl")))
    assert "# One of: true, false, auto.\n    # `auto` is true on CUDA" in text
    assert "# One of: an integer, auto.\n    # `auto` is the largest multiple of 256" in text
    # A value that was given has no choice to explain.
    given = replace(config.engine, memory=replace(config.engine.memory, compile=True))
    text = explain(to_plain(replace(config, engine=given)), json.loads(schema_text("rl")))
    assert "# One of: true, false, auto.\n    compile: true\n" in text

from __future__ import annotations

import re

import pytest
from layout import ROOT

from engine_api.errors import ConfigError
from engine_trainer.cli import CONFIGS, main
from engine_trainer.config.loading import load_config
from engine_trainer.config.recipes import FOLDER, copy_recipe, list_recipes

GIVEN = ("engine.model.path=model", "run.output_dir=out")


def files_below(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_the_package_has_the_recipes_of_the_repository():
    shipped = {str(p.relative_to(FOLDER)): p.read_text() for p in FOLDER.glob("*/*.[yp]*")}
    in_tree = {
        str(p.relative_to(ROOT / "recipes")): p.read_text() for p in ROOT.glob("recipes/*/*.[yp]*")
    }
    assert shipped == in_tree


def test_each_recipe_is_listed_with_one_sentence(capsys):
    assert main(["recipes"]) == 0

    lines = capsys.readouterr().out.splitlines()
    listed = {line.split()[0]: line for line in lines if line}
    assert {"rl/dapo", "sft/chat", "preferences/dpo", "preferences/kto", "quickstart"} <= set(
        listed
    )
    assert listed["sft/gsm8k"].split(maxsplit=1)[1] == (
        "Supervised fine-tuning on GSM8K's worked answers."
    )
    assert listed["rl/dr_grpo"].endswith("response's length.")
    assert all(about.endswith(".") and "\n" not in about for about in list_recipes().values())


def test_a_recipe_is_copied_with_all_that_it_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", "rl/calculator"]) == 0

    folder = tmp_path / "recipes"
    assert files_below(folder) == [
        "rl/calculator.py",
        "rl/calculator.yaml",
        "rl/gsm8k_grpo.yaml",
        "schemas/rl.json",
    ]
    config = load_config(CONFIGS["rl"], folder / "rl/calculator.yaml", GIVEN)
    assert config.agent.function == "recipes/rl/calculator.py:solve"


def test_paths_in_a_recipe_follow_it_to_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", "rl/calculator", "my/own"]) == 0

    copied = tmp_path / "my/own/rl/calculator.yaml"
    config = load_config(CONFIGS["rl"], copied, GIVEN)
    assert config.agent.function == "my/own/rl/calculator.py:solve"
    assert "engine-train rl my/own/rl/calculator.yaml" in copied.read_text()


def test_scripts_come_with_the_scripts_that_they_import(tmp_path):
    copy_recipe("fp8_reproduction", tmp_path)
    assert {"fp8_reproduction/run.py", "quickstart/prepare.py"} <= set(files_below(tmp_path))


def test_every_copied_recipe_loads_and_names_a_schema_that_exists(tmp_path, capsys):
    assert main(["recipes", "copy", "all", str(tmp_path)]) == 0
    assert "engine-train rl " in capsys.readouterr().out

    copied = sorted(tmp_path.glob("*/*.yaml"))
    assert len(copied) == len(list(ROOT.glob("recipes/*/*.yaml")))
    for path in copied:
        named = re.match(r"# yaml-language-server: \$schema=(\S+)", path.read_text())
        schema = (path.parent / named[1]).resolve(strict=True)
        source = ["data.source=rows.jsonl"] if path.parent.name == "sft" else []
        load_config(CONFIGS[schema.stem], path, [*GIVEN, *source])


def test_a_second_copy_changes_nothing_and_an_edited_file_is_kept(tmp_path):
    first = copy_recipe("rl/dapo", tmp_path)
    assert copy_recipe("rl/dapo", tmp_path) == first
    edited = tmp_path / "rl/dapo.yaml"
    edited.write_text("base: mine.yaml\n")

    with pytest.raises(ConfigError, match="another folder") as caught:
        copy_recipe("rl/dapo_fp8", tmp_path)

    assert caught.value.where.endswith(str(edited))
    assert edited.read_text() == "base: mine.yaml\n"
    assert not (tmp_path / "rl/dapo_fp8.yaml").exists(), (
        "nothing is written if a file is in the way"
    )


def test_a_misspelt_recipe_names_the_near_one(tmp_path, capsys):
    assert main(["recipes", "copy", "rl/dapoo", str(tmp_path)]) == 2
    assert "did you mean rl/dapo" in capsys.readouterr().err

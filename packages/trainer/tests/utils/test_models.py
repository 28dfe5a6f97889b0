"""A model that is not there, or not whole, is named before anything is loaded."""

from __future__ import annotations

import json
import shutil

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM

from engine_api.config import ModelSource
from engine_api.errors import ConfigError
from engine_api.hf_layers import carries_state
from engine_torch.mixers import find_mixers
from engine_trainer.config.sections import DataSection
from engine_trainer.data import load_tokenizer, positions_of
from engine_trainer.utils import hf_models as models

QWEN = {"model_type": "qwen3", "hidden_size": 8, "vocab_size": 10}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that answers as it is told, and counts how often it is asked."""
    asked = []

    def answer_with(error):
        def answer(url, **_):
            asked.append(url)
            if error is not None:
                raise error

        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)
        return asked

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models.time, "sleep", lambda _: None)
    return answer_with


def load(path, **section):
    return load_tokenizer(DataSection(source="x", **section), ModelSource(path=str(path)))


def test_without_a_network_a_name_that_is_not_cached_is_told_after_two_questions(hub):
    asked = hub(RuntimeError("Name or service not known"))
    with pytest.raises(
        ConfigError, match=r"(?s)no folder 'Qwen/Qwen3-0.6X'.*service not known.*hf download"
    ) as caught:
        load("Qwen/Qwen3-0.6X")
    assert (caught.value.field, len(asked)) == ("engine.model.path", 2)
    with pytest.raises(ConfigError) as caught:
        positions_of(ModelSource(path="Qwen/Qwen3-0.6X"))
    assert caught.value.field == "engine.model.path"


def test_a_path_that_cannot_be_a_name_is_told_without_a_question(hub):
    asked = hub(None)
    for path in ("runs/sft/hf", "./model", "/no/model"):
        with pytest.raises(ConfigError, match=f"no folder '{path}'"):
            load(path, tokenizer=path)
    assert not asked


def test_the_folder_of_an_adapter_is_no_model(model_folder):
    (model_folder / "config.json").unlink()
    (model_folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="it holds an adapter: name the model") as caught:
        positions_of(ModelSource(path=str(model_folder)))
    assert caught.value.field == "engine.model.path"


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("tokenizer.json", "{}", "(?s)expected a folder, got the file.*to do: name /"),
        ("tokenizer.json", None, "(?s)expected a folder, got the file.*name the model's folder"),
        ("", None, "(?s)no config.json in the folder.*it has .*copy the model's config"),
        (
            "",
            '{"model_type": "qw',
            "(?s)config.json cannot be read as JSON.*Unterminated.*fetch the file",
        ),
        ("", "", "(?s)config.json cannot be read as JSON.*fetch the file"),
        ("", "[" * 100_000, "(?s)config.json cannot be read as JSON.*fetch the file"),
        ("", "[1]", "(?s)config.json: expected an object, got a list.*fetch the file"),
    ],
)
@pytest.mark.parametrize("has_own_tokenizer", [False, True])
def test_a_model_whose_config_cannot_be_read_is_told_by_its_defect(
    hub, tmp_path, model_folder, name, config, said, has_own_tokenizer
):
    asked = hub(None)
    tokenizer = shutil.copytree(model_folder, tmp_path / "own") if has_own_tokenizer else None
    (model_folder / "config.json").unlink()
    if config is not None:
        (model_folder / "config.json").write_text(config)
    path = model_folder / name
    with pytest.raises(ConfigError, match=said) as caught:  # noqa: PT012 - either is the first
        load(path, tokenizer=tokenizer and str(tokenizer))
        positions_of(ModelSource(path=str(path)))
    assert caught.value.field == "engine.model.path"
    assert not asked


def test_what_is_cached_is_not_asked_for(hub, monkeypatch):
    asked = hub(RuntimeError("no network"))
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda *_, **__: "/cache/config.json"
    )
    models.require_source("owner/name", "k")
    assert not asked


def test_a_hub_that_forbids_or_fails_is_left_to_transformers(hub):
    hub(huggingface_hub.errors.OfflineModeIsEnabled("offline"))
    models.require_source("owner/name", "k")


@pytest.mark.parametrize(
    "files", [{"config.json": QWEN}, {"config.json": QWEN, "tokenizer_config.json": {}}]
)
def test_a_folder_without_a_tokenizer_is_refused_by_its_name(tmp_path, files):
    """transformers makes an empty tokenizer of Qwen's kind for it."""
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"(?s)tokenizer.*tokenizer.json") as caught:
        load(tmp_path)
    assert caught.value.field == "engine.model.path"
    assert str(tmp_path) in caught.value.what


def test_a_runs_folder_is_told_from_the_model_in_it(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"name {tmp_path}/hf"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=f"name {tmp_path}/hf"):
        positions_of(ModelSource(path=str(tmp_path)))


def test_a_model_that_transformers_does_not_know_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    with pytest.raises(ConfigError, match="nobody") as caught:
        positions_of(ModelSource(path=str(tmp_path)))
    assert caught.value.field == "engine.model.path"


@pytest.mark.parametrize(
    ("name", "carries"),
    [
        *((name, True) for name in ("falcon_h1", "jamba", "mamba2", "minimax", "nemotron_h")),
        *((name, True) for name in ("olmo_hybrid", "qwen3_next", "recurrent_gemma", "zaya")),
        *((name, False) for name in ("deepseek_v3", "gemma3_text", "gpt_oss", "llama", "qwen3")),
    ],
)
def test_models_whose_layers_carry_a_state_are_known_by_their_configuration(name, carries):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(name))
    assert bool(find_mixers(model)) == carries
    assert carries_state(model.config) == carries

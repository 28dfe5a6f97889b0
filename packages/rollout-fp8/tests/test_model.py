"""Configuration of a model: incomplete folders and unknown overrides are refused with a remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from engine_api.config import ModelSource
from engine_api.errors import ConfigError
from rollout_fp8.model import architecture_of, config_of
from rollout_fp8.sglang.options import write_config


def write_for_sglang(source: ModelSource) -> Any:
    return write_config(Path(source.path), source, None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Qwen3Config(
        hidden_size=32, num_hidden_layers=2, architectures=["Qwen3ForCausalLM"]
    ).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("read", [config_of, architecture_of, write_for_sglang])
@pytest.mark.parametrize(
    "written",
    [None, "{", "{}", json.dumps({"model_type": "no_such_model"})],
    ids=["nothing", "no JSON", "no type", "an unknown type"],
)
def test_a_folder_that_holds_no_model_is_refused(
    folder: Path, read: Callable[[ModelSource], Any], written: str | None
) -> None:
    config = folder / "config.json"
    config.unlink()
    if written is not None:
        config.write_text(written)
    with pytest.raises(ConfigError, match="cannot read the configuration") as caught:
        read(ModelSource(path=str(folder)))
    assert caught.value.field == "engine.model.path"
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("read", [config_of, architecture_of, write_for_sglang])
def test_an_override_that_is_no_key_is_refused_with_what_was_meant(
    folder: Path, read: Callable[[ModelSource], Any]
) -> None:
    with pytest.raises(ConfigError, match="did you mean hidden_size") as caught:
        read(ModelSource(path=str(folder), config_overrides={"hidden_sz": 64}))
    assert caught.value.field == "engine.model.config_overrides.hidden_sz"


def test_overrides_are_applied(folder: Path) -> None:
    source = ModelSource(
        path=str(folder), config_overrides={"hidden_size": 64, "tie_word_embeddings": True}
    )
    config = config_of(source)
    assert (config.hidden_size, config.tie_word_embeddings, config.num_hidden_layers) == (
        64,
        True,
        2,
    )
    assert architecture_of(source) == "Qwen3ForCausalLM"
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        config_of(ModelSource(path=str(folder), config_overrides={"hidden_size": "wide"}))


@pytest.mark.parametrize("key", ["num_labels", "num_hidden_layers"])
@pytest.mark.parametrize("overrides", [False, True], ids=["in the file", "as an override"])
def test_counts_that_no_model_has_are_refused_before_a_list_is_made(
    folder: Path, key: str, overrides: bool
) -> None:
    count = 2**17 + 1
    config = folder / "config.json"
    if not overrides:
        config.write_text(json.dumps(json.loads(config.read_text()) | {key: count}))
    source = ModelSource(path=str(folder), config_overrides={key: count} if overrides else {})
    with pytest.raises(ConfigError, match=f"expected at most 131,072 as {key}, got 131,073"):
        config_of(source)

"""Fuzz tests of ``engine.model.config_overrides``.

The model's configuration has any given key and value, or a ``ConfigError`` names the key.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from damaged_folders import whole_folder
from fuzzing import fuzz
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoConfig, PreTrainedConfig

from engine_api.config import ModelSource
from engine_api.errors import ConfigError
from engine_api.registry import RolloutRegistry
from engine_trainer.placement.memory import count_parameters
from engine_trainer.utils.hf_models import text_config

FIELD = "engine.model.config_overrides"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> ModelSource:
    return ModelSource(path=str(whole_folder(tmp_path_factory.mktemp("model"), "qwen3")))


# Arguments of from_pretrained, methods, properties and what decides about the family.
NO_KEYS = [
    "revision",
    "trust_remote_code",
    "return_unused_kwargs",
    "cache_dir",
    "pretrained_model_name_or_path",
    "cls",
    "self",
    "get_text_config",
    "to_dict",
    "__class__",
    "__dict__",
    "use_return_dict",
    "attribute_map",
    "sub_configs",
    "model_type",
    "_attn_implementation",
    "hidden_sise",
    "",
]


@pytest.mark.parametrize("key", NO_KEYS)
def test_what_is_no_key_of_the_model_is_refused_by_name(source, key) -> None:
    odd = replace(source, config_overrides={key: True})
    with pytest.raises(ConfigError, match="no such key") as caught:
        text_config(odd)
    assert caught.value.field == f"{FIELD}.{key}"
    with pytest.raises(ConfigError, match="no such key") as caught:
        count_parameters(odd)
    assert caught.value.field == f"{FIELD}.{key}"
    with pytest.raises(ConfigError, match="no such key") as caught:
        RolloutRegistry.create(name="local", device="cpu", model=odd, pad_token_id=0)
    assert caught.value.field == f"model.config_overrides.{key}"


def test_a_value_that_the_family_does_not_take_is_refused_by_name(source) -> None:
    for key, value in (
        ("hidden_size", "wide"),
        ("num_labels", "x"),
        ("rope_parameters", 3),
        ("hidden_size", -1),
    ):
        with pytest.raises(ConfigError) as caught:
            text_config(replace(source, config_overrides={key: value}))
        assert caught.value.field.startswith(FIELD)
        assert key in str(caught.value)


def test_what_is_overridden_is_what_every_reader_sees(source) -> None:
    smaller = replace(source, config_overrides={"num_hidden_layers": 1})
    assert text_config(smaller).num_hidden_layers == 1
    assert count_parameters(smaller) < count_parameters(source)


PLAIN = st.one_of(st.none(), st.booleans(), st.integers(-2, 70), st.floats(), st.text(max_size=4))
VALUES = st.one_of(
    PLAIN, st.lists(PLAIN, max_size=3), st.dictionaries(st.text(max_size=4), PLAIN, max_size=3)
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers, about odd values
@fuzz()
@given(data=st.data())
@example(data={"id2label": 3})
@example(data={"text_config": 3})
def test_an_override_of_any_kind_is_taken_or_named(source, data) -> None:
    if isinstance(data, dict):
        overrides = data
    else:
        known = sorted(json.loads(AutoConfig.from_pretrained(source.path).to_json_string()))
        keys = st.sampled_from([*known, *NO_KEYS, *dir(PreTrainedConfig)])
        overrides = data.draw(
            st.dictionaries(keys, VALUES, min_size=1, max_size=2), label="overrides"
        )
    try:
        found = text_config(replace(source, config_overrides=overrides))
    except ConfigError as error:
        refused = error.field
        assert refused.startswith(FIELD)
    else:
        assert isinstance(found, PreTrainedConfig)


def test_an_override_with_parts_is_counted_too(source) -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}
    assert count_parameters(replace(source, config_overrides=rope)) == count_parameters(source)

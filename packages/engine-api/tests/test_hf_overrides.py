"""Tests of overrides of a model's config.json: each has its effect, or is refused."""

from __future__ import annotations

import pytest

from engine_api.errors import ConfigError
from engine_api.hf_overrides import override

transformers = pytest.importorskip("transformers")


def qwen3(**keys):
    return transformers.Qwen3Config(num_hidden_layers=2, **keys)


# transformers warns of a name that it still takes; an override has the name that the user gave it.
rope_scaling_is_deprecated = pytest.mark.filterwarnings(
    "ignore:`rope_scaling` is deprecated:FutureWarning"
)
WINDOWED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


@rope_scaling_is_deprecated
@pytest.mark.parametrize(
    ("keys", "overrides", "field"),
    [
        ({}, {"hidden_sise": 1}, "hidden_sise"),
        ({}, {"rope_scaling": None}, "rope_scaling"),
        ({}, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ({}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters"),
        ({}, {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
        ({}, {"sliding_window": 8}, "sliding_window"),
        (WINDOWED, {"use_sliding_window": False}, "use_sliding_window"),
        (WINDOWED, {"max_window_layers": 2}, "max_window_layers"),
    ],
    ids=str,
)
def test_what_would_have_no_effect_or_half_of_it_is_refused(keys, overrides, field):
    with pytest.raises(ConfigError) as caught:
        override(qwen3(**keys), overrides)
    assert caught.value.field == f"model.config_overrides.{field}"
    assert caught.value.remedy


@pytest.mark.parametrize("key", ["rotary_dim", "partial_rotary_factor"])
def test_the_rotated_part_of_heads_is_overridden_with_all_of_rope(key):
    config = transformers.MiniMaxM2Config(
        head_dim=64, rotary_dim=32, partial_rotary_factor=0.5, num_hidden_layers=2
    )
    with pytest.raises(ConfigError, match="would have no effect") as caught:
        override(config, {key: 16})
    assert caught.value.field == f"model.config_overrides.{key}"
    assert "override rope_parameters, with partial_rotary_factor" in caught.value.remedy
    rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.25}
    override(config, {"rope_parameters": rope})
    assert config.rope_parameters["partial_rotary_factor"] == 0.25


@rope_scaling_is_deprecated
@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        (
            "rope_scaling",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            "add rope_theta: 500000.0 to it",
        ),
        ("rope_scaling", None, "give rope_parameters: {rope_type: default, rope_theta: 500000.0}"),
    ],
    ids=str,
)
def test_rope_without_its_base_is_told_the_one_of_the_file(key, value, remedy):
    with pytest.raises(ConfigError) as caught:
        override(qwen3(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), {key: value})
    assert caught.value.remedy == remedy


@rope_scaling_is_deprecated
def test_rope_of_several_kinds_of_layers_is_told_each_base():
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    with pytest.raises(
        ConfigError,
        match=r"add rope_theta: 1000000\.0 \(full_attention\), "
        r"10000\.0 \(sliding_attention\) to it",
    ):
        override(
            transformers.Gemma3TextConfig(rope_parameters=rope),
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        )


@pytest.mark.parametrize(
    ("keys", "overrides"),
    [
        ({}, {"rms_norm_eps": 0.5}),
        (WINDOWED, {"sliding_window": 4}),
        (WINDOWED, {"sliding_window": None}),
        ({}, {"use_sliding_window": False}),
        ({}, {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}),
        ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    ],
    ids=str,
)
def test_what_has_its_effect_is_set(keys, overrides):
    config = qwen3(**keys)
    override(config, overrides)
    for key, value in overrides.items():
        assert getattr(config, key) == value


def test_the_window_of_a_family_without_types_of_layers_is_its_own():
    config = transformers.Qwen3MoeConfig(num_hidden_layers=2)
    override(config, {"sliding_window": 8})
    assert config.sliding_window == 8
    with pytest.raises(ConfigError, match="use_sliding_window"):
        override(transformers.Qwen3MoeConfig(num_hidden_layers=2), {"use_sliding_window": True})

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


def test_the_width_of_heads_is_overridden_with_the_part_that_is_rotated():
    config = transformers.MiniMaxM2Config(
        head_dim=64, rotary_dim=32, partial_rotary_factor=0.5, num_hidden_layers=2
    )
    with pytest.raises(ConfigError, match="would have no effect on the part") as caught:
        override(config, {"head_dim": 32})
    assert caught.value.field == "model.config_overrides.head_dim"
    rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 1.0}
    override(config, {"head_dim": 32, "rope_parameters": rope})
    assert config.head_dim == 32


def test_the_rotated_part_of_heads_is_overridden_where_a_family_reads_it():
    """GPT-J has no parameters of RoPE."""
    config = transformers.GPTJConfig(n_head=4, n_embd=256, rotary_dim=64)
    override(config, {"rotary_dim": 32})
    assert config.rotary_dim == 32


PLAIN = {"rope_type": "default", "rope_theta": 1e6}
PARTIAL = {
    "minimax_m2": lambda: transformers.MiniMaxM2Config(
        head_dim=128, rotary_dim=64, partial_rotary_factor=0.5, num_hidden_layers=2
    ),
    "phi": lambda: transformers.PhiConfig(num_hidden_layers=2),
}


@rope_scaling_is_deprecated
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("family", PARTIAL)
def test_rope_without_the_rotated_part_of_heads_is_told_the_one_of_the_file(family, key):
    with pytest.raises(ConfigError, match="leaves RoPE without partial_rotary_factor") as caught:
        override(PARTIAL[family](), {key: PLAIN | {"rope_type": "linear", "factor": 2.0}})
    assert caught.value.field == f"model.config_overrides.{key}"
    assert caught.value.remedy == (
        "add partial_rotary_factor: 0.5 to it, or 1.0 for a rotation of whole heads"
    )
    for factor in (0.5, 1.0):
        config = PARTIAL[family]()
        override(config, {key: PLAIN | {"partial_rotary_factor": factor}})
        assert config.rope_parameters["partial_rotary_factor"] == factor


def test_rope_without_base_and_rotated_part_is_told_both():
    with pytest.raises(ConfigError) as caught:
        override(PARTIAL["minimax_m2"](), {"rope_parameters": {"rope_type": "default"}})
    assert caught.value.remedy == "add rope_theta: 5000000.0, partial_rotary_factor: 0.5 to it"


def test_a_rotation_of_whole_heads_needs_no_part():
    config = transformers.MiniMaxM2Config(
        head_dim=64, partial_rotary_factor=1.0, num_hidden_layers=2
    )
    override(config, {"rope_parameters": PLAIN})
    assert config.rope_parameters == PLAIN


def layered():
    """Return a configuration in which one of two types of layers rotates half of each head."""
    return transformers.LagunaConfig(
        num_hidden_layers=2,
        layer_types=["full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": PLAIN | {"partial_rotary_factor": 0.5},
            "sliding_attention": PLAIN | {"partial_rotary_factor": 1.0},
        },
    )


@pytest.mark.parametrize("rope", [{"full_attention": PLAIN, "sliding_attention": PLAIN}, PLAIN])
def test_each_type_of_layers_needs_its_rotated_part(rope):
    with pytest.raises(ConfigError, match=r"partial_rotary_factor: 0\.5 \(full_attention\) to it"):
        override(layered(), {"rope_parameters": rope})


def test_a_type_of_layers_that_rotates_whole_heads_needs_no_part():
    rope = {
        "full_attention": PLAIN | {"partial_rotary_factor": 0.25},
        "sliding_attention": PLAIN,
    }
    config = layered()
    override(config, {"rope_parameters": rope})
    assert config.rope_parameters == rope


def test_rope_by_type_of_layers_needs_the_rotated_part_of_all_layers():
    config = transformers.Qwen3Config(
        num_hidden_layers=2, rope_parameters=PLAIN | {"partial_rotary_factor": 0.5}
    )
    with pytest.raises(ConfigError, match=r"partial_rotary_factor: 0\.5 \(full_attention\) to it"):
        override(config, {"rope_parameters": {"full_attention": PLAIN}})


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

"""Each field of ``config.json`` is computed as transformers does, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from folder_checks import check_right, create_on, edit_config
from tiny_models import models_of, tiny_model

from engine_api.errors import ConfigError, EngineError, UnsupportedCapability
from engine_torchtitan.families import FAMILIES

TAKEN = models_of("torchtitan", "cpu_torchtitan")
REFUSED = ("gemma3_text", "glm4_moe", "mistral", "qwen2", "qwen3_5_text")
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.5},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("model_type", sorted(TAKEN))
def test_a_family_is_computed_as_transformers_does(tmp_path: Path, model_type: str) -> None:
    tiny_model(model_type).save_pretrained(tmp_path)
    check_right("torchtitan", tmp_path)


def test_the_families_of_the_matrix_are_those_of_the_engine() -> None:
    assert set(FAMILIES) == TAKEN


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize(
    "fields",
    [
        {"rms_norm_eps": 0.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 40.0}},
        {"head_dim": 16},
        {"tie_word_embeddings": True},
        *({"rope_parameters": {"rope_type": k, "rope_theta": 40.0, **v}} for k, v in ROPES.items()),
    ],
    ids=str,
)
def test_a_field_has_the_effect_that_it_has_in_transformers(
    tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    if family == "deepseek_v3" and "head_dim" in fields:
        # The rotated part of a latent head, which has another name for the same size.
        fields = fields | {"qk_rope_head_dim": fields["head_dim"]}
    tiny_model(family, **fields).save_pretrained(tmp_path)
    check_right("torchtitan", tmp_path)


@pytest.mark.parametrize("model_type", REFUSED)
def test_another_family_is_refused_by_name(tmp_path: Path, model_type: str) -> None:
    tiny_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=model_type) as caught:
        create_on("torchtitan", tmp_path).initialize()
    assert "fsdp2" in caught.value.remedy


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"logit_scale": 2.0}, "logit_scale"),
        ({"invented_by_a_vendor": 3}, "invented_by_a_vendor"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type: 'dynamic'",
        ),
    ],
    ids=str,
)
def test_a_field_without_a_mapping_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises(UnsupportedCapability, match=named) as caught:
        create_on("torchtitan", tmp_path).initialize()
    assert "fsdp2" in caught.value.remedy


def test_a_window_in_some_layers_is_refused_by_name(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    edit_config(tmp_path, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    with pytest.raises(UnsupportedCapability, match="sliding"):
        create_on("torchtitan", tmp_path).initialize()


def test_a_field_that_changes_nothing_may_be_set_to_null(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    edit_config(tmp_path, invented_by_a_vendor=3)
    engine = create_on("torchtitan", tmp_path, config_overrides={"invented_by_a_vendor": None})
    engine.initialize()
    engine.close()


def test_random_weights_are_the_same_at_each_start(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    found: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        engine = create_on("torchtitan", tmp_path, init="random")
        engine.initialize()
        found.append({name: one.clone() for name, one in engine.get_per_tensor_param()})
        engine.close()
    assert list(found[0]) == list(found[1])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert float(found[0]["model.embed_tokens.weight"].std()) > 0


def test_a_folder_with_its_own_code_is_refused_where_the_code_was_asked_for(
    tmp_path: Path,
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    edit_config(tmp_path, auto_map={"AutoModelForCausalLM": "own.Model"})
    with pytest.raises(ConfigError, match="brings its own code") as caught:
        create_on("torchtitan", tmp_path, trust_remote_code=True).initialize()
    assert caught.value.field == "model.trust_remote_code"

"""Each field of ``config.json`` is computed as transformers does, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from folder_checks import check_right, create_on, edit_config
from tiny_models import models_of, tiny_model

from engine_api.errors import ConfigError, EngineError, UnsupportedCapability
from engine_automodel.library import FAMILIES

TAKEN = models_of("automodel", "cpu_automodel")
REFUSED = ("gemma3_text", "mistral", "qwen3_5_text")
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
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@pytest.mark.parametrize("model_type", sorted(TAKEN))
def test_a_family_is_computed_as_transformers_does(tmp_path: Path, model_type: str) -> None:
    tiny_model(model_type).save_pretrained(tmp_path)
    check_right("automodel", tmp_path)


def test_the_families_of_the_matrix_are_those_of_the_engine() -> None:
    assert set(FAMILIES) == TAKEN


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize(
    "fields",
    [
        {"rms_norm_eps": 0.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 40.0}},
        *({"rope_parameters": {"rope_type": k, "rope_theta": 40.0, **v}} for k, v in ROPES.items()),
    ],
    ids=str,
)
def test_a_field_has_the_effect_that_it_has_in_transformers(
    tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    tiny_model(family, **fields).save_pretrained(tmp_path)
    check_right("automodel", tmp_path)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"deepseek_v3", "glm4_moe_lite"}))
def test_the_width_of_heads_is_that_of_the_configuration(tmp_path: Path, family: str) -> None:
    tiny_model(family, head_dim=16).save_pretrained(tmp_path)
    check_right("automodel", tmp_path)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"hidden_act": "gelu"}),
        ("qwen2", WINDOW),
        ("qwen3", WINDOW),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"mlp_only_layers": [1]}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
        ("qwen3_moe", {"router_aux_loss_coef": 0.5}),
        ("deepseek_v3", {"norm_topk_prob": False, "routed_scaling_factor": 1.7}),
        ("deepseek_v3", {"qk_nope_head_dim": 16, "qk_head_dim": 5}),
        ("gpt_oss", {"router_aux_loss_coef": 0.5}),
        ("gpt_oss", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}),
        ("glm4_moe", {"use_qk_norm": True, "attention_bias": True}),
        ("minimax_m2", {"use_qk_norm": False, "scoring_func": "softmax"}),
    ],
    ids=str,
)
def test_a_field_of_a_family_has_the_effect_that_it_has_in_transformers(
    tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    tiny_model(family, **fields).save_pretrained(tmp_path)
    check_right("automodel", tmp_path)


@pytest.mark.parametrize("model_type", REFUSED)
def test_another_family_is_refused_by_name(tmp_path: Path, model_type: str) -> None:
    tiny_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=model_type) as caught:
        create_on("automodel", tmp_path).initialize()
    assert "fsdp2" in caught.value.remedy


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type: 'dynamic'",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor: 0.5",
        ),
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3_moe", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("qwen3_moe", WINDOW, "use_sliding_window"),
        ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 1}, "num_experts_per_tok"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
        ("deepseek_v3", {"hidden_act": "gelu"}, "hidden_act"),
        ("deepseek_v3", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("deepseek_v3", {"head_dim": 4}, "head_dim"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha"),
        ("gpt_oss", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("glm4_moe_lite", {"rope_interleave": False}, "rope_interleave"),
        ("glm4_moe_lite", {"attention_bias": True}, "attention_bias"),
        ("glm4_moe", {"hidden_act": "gelu"}, "hidden_act"),
        ("glm4_moe", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("minimax_m2", {"hidden_act": "gelu"}, "hidden_act"),
        ("minimax_m2", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("minimax_m2", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
    ],
    ids=str,
)
def test_a_field_that_would_be_computed_differently_is_refused_by_name(
    tmp_path: Path, family: str, fields: dict[str, Any], named: str
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises(UnsupportedCapability, match=named) as caught:
        create_on("automodel", tmp_path).initialize()
    assert "fsdp2" in caught.value.remedy


def test_random_weights_are_the_same_at_each_start(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    found: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        engine = create_on("automodel", tmp_path, init="random")
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
        create_on("automodel", tmp_path, trust_remote_code=True).initialize()
    assert caught.value.field == "model.trust_remote_code"

"""Small models of large ones: the same modules, ratios and vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine_api.config import ModelSource
from engine_api.errors import ConfigError
from engine_trainer.rehearsal.shrink import describe_needs, shrink, write_small_model

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "sliding_window": 1024,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
PHI3_LONG = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32064,
    "pad_token_id": 0,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "long_factor": [1.0 + i for i in range(48)],
        "short_factor": [1.0] * 48,
    },
}


def write(folder: Path, config: dict) -> ModelSource:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return ModelSource(path=str(folder))


@pytest.mark.parametrize(
    "config",
    [QWEN3_MOE, GEMMA3, DEEPSEEK, PHI3_LONG],
    ids=lambda config: config["model_type"],
)
def test_a_small_model_has_the_modules_of_the_large_one_and_can_be_made(
    config: dict, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    changed = write_small_model(write(tmp_path / "large", config), tmp_path / "small")

    small = AutoConfig.from_pretrained(tmp_path / "small")
    assert small.vocab_size == config["vocab_size"]
    assert changed["hidden_size"] == (config["hidden_size"], 64)
    model = AutoModelForCausalLM.from_config(small)
    body = sum(p.numel() for p in model.parameters()) - 2 * 64 * config["vocab_size"]
    assert body < 1_000_000


def test_every_kind_of_layer_and_the_ratio_of_heads_are_kept() -> None:
    small = shrink(GEMMA3)
    assert small["layer_types"] == ["sliding_attention", "full_attention"]
    assert (small["num_attention_heads"], small["num_key_value_heads"]) == (4, 2)
    assert shrink(DEEPSEEK)["num_key_value_heads"] == 4
    assert shrink({**GEMMA3, "num_key_value_heads": 1})["num_key_value_heads"] == 1
    assert shrink(QWEN3_MOE)["rope_parameters"] == QWEN3_MOE["rope_parameters"]


def test_a_pattern_by_steps_keeps_as_many_layers_as_it_takes() -> None:
    small = shrink({**QWEN3_MOE, "decoder_sparse_step": 3})
    assert small["num_hidden_layers"] == 3


def test_a_model_that_is_not_here_says_which_files_a_rehearsal_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name a folder with them") as caught:
        write_small_model(ModelSource(path=str(tmp_path / "none")), tmp_path / "small")
    assert "no weights" in caught.value.remedy
    assert "hf download owner/name" in describe_needs(ModelSource(path="owner/name"))


def test_a_model_whose_kinds_of_modules_would_change_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = {**QWEN3_MOE, "mlp_only_layers": list(range(48))}
    monkeypatch.setattr(
        "engine_trainer.rehearsal.shrink.shrink", lambda large: {**large, "mlp_only_layers": []}
    )
    with pytest.raises(ConfigError, match="--model FOLDER") as caught:
        write_small_model(write(tmp_path / "large", dense), tmp_path / "small")
    assert "Qwen3MoeSparseMoeBlock" in caught.value.why

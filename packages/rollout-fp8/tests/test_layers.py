"""Table of quantized layers against transformers' models and the servers' rules for layers."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model, tiny_pictured_model
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from engine_api.errors import ConfigError, RolloutError
from engine_api.hf_names import pieces_of
from rollout_fp8.fp8.layers import ARCHITECTURES, kind, server_config

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}
LATENT = {
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
CONFIGS = {
    "llama": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
    "qwen3-moe": Qwen3MoeConfig(
        **SMALL, num_experts=4, moe_intermediate_size=32, mlp_only_layers=[1]
    ),
    "deepseek-v2": DeepseekV2Config(**SMALL, **LATENT, q_lora_rank=None),
    "deepseek-v3": DeepseekV3Config(**SMALL, **LATENT, q_lora_rank=16),
}


def names(config: PretrainedConfig) -> tuple[str, dict[str, str]]:
    """Yield each architecture with the kind of every checkpoint name."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    architecture = type(model).__name__
    saved = [piece.name for pieces in pieces_of(model).values() for piece in pieces]
    return architecture, {name: kind(architecture, name) for name in saved}


@pytest.mark.parametrize("family", CONFIGS)
def test_every_linear_layer_of_a_decoder_layer_is_quantized_but_routers(family: str) -> None:
    _, kinds = names(CONFIGS[family])
    for name, found in kinds.items():
        is_weight = name.startswith("model.layers.") and name.endswith("_proj.weight")
        assert found == (
            "quantized" if is_weight or name.endswith("_with_mqa.weight") else "plain"
        ), name
    assert {
        kinds[n] for n in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight")
    } == {"plain"}


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_a_router_gate_is_plain_and_gate_proj_is_not(family: str) -> None:
    moe, dense = (0, 1) if family == "qwen3-moe" else (1, 0)
    _, kinds = names(CONFIGS[family])
    assert kinds[f"model.layers.{moe}.mlp.gate.weight"] == "plain"
    assert kinds[f"model.layers.{moe}.mlp.experts.3.gate_proj.weight"] == "quantized"
    assert kinds[f"model.layers.{dense}.mlp.gate_proj.weight"] == "quantized"


def test_the_correction_bias_of_a_checkpoint_is_plain() -> None:
    assert (
        kind("DeepseekV3ForCausalLM", "model.layers.3.mlp.gate.e_score_correction_bias") == "plain"
    )


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate_up_proj.weight",  # fused in memory, in no checkpoint
        "model.layers.x.mlp.up_proj.weight",
        "model.layers.0.mlp.up_projXweight",
        "model.layers.0.mlp.up_proj.weight.more",
        "prefix.model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.gate.weight",  # a dense model has no router
        "model.layers.0.self_attn.kv_b_proj.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "lm_head.weight_scale_inv",  # already quantized
        "model.model.norm.weight",
    ],
)
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(RolloutError, match="in no row of the layer table") as error:
        kind("Qwen3ForCausalLM", name)
    assert (
        name in error.value.what and "Qwen3ForCausalLM" in error.value.what and error.value.remedy
    )


def test_an_unknown_architecture_is_refused_with_the_list() -> None:
    for call in (
        lambda: kind("GptOssForCausalLM", "lm_head.weight"),
        lambda: server_config("GptOssForCausalLM", 2),
    ):
        with pytest.raises(ConfigError, match="GptOssForCausalLM") as error:
            call()
        assert all(name in error.value.why for name in ARCHITECTURES)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_servers_leave_exactly_the_plain_linear_modules(family: str) -> None:
    """Check that the servers quantize every linear module that is not named.

    Embeddings, norms and the LM head are no linear modules to them.
    """
    architecture, kinds = names(CONFIGS[family])
    config = server_config(architecture, 2)
    skipped = config.pop("modules_to_not_convert")
    assert config == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    linear = {
        n.removesuffix(".weight")
        for n in kinds
        if n.endswith(("_proj.weight", "_with_mqa.weight", ".gate.weight"))
    }
    plain = {n for n in linear if kinds[f"{n}.weight"] == "plain"}
    assert linear & set(skipped) == plain
    # SGLang compares whole parts of dotted names, and a fused module's parts with all of theirs: no
    # prefix may be named.
    assert not [n for n in linear - plain for s in skipped if f".{s}." in f".{n}."]


TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "arcee", "cohere", "cwm", "ernie4_5", "exaone4"),
    *("gemma", "gemma2", "gemma3_text", "granite", "jais2", "nemotron", "olmo3", "seed_oss"),
    *("stablelm", "glm", "glm4", "phi3", "qwen3_moe", "ernie4_5_moe", "glm4_moe", "olmoe"),
    *("qwen2_moe", "mixtral", "minimax_m2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    "minicpm3",
)


def is_router(name: str, module: torch.nn.Module) -> bool:
    return "Router" in type(module).__name__ or name.rpartition(".")[2] in ("gate", "router")


@pytest.mark.parametrize("model_type", TYPES)
def test_what_transformers_computes_by_a_product_in_a_layer_is_quantized(model_type: str) -> None:
    model = tiny_model(model_type)
    architecture = type(model).__name__
    products = set[str]()
    plain_modules = set[str]()
    for parent, module in model.named_modules():
        if ".layers." not in parent:
            continue
        if is_router(parent, module) or parent.endswith("shared_expert_gate"):
            plain_modules.add(parent)
            continue
        for name, parameter in module.named_parameters(recurse=False):
            # Stacked experts have three dimensions.
            if (isinstance(module, torch.nn.Linear) and name == "weight") or parameter.dim() == 3:
                products.add(f"{parent}.{name}")
    assert products
    saved = {name: [piece.name for piece in pieces] for name, pieces in pieces_of(model).items()}
    assert products <= saved.keys()
    for name, pieces in saved.items():
        wanted = "quantized" if name in products else "plain"
        assert {kind(architecture, piece) for piece in pieces} == {wanted}, name
    named = {*server_config(architecture, model.config.num_hidden_layers)["modules_to_not_convert"]}
    gates = {
        piece.removesuffix(".weight")
        for name, pieces in saved.items()
        for piece in pieces
        if name.removesuffix(".weight") in plain_modules
    }
    # Dense layers of such a model have no gate.
    assert gates <= named
    assert bool(gates) == bool(named - {"lm_head"})
    # SGLang compares whole parts of dotted names: no prefix of another module may be named.
    linear = {piece.removesuffix(".weight") for one in products for piece in saved[one]}
    assert not [n for n in linear for one in named if f".{one}." in f".{n}."]


def test_each_architecture_of_the_table_is_compared() -> None:
    of_types = {type(tiny_model(one)).__name__ for one in TYPES}
    pictured = {type(tiny_pictured_model(one)).__name__ for one in PICTURED}
    assert of_types | pictured == {*ARCHITECTURES}


PICTURED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.mark.parametrize("family", PICTURED)
def test_a_tower_and_its_projector_are_plain_and_the_language_model_is_as_without_one(family):
    model = tiny_pictured_model(family)
    (architecture,) = (type(model).__name__,)
    kinds = {
        piece.name: kind(architecture, piece.name)
        for pieces in pieces_of(model).values()
        for piece in pieces
    }
    tower = {name for name in kinds if "visual" in name}
    assert tower
    assert {kinds[name] for name in tower} == {"plain"}
    linear = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "visual" not in name and name != "lm_head"
    }
    quantized = {name for name, found in kinds.items() if found == "quantized"}
    assert len(quantized) == len(linear)


@pytest.mark.parametrize("family", PICTURED)
def test_every_linear_module_of_a_tower_is_named_to_the_servers(family):
    model = tiny_pictured_model(family)
    named = server_config(type(model).__name__, 2, 2)["modules_to_not_convert"]
    tower = {
        piece.name.removesuffix(".weight")
        for name, pieces in pieces_of(model).items()
        for piece in pieces
        if "visual" in name
        and name.endswith(".weight")
        and isinstance(model.get_submodule(name.removesuffix(".weight")), torch.nn.Linear)
    }
    assert tower
    assert tower <= {*named}

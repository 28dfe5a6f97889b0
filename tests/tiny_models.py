"""Tiny random models of every causal language model that transformers knows.

A configuration is made from the family's own defaults, with the keys for sizes replaced. The only
keys of a family listed here are the few whose values depend on each other.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

VOCABULARY = 64
WINDOW = 12
"""Tokens in sliding windows and chunks, fewer than in most documents."""
DOCUMENTS = (23, 37, 14)
GATE_KEYS = {"swiglu_limit", "swiglu_alpha"}
"""Keys of the gate of gpt-oss, a constant of the class in transformers before 5.19."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "max_seq_len": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "lru_width": 32,
    "hidden_size_per_layer_input": 8,
    "embedding_dim": 32,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "n_inner": 64,
    "mlp_hidden_size": 64,
    "ffn_hidden_size": 64,
    "shared_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "intermediate_size_mlp": 64,
    "expert_ffn_hidden_size": 16,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "num_layers": 4,
    "n_layers": 4,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "kv_channels": 8,
    "attention_head_dim": 8,
    "rotary_dim": 4,
    "global_head_dim": 8,
    "num_global_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "attention_window_size": WINDOW,
    "window_size": WINDOW,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "mamba_d_state": 8,
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "state_size": 8,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
    # Values that change the scores of a tiny model.
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 2.0,
    "logits_soft_cap": 2.0,
    "logits_scaling": 3.0,
    "lm_head_multiplier": 0.5,
    "initializer_range": 0.2,
    "dtype": "float32",
}

# Kernels of servers have a smallest width of heads and experts.
_WIDE = """
d_model embedding_dim embedding_size ffn_dim ffn_hidden_size hidden_size intermediate_size
intermediate_size_mlp lru_width mlp_hidden_size n_embd n_inner word_embed_proj_dim
"""
_NARROW = """
attention_head_dim expert_ffn_hidden_size global_head_dim head_dim hidden_size_per_layer_input
index_head_dim kv_channels mamba_d_head mamba_head_dim moe_intermediate_size
moe_shared_expert_intermediate_size q_lora_rank qk_nope_head_dim shared_expert_intermediate_size
shared_intermediate_size v_head_dim
"""
SERVED_SIZES: dict[str, Any] = {
    **dict.fromkeys(_WIDE.split(), 128),
    **dict.fromkeys(_NARROW.split(), 32),
    # vLLM's kernel of latent attention for CPUs takes these alone.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 96,
    # FlashInfer's kernels of linear attention take this one alone, and those for CPUs no 32.
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128),
    # Wider layers of weights as large would add up to values that float32 is too coarse for.
    "initializer_range": 0.05,
    # Engines refuse to train with what acts in training alone.
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    **dict.fromkeys(("attention_dropout", "dropout", "residual_dropout"), 0.0),
}

# Widths of heads, states and experts in kernels for GPUs, and blocks of 128 in FP8.
_WIDE_ON_GPU = """
expert_ffn_hidden_size index_head_dim moe_intermediate_size moe_shared_expert_intermediate_size
q_lora_rank qk_nope_head_dim shared_expert_intermediate_size shared_intermediate_size v_head_dim
"""
_NARROW_ON_GPU = """
attention_head_dim global_head_dim head_dim kv_channels mamba_d_head mamba_d_state mamba_head_dim
ssm_state_size state_size
"""
SERVED_ON_GPU_SIZES: dict[str, Any] = {
    **SERVED_SIZES,
    **dict.fromkeys(_WIDE_ON_GPU.split(), 128),
    **dict.fromkeys(_NARROW_ON_GPU.split(), 64),
    # Families without a width of heads divide this one by their number, which is 4.
    "hidden_size": 256,
    "qk_head_dim": 192,
}

# Families leave these sizes open, and derive them from other sizes or not at all.
_ALSO_OPEN = ("head_dim", "num_experts_per_tok", "num_key_value_heads")

_INKLING2 = {
    "unpadded_vocab_size": VOCABULARY,
    "sliding_window_size": WINDOW,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
}
# The sizes of these families depend on each other.
_FAMILIES: dict[str, dict[str, Any]] = {
    "dots1": {
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 16},
    "inkling2_loop_text": _INKLING2,
    "inkling2_text": _INKLING2,
    "mamba2": {"num_heads": 4, "head_dim": 16},
    # transformers reads this part of each head alone, and passes over rotary_dim.
    "minimax_m3_vl_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    },
    "zaya": {"num_experts_per_tok": 1},
}

# These families have tiny models and compute in float64. fuyu is left out: it has a vision tower,
# its language model is persimmon, and since transformers 5.24 its sizes are those of two nested
# configurations, whose defaults make 9 billion parameters.
_MODEL_TYPES = """
afmoe apertus arcee aria_text axk1 axk2 bamba bert bert-generation big_bird biogpt bitnet
blenderbot-small bloom camembert codegen cohere cohere2 cohere2_moe cwm data2vec-text deepseek_v2
deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1 electra ernie ernie4_5 ernie4_5_moe
exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo gemma gemma2 gemma3_text
gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3 gpt2
gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa
granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4
hyperclovax jais2 jamba jetmoe laguna lfm2 llama llama4_text longcat_flash mamba mamba2
megatron-bert mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral
ministral3 mistral mixtral modernbert-decoder moshi mpt nanochat nemotron nemotron_h olmo olmo2
olmo3 olmo_hybrid olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3
qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next recurrent_gemma rembert roberta
roberta-prelayernorm roformer rwkv seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma
xlm-roberta xlm-roberta-xl xlstm youtu zaya
"""
MODEL_TYPES = tuple(_MODEL_TYPES.split())


def models_of(name: str, environment: str) -> frozenset[str]:
    """Return the model types that matrix.toml says an engine or rollout computes there."""
    matrix = tomllib.loads((Path(__file__).parents[1] / "matrix.toml").read_text())
    (found,) = [
        run["models"]
        for part in [*matrix["engines"], *matrix["rollouts"]]
        if name == (part.get("backend") or part["name"])
        for run in part["runs"]
        if run["environment"] == environment and "models" in run
    ]
    return frozenset(found)


def some_nightly(model_types: Sequence[str], *, taken: frozenset[str]) -> list[Any]:
    """Return the parameters of a test over model types.

    Types that are taken are tested in CI, and every eighth of those that are refused. The rest is
    for `nox -s nightly`.
    """
    refused = [name for name in model_types if name not in taken]
    now = {*taken, *refused[::8]}
    return [
        pytest.param(name, marks=() if name in now else pytest.mark.nightly) for name in model_types
    ]


def tiny_config(model_type: str, *, sizes: Mapping[str, Any] | None = None, **changes: Any) -> Any:
    """Return a tiny configuration of a family.

    ``sizes`` replaces sizes by key where the family has the key. Raises the error of transformers
    where the family has no such sizes.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[model_type]
    defaults = made().to_dict()
    known = {
        key: value
        for key, value in (_SIZES | dict(sizes or {})).items()
        if key in defaults and (defaults[key] is not None or key in _ALSO_OPEN)
    }
    # In latent attention each head has keys of its own, and the rotated part has the heads' size.
    if "kv_lora_rank" in known:
        known["num_key_value_heads"] = known["num_attention_heads"]
        if "head_dim" in known:
            known["head_dim"] = known["qk_rope_head_dim"]
    # Some configurations write into the values that they are given.
    return made(**copy.deepcopy(known | _FAMILIES.get(model_type, {}) | changes))


def tiny_model(model_type: str, *, sizes: Mapping[str, Any] | None = None, **changes: Any) -> Any:
    """Return a model of a family with random weights.

    No weight has a value that would hide it, such as 0 or 1. The arguments are those of
    ``tiny_config``.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(model_type, sizes=sizes, **changes))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


IMAGE = 60
VIDEO = 61
_MULTIMODAL: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": 62,
    "vision_end_token_id": 63,
}
_PATCH_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
_POSITIONED_TOWER = _PATCH_TOWER | {"num_position_embeddings": 16}
_DEEP_TOWER = _POSITIONED_TOWER | {"deepstack_visual_indexes": [0]}
_IMAGE_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_SECTIONS: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_WHOLE_HEADS = {"partial_rotary_factor": 1.0}
# By family the text model's type, keys of its own, the tower's keys, and those of the whole.
_PICTURED: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        "qwen2_vl_text",
        {"rope_parameters": _SECTIONS},
        {**_PATCH_TOWER, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
        _MULTIMODAL,
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl_text",
        {"rope_parameters": _SECTIONS},
        # A window of two by two features, smaller than the images, in one of two layers.
        {**_PATCH_TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
        _MULTIMODAL,
    ),
    "qwen3_vl": ("qwen3_vl_text", {"rope_parameters": _SECTIONS}, _DEEP_TOWER, _MULTIMODAL),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", {"rope_parameters": _SECTIONS}, _DEEP_TOWER, _MULTIMODAL),
    "qwen3_5": (
        "qwen3_5_text",
        {"rope_parameters": _SECTIONS | _WHOLE_HEADS},
        _POSITIONED_TOWER,
        _MULTIMODAL,
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {"rope_parameters": _SECTIONS | _WHOLE_HEADS},
        _POSITIONED_TOWER,
        _MULTIMODAL,
    ),
    "gemma3": (
        "gemma3_text",
        # A window that is shorter than an image and the text around it.
        {"sliding_window": 6},
        {**_IMAGE_TOWER, "image_size": 16, "patch_size": 4, "vision_use_head": False},
        {"mm_tokens_per_image": 4, "image_token_id": IMAGE},
    ),
    "internvl": (
        "qwen2",
        {},
        {**_IMAGE_TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        {"image_seq_length": 4, "downsample_ratio": 0.5, "image_token_id": IMAGE},
    ),
}
PICTURED_TYPES = tuple(_PICTURED)
"""Model types with a vision tower that have tiny models."""


# Keys and sizes with which servers compute these models: towers as wide as kernels need, and keys
# that published models have and transformers does not need.
_SERVED_SECTIONS = {"mrope_section": [8, 4, 4], "mrope_interleaved": True}
_SERVED_TOWER: dict[str, Any] = {"embed_dim": 64, "hidden_size": 64, "out_hidden_size": 128}
# One layer of each kind, a quarter of each head rotated and states in float32, as published models
# have them.
_SERVED_HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 128,
    "rope_parameters": _SECTIONS | {"partial_rotary_factor": 0.25},
    "mamba_ssm_dtype": "float32",
}
_SERVED_TEXT: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": {"norm_topk_prob": True},
    "qwen3_5": _SERVED_HYBRID,
    "qwen3_5_moe": _SERVED_HYBRID,
}


def tiny_pictured_model(
    model_type: str,
    text_changes: dict[str, Any] | None = None,
    *,
    served: bool = False,
    **changes: Any,
) -> Any:
    """Return a vision-language model of a family with random weights.

    ``text_changes`` are keys of its language model, ``changes`` those of the whole. With ``served``
    it has the sizes and keys that servers need.
    """
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    text_type, text, tower, whole = _PICTURED[model_type]
    own = text | (text_changes or {})
    sizes: dict[str, Any] = {}
    if served:
        sizes = SERVED_SIZES
        own |= _SERVED_TEXT.get(model_type, {})
        tower = tower | {key: size for key, size in _SERVED_TOWER.items() if key in tower}
        if model_type == "qwen2_vl":
            # Its hidden size is the language model's.
            tower |= {"hidden_size": 128}
        if "rope_parameters" in own:
            sections = _SERVED_SECTIONS if model_type.startswith("qwen3") else {}
            sections = {"mrope_section": _SERVED_SECTIONS["mrope_section"]} | sections
            own |= {"rope_parameters": own["rope_parameters"] | sections}
    small = tiny_config(text_type, sizes=sizes, num_hidden_layers=2, **own).to_dict()
    config = CONFIG_MAPPING[model_type](text_config=small, vision_config=tower, **(whole | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_((0.05 if served else 0.1) * torch.randn_like(parameter))
    return model


def documents() -> list[torch.Tensor]:
    """Return token ids of three documents."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in DOCUMENTS]


def skip_unknown_gate(keys: Mapping[str, Any]) -> None:
    """Skip a test whose keys change the gate of gpt-oss where transformers has no key for it.

    The version decides, so that the test of a key that transformers renames fails.
    """
    import transformers

    asked = sorted(GATE_KEYS & keys.keys())
    if not asked:
        return
    if Version(transformers.__version__) < Version("5.19"):
        pytest.skip(f"gpt-oss has no {' or '.join(asked)} in transformers before 5.19")
    config = transformers.GptOssConfig()
    unknown = [key for key in asked if not hasattr(config, key)]
    assert not unknown, f"GptOssConfig of transformers {transformers.__version__} has no {unknown}"


def oracle(folder: str, dtype: torch.dtype = torch.float64) -> Any:
    """Return the model of a folder in float64, or another dtype, as transformers computes it.

    Attention and experts are in plain PyTorch.
    """
    from transformers import AutoModelForCausalLM

    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **plain).eval()


def log_probs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return ``[L]`` log-probs of a document's tokens, 0 for the first one.

    The document is alone in its batch.
    """
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
    # Scores of rounded logits are not rounded again.
    scores = logits.double().log_softmax(-1)
    return torch.cat([scores.new_zeros(1), scores[:-1].gather(-1, ids[1:, None])[:, 0]])

"""Table of the checkpoint tensors that are served in FP8, for the exporter and both servers.

The weights of the linear layers inside the decoder layers are quantized. Embeddings, the LM head,
norms, biases and the gates of routers stay as they are: they are small, and a router's choice is
discrete. So do a vision tower and its projector: an image is computed once for all its tokens.

Names are matched whole. (A substring "mlp.gate" would also match "mlp.gate_proj", by which other
tables left whole MLPs unquantized.) In a pattern ``#`` is a number, ``{a,b}`` one of several, and
``*`` any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from engine_api.errors import ConfigError, RolloutError
from rollout_fp8.wire.format import BLOCK

Kind = Literal["quantized", "plain"]


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Patterns of one architecture's checkpoint names by kind, and its plain linear modules."""

    quantized: tuple[str, ...]
    plain: tuple[str, ...]
    plain_modules: tuple[str, ...]
    tower_modules: tuple[str, ...] = ()
    """Linear modules of the vision tower and its projector, which are plain."""


@lru_cache
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    escaped = (re.escape(p).replace(r"\#", r"\d+").replace(r"\*", ".+") for p in patterns)
    groups = (re.sub(r"\\{(.*?)\\}", lambda m: f"(?:{m[1].replace(',', '|')})", p) for p in escaped)
    return re.compile("|".join(groups))


_LAYER = "model.layers.#."
_ATTENTION = _LAYER + "self_attn.{q_proj,k_proj,v_proj,o_proj}."
_FUSED_ATTENTION = _LAYER + "self_attn.qkv_proj."
_MLP = _LAYER + "mlp.{gate_proj,up_proj,down_proj}."
_FUSED_MLP = _LAYER + "mlp.{gate_up_proj,down_proj}."
_EXPERTS = _LAYER + "mlp.experts.#.{gate_proj,up_proj,down_proj}."
_LATENT = _LAYER + "self_attn.{q_proj,q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj}."
_SHARED = _LAYER + "mlp.shared_experts.{gate_proj,up_proj,down_proj}."
_SHARED_EXPERT = _LAYER + "mlp.shared_expert.{gate_proj,up_proj,down_proj}."
_SHARED_GATE = _LAYER + "mlp.shared_expert_gate"
_GATE = _LAYER + "mlp.gate"
_SPARSE = _LAYER + "block_sparse_moe."
_NORMS = (
    "{input_layernorm,post_attention_layernorm,post_self_attn_layernorm,post_mlp_layernorm,"
    "pre_feedforward_layernorm,post_feedforward_layernorm}"
)
_OUTSIDE = (
    "model.embed_tokens.weight",
    "model.norm.{weight,bias}",
    "lm_head.weight",
    _LAYER + _NORMS + ".{weight,bias}",
)

_DENSE = Layers(
    quantized=(_ATTENTION + "weight", _MLP + "weight"),
    plain=(
        *_OUTSIDE,
        _ATTENTION + "bias",
        _MLP + "bias",
        _LAYER + "self_attn.{q_norm,k_norm}.weight",
    ),
    plain_modules=("lm_head",),
)
# Checkpoints that hold projections of a layer in one tensor.
_FUSED = Layers(
    quantized=(_ATTENTION + "weight", _FUSED_ATTENTION + "weight", _FUSED_MLP + "weight"),
    plain=(*_OUTSIDE, _ATTENTION + "bias"),
    plain_modules=("lm_head",),
)
_LATENT_DENSE = Layers(
    quantized=(_LATENT + "weight", _MLP + "weight"),
    plain=(*_OUTSIDE, _LAYER + "self_attn.{q_a_layernorm,kv_a_layernorm}.weight"),
    plain_modules=("lm_head",),
)
_MOE = Layers(
    quantized=(*_DENSE.quantized, _EXPERTS + "weight", _SHARED + "weight"),
    plain=(
        *_DENSE.plain,
        _GATE + ".{weight,e_score_correction_bias}",
        _LAYER + "mlp.moe_statics.e_score_correction_bias",
    ),
    plain_modules=("lm_head", _GATE),
)
_QWEN2_MOE = Layers(
    quantized=(*_DENSE.quantized, _EXPERTS + "weight", _SHARED_EXPERT + "weight"),
    plain=(*_DENSE.plain, _GATE + ".weight", _SHARED_GATE + ".weight"),
    plain_modules=("lm_head", _GATE, _SHARED_GATE),
)
_MIXTRAL = Layers(
    quantized=(_ATTENTION + "weight", _SPARSE + "experts.#.{w1,w2,w3}.weight"),
    plain=(*_DENSE.plain, _SPARSE + "gate.weight", _SPARSE + "e_score_correction_bias"),
    plain_modules=("lm_head", _SPARSE + "gate"),
)
_DEEPSEEK = Layers(
    quantized=(*_LATENT_DENSE.quantized, _EXPERTS + "weight", _SHARED + "weight"),
    plain=(
        *_LATENT_DENSE.plain,
        _LATENT + "bias",
        _GATE + ".{weight,e_score_correction_bias}",
    ),
    plain_modules=("lm_head", _GATE),
)


def _pictured(text: str, tower: str, modules: Sequence[str]) -> Layers:
    """Return a dense language model whose names begin with ``text``, with a tower."""

    def moved(patterns: Sequence[str]) -> tuple[str, ...]:
        return tuple(re.sub(r"^model\.", text, pattern) for pattern in patterns)

    return Layers(
        quantized=moved(_DENSE.quantized),
        plain=(*moved(_DENSE.plain), f"{tower}*"),
        plain_modules=_DENSE.plain_modules,
        tower_modules=tuple(tower + name for name in modules),
    )


_BLOCK = "blocks.#."
_QWEN_ATTENTION = (_BLOCK + "attn.qkv", _BLOCK + "attn.proj")
_QWEN2_MERGER = ("merger.mlp.0", "merger.mlp.2")
_QWEN3_MERGERS = tuple(
    f"{merger}linear_fc{number}"
    for merger in ("merger.", "deepstack_merger_list.#.")
    for number in (1, 2)
)
_QWEN2_VL = _pictured(
    "model.",
    "visual.",
    (*_QWEN_ATTENTION, _BLOCK + "mlp.fc1", _BLOCK + "mlp.fc2", *_QWEN2_MERGER),
)
_QWEN2_5_VL = _pictured(
    "model.",
    "visual.",
    (
        *_QWEN_ATTENTION,
        *(f"{_BLOCK}mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
        *_QWEN2_MERGER,
    ),
)
_QWEN3_VL = _pictured(
    "model.language_model.",
    "model.visual.",
    (*_QWEN_ATTENTION, _BLOCK + "mlp.linear_fc1", _BLOCK + "mlp.linear_fc2", *_QWEN3_MERGERS),
)

ARCHITECTURES: Mapping[str, Layers] = {
    **dict.fromkeys(
        (
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen3ForCausalLM",
            "ArceeForCausalLM",
            "CohereForCausalLM",
            "CwmForCausalLM",
            "Ernie4_5ForCausalLM",
            "Exaone4ForCausalLM",
            "GemmaForCausalLM",
            "Gemma2ForCausalLM",
            "Gemma3ForCausalLM",
            "GraniteForCausalLM",
            "Jais2ForCausalLM",
            "NemotronForCausalLM",
            "Olmo3ForCausalLM",
            "SeedOssForCausalLM",
            "StableLmForCausalLM",
        ),
        _DENSE,
    ),
    **dict.fromkeys(("GlmForCausalLM", "Glm4ForCausalLM", "Phi3ForCausalLM"), _FUSED),
    **dict.fromkeys(
        (
            "Qwen3MoeForCausalLM",
            "Ernie4_5_MoeForCausalLM",
            "Glm4MoeForCausalLM",
            "OlmoeForCausalLM",
        ),
        _MOE,
    ),
    "Qwen2MoeForCausalLM": _QWEN2_MOE,
    **dict.fromkeys(("MixtralForCausalLM", "MiniMaxM2ForCausalLM"), _MIXTRAL),
    **dict.fromkeys(
        ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"), _DEEPSEEK
    ),
    "MiniCPM3ForCausalLM": _LATENT_DENSE,
    "Qwen2VLForConditionalGeneration": _QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2_5_VL,
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
}


def layers_of(architecture: str) -> Layers:
    """Return the table's row of an architecture.

    Raises:
        ConfigError: there is none; the error lists the architectures.
    """
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            "rollout.quantization",
            f"FP8 is not known for {architecture}",
            why=f"the quantized layers are known for {', '.join(ARCHITECTURES)}",
            remedy="serve it with rollout.quantization=none, "
            "or add the architecture to rollout_fp8.fp8.layers",
        )
    return ARCHITECTURES[architecture]


def kind(architecture: str, name: str) -> Kind:
    """Return whether the tensor of this checkpoint name is served in FP8.

    Raises:
        ConfigError: the table does not know the architecture.
        RolloutError: the table does not know the name.
    """
    layers = layers_of(architecture)
    if _compiled(layers.quantized).fullmatch(name):
        return "quantized"
    if _compiled(layers.plain).fullmatch(name):
        return "plain"
    raise RolloutError(
        f"{name} of {architecture} is in no row of the layer table",
        where="FP8 quantization",
        why="whether to quantize it would be a guess, and the server might guess differently",
        remedy="add the name to rollout_fp8.fp8.layers, "
        "or serve the model with rollout.quantization=none",
    )


def server_config(architecture: str, num_layers: int, tower_layers: int = 0) -> dict[str, Any]:
    """Return the ``quantization_config`` of config.json by which servers quantize as ``kind`` says.

    ``modules_to_not_convert`` names the plain linear modules in full, layer by layer: vLLM compares
    whole names, and would otherwise quantize the router gate of Qwen3-MoE (its ``ReplicatedLinear``
    gets the quantization's configuration; SGLang's does not). vLLM and SGLang read this key when
    ``ignored_layers`` is absent, as checkpoints of DeepSeek and Qwen have it.

    Args:
        architecture: as in config.json.
        num_layers: ``num_hidden_layers`` there.
        tower_layers: number of layers of its vision tower.

    Raises:
        ConfigError: the architecture is not in the table.
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [
            *_modules(layers_of(architecture).plain_modules, num_layers),
            *_modules(layers_of(architecture).tower_modules, tower_layers),
        ],
    }


def _modules(patterns: Sequence[str], num_layers: int) -> Iterator[str]:
    for pattern in patterns:
        if "#" not in pattern:
            yield pattern
            continue
        for layer in range(num_layers):
            yield pattern.replace("#", str(layer))

"""Mechanisms that a configuration may ask for and this engine does not compute.

A model with one is refused by the mechanism's name, before a weight is read. Names that
engine-torch's table has too mean the same there.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from engine_api.errors import UnsupportedCapability

# RoPE's kinds whose frequencies depend on nothing but the configuration. Those of other kinds
# depend on the length of a document.
ROPES = ("default", "linear", "llama3", "yarn")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
_LAYERS = ("full_attention", "sliding_attention")
# Mechanisms by the types of layers that need them (transformers' names).
_OTHER_LAYERS = {
    "linear_attention": "linear_attention",
    "conv": "linear_attention",
    "hybrid": "linear_attention",
    "hybrid_sliding": "linear_attention",
    "mamba": "linear_attention",
    "mamba2": "linear_attention",
    "chunked_attention": "chunked_attention",
    "indexed_attention": "sparse_attention",
    # The names of transformers before 5.18, which later releases read as the one above.
    "deepseek_sparse_attention": "sparse_attention",
    "qwen_sparse_attention": "sparse_attention",
    "compressed_sparse_attention": "compressed_attention",
    "heavily_compressed_attention": "compressed_attention",
}
_CAPS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logits_soft_cap",
    "output_logit_soft_cap",
)
# Families whose output head has a bias in transformers, which no key of theirs says.
_BIASED_HEADS = ("codegen", "ctrl", "gptj", "phi")
_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
# Families whose projections never have a bias, whatever attention_bias says in transformers.
_UNBIASED = ("cwm", "ministral", "mistral", "mixtral", "qwen2", "qwen2_moe")
_BIASED_MLPS = ("cwm", "granite", "granite_swa", "llama", "seed_oss")
# Families with factors of embeddings, scores, what each layer adds, and logits.
SCALED = ("granite", "granite_swa")
# Families whose router is a sigmoid with a saved bias (DeepSeek-V3, arXiv:2412.19437, eq. 16).
SIGMOIDS = ("deepseek_v3", "dots1", "glm4_moe")
# Families whose code in transformers rotates a part of each head.
PARTIAL_ROPES = ("glm4_moe",)
# Families with attention sinks.
SINKS = ("gpt_oss", "granite_swa")
_WINDOWLESS = ("deepseek_v3", "glm4_moe", "granite", "llama", "seed_oss")
EVERY_LAYER_WINDOWS = ("mistral", "mixtral", "qwen3_moe")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mechanism:
    """A mechanism that this engine does not compute."""

    name: str
    """Name in refusals."""

    find: Callable[[Any], str]
    """Function of the configuration, which returns what asks for it in words or an empty text."""

    families: Collection[str] = ()
    """Families whose configurations are looked at, or none for those of every family."""

    explain: Callable[[Any], str] = lambda _: "this engine would compute it wrongly"
    """Function of the configuration, which returns in words why the engine does not serve it."""


def rope_parameters(config: Any) -> Mapping[str, Any]:
    """Return RoPE's keys of a configuration."""
    return getattr(config, "rope_parameters", None) or {}


def _types(config: Any) -> list[str]:
    return [str(kind) for kind in getattr(config, "layer_types", None) or ()]


def _set(config: Any, keys: Collection[str], usual: Collection[Any] = (None,)) -> str:
    """Return the keys with an unusual value, in words."""
    found = {key: getattr(config, key, None) for key in keys}
    return ", ".join(f"{key}={value}" for key, value in found.items() if value not in usual)


def _layers(name: str) -> Callable[[Any], str]:
    def find(config: Any) -> str:
        kinds = {kind for kind in _types(config) if _OTHER_LAYERS.get(kind) == name}
        return f"layers of type {', '.join(sorted(kinds))}" if kinds else ""

    return find


def _explain_linear(config: Any) -> str:
    """Return what Megatron lacks for layers with a state from token to token."""
    if not hasattr(config, "linear_num_value_heads"):
        return "this engine has no such layers"
    # Qwen3-Next's and Qwen3.5's gated delta rule (arXiv:2412.06464).
    version = importlib.metadata.version("megatron-core")
    return (
        f"the GatedDeltaNet of megatron-core {version} takes neither packed documents nor context "
        "parallelism, and its states would go on from one document into the next; it needs the "
        "CUDA kernels of flash-linear-attention and Transformer Engine's layers"
    )


def _other_layers(config: Any) -> str:
    kinds = set(_types(config)) - {*_LAYERS, *_OTHER_LAYERS}
    return f"layers of type {', '.join(sorted(kinds))}" if kinds else ""


def _rope_kind(config: Any) -> str:
    kind = rope_parameters(config).get("rope_type", "default")
    return "" if kind in ROPES else f"RoPE of type {kind}"


def _partial_rope(config: Any) -> str:
    rope = rope_parameters(config)
    part = rope.get("partial_rotary_factor", 1.0)
    # YaRN's factor is of cosine and sine, and would be of the whole score.
    served = config.model_type in PARTIAL_ROPES and rope.get("rope_type") != "yarn"
    return "" if served or part in (None, 1.0) else f"RoPE on a part of each head: {part}"


def _logit_scale(config: Any) -> str:
    served = ("logits_scaling",) if config.model_type in SCALED else ()
    return _set(config, [key for key in _SCALES if key not in served], (None, 1.0))


def _layer_rope(config: Any) -> str:
    """Return rotary positions that differ between layers, in words."""
    rope = rope_parameters(config)
    bases = set(config.layer_rope_theta or ()) - {rope.get("rope_theta")}
    if bases:
        return f"layer_rope_theta={config.layer_rope_theta}"
    kind = rope.get("rope_type", "default")
    return "" if kind == "default" else f"RoPE of type {kind} by layer"


def _window(config: Any) -> str:
    """Return a window that transformers' code of the family takes differently from the file."""
    window = getattr(config, "sliding_window", None)
    slides = [kind == "sliding_attention" for kind in _types(config)]
    if config.model_type in _WINDOWLESS:
        off = getattr(config, "use_sliding_window", None) is False
        return "a sliding window" if any(slides) or (window is not None and not off) else ""
    everywhere = config.model_type in EVERY_LAYER_WINDOWS
    if everywhere and slides and any(one != (window is not None) for one in slides):
        return f"sliding_window={window} for every layer, and layer_types that are different"
    if any(slides) and (type(window) is not int or window < 1):
        return f"layers with a sliding window of {window!r} tokens"
    if everywhere and window is not None and (type(window) is not int or window < 1):
        return f"a sliding window of {window!r} tokens"
    return ""


def _activation(config: Any) -> str:
    # gpt-oss's own is the same whatever the key says.
    known = ("silu",) if config.model_type == "gpt_oss" else ACTIVATIONS
    name = getattr(config, "hidden_act", "silu")
    return "" if name in known else f"hidden_act={name!r}, which is none of {', '.join(known)}"


def _biases(config: Any) -> str:
    family = config.model_type
    if family == "gpt_oss":
        return "" if config.attention_bias is True else "experts with biases, attention without"
    found = [
        key
        for key, families in (("attention_bias", (*_UNBIASED, "deepseek_v3")),)
        if family in families and getattr(config, key, False)
    ]
    if family not in _BIASED_MLPS and getattr(config, "mlp_bias", False):
        found.append("mlp_bias")
    return f"{', '.join(found)}, which biases no layer of {family}" if found else ""


def _single_expert(config: Any) -> str:
    # Megatron refuses it under a softmax: that of one logit has no gradient. Under a sigmoid it
    # leaves the weight as it is.
    normalizes = config.model_type in ("mixtral", "gpt_oss") or config.norm_topk_prob
    alone = config.num_experts_per_tok == 1 and normalizes
    return "a single expert per token, its weight normalized" if alone else ""


def _unnormalized(config: Any) -> str:
    several = config.num_experts_per_tok > 1 and not config.norm_topk_prob
    return "experts whose sigmoid scores are not normalized" if several else ""


def _groups(config: Any) -> str:
    groups, chosen, experts = config.n_group, config.topk_group, config.num_experts_per_tok
    # Megatron ranks a group by experts-per-token / chosen-groups scores, transformers by two.
    if chosen < groups and experts // chosen != 2:
        return f"{experts} experts per token of {chosen} groups out of {groups}: not two of each"
    return ""


def _rope_order(config: Any) -> str:
    return "" if config.rope_interleave else "rope_interleave=False"


def _latent_heads(config: Any) -> str:
    if config.num_key_value_heads != config.num_attention_heads:
        return "fewer key-value heads than heads in latent attention"
    if config.head_dim != config.qk_rope_head_dim:
        return f"head_dim={config.head_dim} beside qk_rope_head_dim={config.qk_rope_head_dim}"
    return ""


_MIXTURES = ("qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", *SIGMOIDS)

MECHANISMS: tuple[Mechanism, ...] = (
    Mechanism(
        name="head_bias", find=lambda _: "an output head with a bias", families=_BIASED_HEADS
    ),
    Mechanism(name="softcap", find=lambda config: _set(config, _CAPS)),
    Mechanism(name="logit_scale", find=_logit_scale),
    Mechanism(name="linear_attention", find=_layers("linear_attention"), explain=_explain_linear),
    *(
        Mechanism(name=name, find=_layers(name))
        for name in dict.fromkeys(_OTHER_LAYERS.values())
        if name != "linear_attention"
    ),
    Mechanism(name="other_layers", find=_other_layers),
    Mechanism(name="rope", find=_rope_kind),
    Mechanism(name="partial_rope", find=_partial_rope),
)
"""Mechanisms that any family may ask for."""

OF_FAMILIES: tuple[Mechanism, ...] = (
    Mechanism(
        name="quantized_weights",
        find=lambda config: (
            "quantization_config" * bool(getattr(config, "quantization_config", None))
        ),
    ),
    Mechanism(name="sliding_window", find=_window),
    Mechanism(name="activation", find=_activation),
    Mechanism(name="bias", find=_biases),
    Mechanism(name="single_expert", find=_single_expert, families=_MIXTURES),
    Mechanism(name="router_scores", find=_unnormalized, families=SIGMOIDS),
    Mechanism(name="router_groups", find=_groups, families=SIGMOIDS),
    Mechanism(name="rope", find=_layer_rope, families=("granite_swa",)),
    Mechanism(name="rope_order", find=_rope_order, families=("deepseek_v3",)),
    Mechanism(name="latent_attention", find=_latent_heads, families=("deepseek_v3",)),
)
"""Mechanisms that the families of this engine may ask for."""


def refuse(config: Any, mechanisms: Collection[Mechanism]) -> None:
    """Raise ``UnsupportedCapability`` for the first of ``mechanisms`` that a model asks for."""
    family = config.model_type
    for one in mechanisms:
        found = "" if one.families and family not in one.families else one.find(config)
        if found:
            raise UnsupportedCapability(
                one.name,
                where=f"engine-megatron with {family}",
                why=f"the model has {found}; {one.explain(config)}",
                remedy="use another backend for this model",
            )


def find_local_mechanism(config: Any) -> str:
    """Return a mechanism that only Megatron's own layers were compared with, or an empty text.

    Transformer Engine's layers need a GPU. They ran with plain RoPE, biases of queries, keys and
    values, SiLU, and experts in every layer.
    """
    family = config.model_type
    windowed = getattr(config, "sliding_window", None) and (
        family in EVERY_LAYER_WINDOWS or "sliding_attention" in _types(config)
    )
    dense = getattr(config, "mlp_only_layers", None) or (
        getattr(config, "decoder_sparse_step", 1) != 1
    )
    found = {
        "latent attention": family == "deepseek_v3",
        "attention sinks": family in SINKS,
        "factors of embeddings and layers": family in SCALED,
        "a shared expert": family in ("qwen2_moe", *SIGMOIDS),
        "a sliding window": windowed,
        "scaled RoPE": rope_parameters(config).get("rope_type", "default") != "default",
        "biases of every projection": family != "gpt_oss"
        and any(
            getattr(config, key, False)
            for key in ("attention_bias", "attention_out_bias", "mlp_bias")
        ),
        "dense layers among layers of experts": dense,
        "an activation other than SiLU": config.hidden_act != "silu",
    }
    return next((name for name, asked in found.items() if asked), "")

"""The part of a Hugging Face ``config.json`` that the oracle reads, and the models it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_conformance.oracle.rope import ROPE_KINDS, Rope, scores_scale

__all__ = [
    "ACTIVATIONS",
    "FAMILIES",
    "Mask",
    "MoEConfig",
    "ModelConfig",
    "UnsupportedModel",
    "hide_later",
    "read_config",
]

Mask = Callable[[int, int | None], Tensor]
"""Function of a document's length and a layer's window that returns ``[L, L]`` bool.

It is true where the row's token does not attend to the column's."""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2")
# Families of which a mechanism's case alone makes a model.
MECHANISM_FAMILIES = (
    *("granite", "granite_swa", "phi", "dots1", "lfm2"),
    *("deepseek_v3", "deepseek_v32", "gpt_oss"),
)
# The names in config.json of the activations that the oracle computes.
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
# transformers' head_dim where a config.json leaves it out, of families that do not derive it.
_HEAD_DIMS = {"qwen3": 128}
# The key of a family's activation and its default, where they are not hidden_act and silu.
_ACTIVATION_KEYS = {
    "gemma2": ("hidden_activation", "gelu_pytorch_tanh"),
    # LFM2 has no key for its activation.
    "lfm2": ("activation", "silu"),
}
# Other names of activations in config.json.
_ACTIVATION_NAMES = {"gelu_new": "gelu_pytorch_tanh"}


class UnsupportedModel(ValueError):
    """A checkpoint that asks for something that the oracle does not compute."""


def hide_later(length: int, window: int | None) -> Tensor:
    """Return the mask of causal attention within a window, or within the whole document."""
    every = torch.ones((length, length), dtype=torch.bool)
    later = every.triu(1)
    return later if window is None else later | every.tril(-window)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """The router and the experts of a mixture-of-experts model."""

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: frozenset[int]
    sigmoid: bool = False
    """Scores are sigmoids of the logits, and a saved bias is added to select by them (dots1)."""
    scale: float = 1.0
    """Factor of the experts' weights."""
    shared_size: int = 0
    """Width of the expert that serves every token, 0 for none."""
    clamped: bool = False
    """Experts have biases, bounds and a gate of their own (gpt-oss)."""

    @property
    def router(self) -> str:
        """Name of the router in a checkpoint."""
        return "router" if self.clamped else "gate"


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Latent attention (DeepSeek-V2, arXiv:2405.04434), to all tokens or to those of an index."""

    query_rank: int
    key_rank: int
    plain_dim: int
    """Width of a head's part without rotary positions."""
    rotary_dim: int
    value_dim: int
    index_heads: int = 0
    index_dim: int = 0
    selected: int | None = None
    """Number of tokens that a token attends to by an index (DeepSeek-V3.2), None without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """Names of a layer's parts in a checkpoint."""

    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    final_norm: str = "norm"
    output: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


_NAMES = {
    "phi": Names(final_norm="final_layernorm", output="dense", gate="", up="fc1", down="fc2"),
    "lfm2": Names(
        attention_norm="operator_norm",
        mlp_norm="ffn_norm",
        final_norm="embedding_norm",
        output="out_proj",
        query_norm="q_layernorm",
        key_norm="k_layernorm",
        mlp="feed_forward",
        gate="w1",
        up="w3",
        down="w2",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The architecture of one checkpoint, with defaults filled in as transformers fills them.

    Attributes:
        value_model: true for a ``*ForTokenClassification`` checkpoint with one label.
        tied: true when the language-model head is the embedding.
        windows: by layer the number of tokens that a token attends to, itself included;
            None is all of its document before it.
        attention_scale: the factor of a query's product with a key.
        attention_cap: c of ``c * tanh(scores / c)``; None is no cap.
        logit_cap: the same of the logits.
        embedding_scale: the factor of the embeddings.
        norm_offset: added to the weight of every norm.
        norms_after: true if attention's and the MLP's results have a norm of their own.
        activation: name of the activation of the MLP and the experts.
        logit_scale: the factor of the logits.
        residual_scale: the factor of what attention and MLP add.
        sinks: true if each head's softmax has one more score, which is a parameter.
        head_bias: true if the language-model head has a bias.
        layer_norms: true if norms subtract the mean and have a bias.
        parallel: true if attention and MLP have the same input and one norm.
        mixers: layers that mix tokens by a short convolution in place of attention.
        mixer_width: number of tokens of that convolution.
        latent: the attention of DeepSeek's models; None for any other.
        names: the names of a layer's parts.
        mask: the pairs of tokens that do not see one another.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    tied: bool
    value_model: bool
    value_bias: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    attention_scale: float
    attention_cap: float | None = None
    logit_cap: float | None = None
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    norms_after: bool = False
    activation: str = "silu"
    moe: MoEConfig | None = None
    logit_scale: float = 1.0
    residual_scale: float = 1.0
    sinks: bool = False
    head_bias: bool = False
    layer_norms: bool = False
    parallel: bool = False
    mixers: frozenset[int] = frozenset()
    mixer_width: int = 0
    latent: LatentAttention | None = None
    names: Names = Names()
    mask: Mask = hide_later

    @property
    def qk_norm(self) -> bool:
        """True if queries and keys are normalised per head (Qwen3)."""
        return self.family in ("qwen3", "qwen3_moe", "dots1", "lfm2")


def read_config(folder: str | Path) -> ModelConfig:
    """Read ``config.json`` of a Hugging Face folder.

    Rates of dropout are not read: the oracle drops nothing.

    Raises:
        UnsupportedModel: on an unknown family, an unknown or partial RoPE, an unknown activation,
            or a head that is neither a language-model nor a one-label token head.
    """
    raw = json.loads((Path(folder) / "config.json").read_text())
    family = raw.get("model_type")
    known = (*FAMILIES, *MECHANISM_FAMILIES)
    if family not in known:
        raise UnsupportedModel(f"model_type {family!r}: the oracle computes {', '.join(known)}")
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim", _HEAD_DIMS.get(family)) or raw["hidden_size"] // heads
    biased = bool(raw.get("attention_bias", False)) and family not in ("qwen2", "mistral")
    return ModelConfig(
        family=family,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get(_EPSILONS.get(family, "rms_norm_eps"), 1e-6)),
        rope=_rope(raw, head_dim),
        tied=bool(raw.get("tie_word_embeddings", family == "gemma2")),
        value_model=_is_value_model(raw),
        value_bias=bool(raw.get("token_classification_bias", True)),
        qkv_bias=biased or family in ("qwen2", "phi"),
        o_bias=biased or family == "phi",
        mlp_bias=(bool(raw.get("mlp_bias", False)) and family == "llama") or family == "phi",
        windows=_windows(raw),
        activation=_activation(raw),
        names=_NAMES.get(family, Names()),
        **{"attention_scale": head_dim**-0.5, **_OWN.get(family, lambda _: {})(raw)},
    )


# The key of the norms' epsilon, where it is not rms_norm_eps.
_EPSILONS = {"lfm2": "norm_eps", "phi": "layer_norm_eps"}


def _qwen3_moe(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"moe": _moe(raw)}


def _granite(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the multipliers of Granite, and the sinks of its variant with windows."""
    return {
        "attention_scale": float(raw["attention_multiplier"]),
        "embedding_scale": float(raw["embedding_multiplier"]),
        "residual_scale": float(raw["residual_multiplier"]),
        "logit_scale": 1 / float(raw["logits_scaling"]),
        "sinks": raw["model_type"] == "granite_swa",
    }


def _phi(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Phi alone has (Li et al. 2023, arXiv:2309.05463)."""
    del raw
    return {"head_bias": True, "layer_norms": True, "parallel": True}


def _dots1(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mixture of dots1, whose router has a saved bias (as DeepSeek-V3's)."""
    if raw.get("n_group", 1) != 1:
        raise UnsupportedModel("n_group: the oracle computes routers without groups")
    layers = range(raw["first_k_dense_replace"], raw["num_hidden_layers"])
    moe = MoEConfig(
        num_experts=raw["n_routed_experts"],
        top_k=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        norm_topk_prob=raw["norm_topk_prob"],
        sparse_layers=frozenset(layers),
        sigmoid=True,
        scale=raw["routed_scaling_factor"],
        shared_size=raw["moe_intermediate_size"] * raw["n_shared_experts"],
    )
    return {"moe": moe}


def _lfm2(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers of LFM2 that convolve."""
    kinds = enumerate(raw["layer_types"])
    convolves = frozenset(i for i, kind in kinds if kind == "conv")
    return {"mixers": convolves, "mixer_width": raw["conv_L_cache"]}


def _deepseek_v3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attention and the mixture of DeepSeek-V3 (arXiv:2412.19437, section 2.1)."""
    return _latent(raw) | _dots1(raw)


def _deepseek_v32(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attention of DeepSeek-V3.2, of which the oracle computes dense layers only."""
    if raw["first_k_dense_replace"] < raw["num_hidden_layers"]:
        raise UnsupportedModel("experts: the oracle computes deepseek_v32 without them")
    return _latent(
        raw,
        index_heads=raw["index_n_heads"],
        index_dim=raw["index_head_dim"],
        selected=raw["index_topk"],
    )


def _latent(raw: Mapping[str, Any], **index: int) -> dict[str, Any]:
    """Return latent attention, with the fields of its index if it has one."""
    latent = LatentAttention(
        query_rank=raw["q_lora_rank"],
        key_rank=raw["kv_lora_rank"],
        plain_dim=raw["qk_nope_head_dim"],
        rotary_dim=raw["qk_rope_head_dim"],
        value_dim=raw["v_head_dim"],
        **index,
    )
    width = latent.plain_dim + latent.rotary_dim
    return {"latent": latent, "attention_scale": width**-0.5 * scores_scale(_given_rope(raw))}


def _gpt_oss(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sinks and the experts of gpt-oss."""
    moe = MoEConfig(
        num_experts=raw["num_local_experts"],
        top_k=raw["num_experts_per_tok"],
        intermediate_size=raw["intermediate_size"],
        # A softmax over the scores of the chosen experts is one over all, renormalised.
        norm_topk_prob=True,
        sparse_layers=frozenset(range(raw["num_hidden_layers"])),
        clamped=True,
    )
    return {"sinks": True, "moe": moe}


def _gemma2(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Gemma 2 alone has (Gemma Team 2024, arXiv:2408.00118, section 2)."""
    return {
        "attention_scale": raw.get("query_pre_attn_scalar", 256) ** -0.5,
        "attention_cap": raw.get("attn_logit_softcapping", 50.0),
        "logit_cap": raw.get("final_logit_softcapping", 30.0),
        "embedding_scale": math.sqrt(raw["hidden_size"]),
        "norm_offset": 1.0,
        "norms_after": True,
    }


_OWN: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
    "granite": _granite,
    "granite_swa": _granite,
    "phi": _phi,
    "dots1": _dots1,
    "lfm2": _lfm2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v32,
    "gpt_oss": _gpt_oss,
}


def _activation(raw: Mapping[str, Any]) -> str:
    """Return the name of the activation.

    Raises:
        UnsupportedModel: on one that the oracle does not compute.
    """
    key, usual = _ACTIVATION_KEYS.get(raw["model_type"], ("hidden_act", "silu"))
    name: str = raw.get(key, usual)
    name = _ACTIVATION_NAMES.get(name, name)
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"{key} {name!r}: the oracle computes {', '.join(ACTIVATIONS)}")
    return name


def _given_rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    given: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return given


def _rope(raw: Mapping[str, Any], head_dim: int) -> Rope:
    """Return the rotary positions.

    transformers 5 writes ``rope_parameters``, earlier versions ``rope_theta`` and
    ``rope_scaling``.
    """
    given = _given_rope(raw)
    kind = given.get("rope_type", given.get("type", "default"))
    part = float(given.get("partial_rotary_factor", 1.0))
    if kind not in ROPE_KINDS or (part != 1.0 and raw["model_type"] != "phi"):
        raise UnsupportedModel(
            f"rope {given}: the oracle computes {', '.join(ROPE_KINDS)}, on whole heads"
        )
    longest = raw.get("max_position_embeddings", 2048)
    return Rope(
        kind=kind,
        theta=float(given.get("rope_theta", raw.get("rope_theta", 10000.0))),
        head_dim=raw.get("qk_rope_head_dim") or int(head_dim * part),
        max_position=longest,
        original=given.get("original_max_position_embeddings") or longest,
        parameters=given,
    )


def _windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the window of each layer.

    Mistral's and Qwen3-MoE's hold for all layers. Qwen2 and Qwen3 have theirs from
    ``max_window_layers`` on, Gemma 2 in every other layer from the first on, where
    ``layer_types`` does not say otherwise.
    """
    family = raw["model_type"]
    layers = range(raw["num_hidden_layers"])
    switched = family in ("mistral", "gemma2") or raw.get("use_sliding_window", False)
    window = raw.get("sliding_window", 4096) if switched and family != "llama" else None
    if family in ("granite_swa", "gpt_oss"):
        kinds = raw["layer_types"]
        return tuple(raw["sliding_window"] if k == "sliding_attention" else None for k in kinds)
    if family in ("llama", "mistral", "qwen3_moe", *MECHANISM_FAMILIES):
        return tuple(window for _ in layers)
    first = raw.get("max_window_layers", 28)
    slides = [i % 2 == 0 if family == "gemma2" else i >= first for i in layers]
    if (types := raw.get("layer_types")) is not None:
        slides = [one == "sliding_attention" for one in types]
    return tuple(window if one else None for one in slides)


def _is_value_model(raw: Mapping[str, Any]) -> bool:
    names = raw.get("architectures") or ["?"]
    if names[0].endswith("ForCausalLM"):
        return False
    labels = len(raw["id2label"]) if "id2label" in raw else raw.get("num_labels", 2)
    if names[0].endswith("ForTokenClassification") and labels == 1:
        return True
    raise UnsupportedModel(
        f"architecture {names[0]} with {labels} labels: the oracle computes *ForCausalLM, "
        "and *ForTokenClassification with one label"
    )


def _moe(raw: Mapping[str, Any]) -> MoEConfig:
    step = raw.get("decoder_sparse_step", 1)
    dense = set(raw.get("mlp_only_layers") or ())
    layers = range(raw["num_hidden_layers"])
    return MoEConfig(
        # transformers writes the second name since 5.0.
        num_experts=raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"],
        top_k=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
        sparse_layers=frozenset(i for i in layers if i not in dense and (i + 1) % step == 0),
    )

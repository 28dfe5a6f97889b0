"""The part of a Hugging Face ``config.json`` that the oracle reads, and the models it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FAMILIES", "MoEConfig", "ModelConfig", "UnsupportedModel", "read_config"]

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


class UnsupportedModel(ValueError):
    """A checkpoint that asks for something that the oracle does not compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """The router and the experts of a mixture-of-experts model."""

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The architecture of one checkpoint, with defaults filled in as transformers fills them.

    ``value_model`` is true for a ``*ForTokenClassification`` checkpoint with one label;
    ``tied`` is true when the language-model head is the embedding.
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
    rope_theta: float
    tied: bool
    value_model: bool
    value_bias: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    moe: MoEConfig | None = None

    @property
    def qk_norm(self) -> bool:
        """True if queries and keys are normalised per head (Qwen3)."""
        return self.family in ("qwen3", "qwen3_moe")


def read_config(folder: str | Path) -> ModelConfig:
    """Read ``config.json`` of a Hugging Face folder.

    Raises:
        UnsupportedModel: on an unknown family, scaled RoPE, sliding windows, dropout, an activation
            other than SiLU, or a head that is neither a language-model nor a one-label token head.
    """
    raw = json.loads((Path(folder) / "config.json").read_text())
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModel(f"model_type {family!r}: the oracle computes {', '.join(FAMILIES)}")
    _refuse(raw)
    heads = raw["num_attention_heads"]
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(raw),
        tied=bool(raw.get("tie_word_embeddings", False)),
        value_model=_is_value_model(raw),
        value_bias=bool(raw.get("token_classification_bias", True)),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias and family != "qwen2",
        mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
        moe=_moe(raw) if family == "qwen3_moe" else None,
    )


def _refuse(raw: Mapping[str, Any]) -> None:
    """Raise on settings that would change the result and are not computed here."""
    if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
        raise UnsupportedModel(
            "sliding-window attention: the oracle computes full causal attention only"
        )
    if raw.get("attention_dropout"):
        raise UnsupportedModel(
            f"attention_dropout {raw['attention_dropout']}: the oracle has no dropout"
        )
    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModel(f"hidden_act {act!r}: the oracle computes 'silu' only")


def _rope_theta(raw: Mapping[str, Any]) -> float:
    """Return the RoPE base.

    transformers 5 writes ``rope_parameters``, earlier versions
    ``rope_theta``/``rope_scaling``.
    """
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            f"rope {rope}: the oracle computes the default RoPE without scaling only"
        )
    return float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))


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
        num_experts=raw["num_experts"],
        top_k=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
        sparse_layers=frozenset(i for i in layers if i not in dense and (i + 1) % step == 0),
    )

"""Architecture of a model from ``config.json``, and names and shapes of its weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine_api.config import ModelSource, near_matches
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_api.hf_routers import Routing
from engine_api.hf_vision import refuse_vision

Kind = Literal["language_model", "value_model"]
# Keys of config.json by the types that their values may have.
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "vocab_size": int,
    "hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads": (int, type(None)),
    "head_dim": (int, type(None)),
    "num_experts": int,
    "num_experts_per_tok": int,
    "moe_intermediate_size": int,
    "rms_norm_eps": (int, float),
    "initializer_range": (int, float),
}
# transformers' head_dim where a config.json leaves it out, of families that do not derive it.
_HEAD_DIMS = {"qwen3": 128}
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes and switches that the formulas need (``experts`` is 0 for a dense model)."""

    family: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    std: float
    """Standard deviation of random weights."""
    tied: bool
    kind: Kind
    value_bias: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    experts: int
    top_k: int
    expert_intermediate: int
    norm_topk_prob: bool
    sparse_layers: frozenset[int]

    @property
    def qk_norm(self) -> bool:
        """True if queries and keys are normalised per head."""
        return self.family in ("qwen3", "qwen3_moe")

    def routing(self, where: str) -> Routing:
        """Return the layers and experts that a batch may select.

        Raises:
            UnsupportedCapability: the model has no experts.
        """
        if not self.experts:
            raise UnsupportedCapability(
                "router_replay", where=where, why="the model has no experts", remedy="turn it off"
            )
        return Routing(
            layers=self.layers, top_k=self.top_k, experts=self.experts, routed=self.sparse_layers
        )


def read_config(source: ModelSource) -> dict[str, Any]:
    """Return ``config.json`` with the overrides.

    Raises:
        ConfigError: for settings that this engine does not read or run.
    """
    file = Path(source.path) / "config.json"
    if source.revision is not None or source.trust_remote_code:
        raise ConfigError(
            "model",
            "revision and trust_remote_code belong to models of the hub",
            why="the loopback engine reads folders and has its own model",
            remedy="leave them out",
        )
    try:
        raw: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            "model.path",
            f"{file} cannot be read",
            why=str(error),
            remedy="give a folder that save_pretrained wrote",
        ) from error
    for key in source.config_overrides:
        if key not in raw:
            raise ConfigError(
                f"model.config_overrides.{key}",
                "the model's config has no such key",
                remedy=near_matches(key, list(raw)),
            )
    raw |= source.config_overrides
    refuse_vision(raw, (), "the loopback engine")
    _refuse(raw)
    return raw


def _refuse(raw: Mapping[str, Any]) -> None:
    rope = rope_of(raw)
    plain = (
        rope.get("rope_type", rope.get("type", "default")) == "default"
        and rope.get("partial_rotary_factor", 1) == 1
    )
    sliding = raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ())
    wrong = {
        f"model_type {raw.get('model_type')!r}": raw.get("model_type") not in FAMILIES,
        "sliding-window attention": sliding,
        "attention_dropout": raw.get("attention_dropout"),
        "an activation that is not silu": raw.get("hidden_act", "silu") != "silu",
        "scaled RoPE": not plain,
        "quantized weights": raw.get("quantization_config"),
    }
    if found := [name for name, there in wrong.items() if there]:
        raise ConfigError(
            "model.path",
            f"config.json asks for {', '.join(found)}",
            remedy=f"the loopback engine computes plain {', '.join(FAMILIES)}",
        )


def rope_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary parameters, as transformers 5 writes them or as 4 did."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def shape_of(raw: Mapping[str, Any], kind: Kind) -> Shape:
    """Return the architecture, with defaults filled in as transformers fills them.

    Raises:
        ConfigError: a key is missing, or its value has another type.
    """
    for key, kind_of_value in _TYPES.items():
        value = raw.get(key)
        if key in raw and not isinstance(value, kind_of_value):
            raise ConfigError(
                "model.path",
                f"config.json has {key}: {value!r}, a {type(value).__name__}",
                remedy="use the config.json that belongs to the weights",
            )
    try:
        return _shape_of(raw, kind)
    except KeyError as error:
        raise ConfigError(
            "model.path",
            f"config.json lacks {error}",
            remedy="use the config.json that belongs to the weights",
        ) from error


def _shape_of(raw: Mapping[str, Any], kind: Kind) -> Shape:
    family = raw["model_type"]
    heads = raw["num_attention_heads"]
    layers = raw["num_hidden_layers"]
    bias = bool(raw.get("attention_bias", False))
    moe = family == "qwen3_moe"
    dense = set(raw.get("mlp_only_layers") or ())
    step = raw.get("decoder_sparse_step", 1)
    return Shape(
        family=family,
        vocab_size=raw["vocab_size"],
        hidden=raw["hidden_size"],
        intermediate=raw["intermediate_size"],
        layers=layers,
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim", _HEAD_DIMS.get(family)) or raw["hidden_size"] // heads,
        eps=float(raw.get("rms_norm_eps", 1e-6)),
        theta=float(rope_of(raw).get("rope_theta", raw.get("rope_theta", 10000.0))),
        std=float(raw.get("initializer_range", 0.02)),
        kind=kind,
        tied=bool(raw.get("tie_word_embeddings", False)) and kind == "language_model",
        value_bias=bool(raw.get("token_classification_bias", True)),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias and family != "qwen2",
        mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
        experts=raw["num_experts"] if moe else 0,
        top_k=raw["num_experts_per_tok"] if moe else 0,
        expert_intermediate=raw["moe_intermediate_size"] if moe else 0,
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
        sparse_layers=frozenset(
            i for i in range(layers) if moe and i not in dense and (i + 1) % step == 0
        ),
    )


Named = tuple[str, tuple[int, ...]]


def weight_shapes(shape: Shape) -> Iterator[Named]:
    """Yield every weight's checkpoint name and whole shape, layer by layer.

    A tied head is the embedding and comes once.
    """
    yield "model.embed_tokens.weight", (shape.vocab_size, shape.hidden)
    for index in range(shape.layers):
        yield from ((f"model.layers.{index}.{name}", size) for name, size in _layer(shape, index))
    yield "model.norm.weight", (shape.hidden,)
    if shape.kind == "value_model":
        yield from _linear("score", 1, shape.hidden, bias=shape.value_bias)
    elif not shape.tied:
        yield "lm_head.weight", (shape.vocab_size, shape.hidden)


def _layer(shape: Shape, index: int) -> Iterator[Named]:
    yield "input_layernorm.weight", (shape.hidden,)
    for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
        yield from _linear(
            f"self_attn.{name}_proj", heads * shape.head_dim, shape.hidden, bias=shape.qkv_bias
        )
    yield from _linear(
        "self_attn.o_proj", shape.hidden, shape.heads * shape.head_dim, bias=shape.o_bias
    )
    if shape.qk_norm:
        yield from ((f"self_attn.{name}_norm.weight", (shape.head_dim,)) for name in "qk")
    yield "post_attention_layernorm.weight", (shape.hidden,)
    if index not in shape.sparse_layers:
        yield from _mlp("mlp", shape.hidden, shape.intermediate, bias=shape.mlp_bias)
        return
    yield "mlp.gate.weight", (shape.experts, shape.hidden)
    for expert in range(shape.experts):
        yield from _mlp(
            f"mlp.experts.{expert}", shape.hidden, shape.expert_intermediate, bias=False
        )


def _linear(name: str, outputs: int, inputs: int, *, bias: bool) -> Iterator[Named]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _mlp(name: str, hidden: int, width: int, *, bias: bool) -> Iterator[Named]:
    yield from _linear(f"{name}.gate_proj", width, hidden, bias=bias)
    yield from _linear(f"{name}.up_proj", width, hidden, bias=bias)
    yield from _linear(f"{name}.down_proj", hidden, width, bias=bias)

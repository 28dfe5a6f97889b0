"""The Hugging Face checkpoint names and shapes of a model, written out from its architecture."""

from __future__ import annotations

from collections.abc import Iterator

from engine_conformance.oracle.config import ModelConfig, MoEConfig

__all__ = ["expected_shapes"]

Shape = tuple[int, ...]
NamedShape = tuple[str, Shape]


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape by name of every parameter of a complete checkpoint, in layer order.

    A tied head is absent: its tensor is ``model.embed_tokens.weight``, which appears
    once.
    """
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size)
    }
    for index in range(config.num_layers):
        shapes.update(_layer(config, index))
    shapes["model.norm.weight"] = (config.hidden_size,)
    shapes.update(_head(config))
    return shapes


def _layer(config: ModelConfig, index: int) -> Iterator[NamedShape]:
    prefix = f"model.layers.{index}."
    yield f"{prefix}input_layernorm.weight", (config.hidden_size,)
    yield from _attention(config, f"{prefix}self_attn.")
    yield f"{prefix}post_attention_layernorm.weight", (config.hidden_size,)
    if config.norms_after:
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            yield f"{prefix}{name}.weight", (config.hidden_size,)
    if config.moe is not None and index in config.moe.sparse_layers:
        yield from _moe(config, config.moe, f"{prefix}mlp.")
    else:
        yield from _mlp(config, f"{prefix}mlp.", config.intermediate_size, bias=config.mlp_bias)


def _linear(name: str, out_features: int, in_features: int, *, bias: bool) -> Iterator[NamedShape]:
    yield f"{name}.weight", (out_features, in_features)
    if bias:
        yield f"{name}.bias", (out_features,)


def _attention(config: ModelConfig, prefix: str) -> Iterator[NamedShape]:
    hidden = config.hidden_size
    width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    yield from _linear(f"{prefix}q_proj", width, hidden, bias=config.qkv_bias)
    yield from _linear(f"{prefix}k_proj", kv_width, hidden, bias=config.qkv_bias)
    yield from _linear(f"{prefix}v_proj", kv_width, hidden, bias=config.qkv_bias)
    yield from _linear(f"{prefix}o_proj", hidden, width, bias=config.o_bias)
    if config.qk_norm:
        yield f"{prefix}q_norm.weight", (config.head_dim,)
        yield f"{prefix}k_norm.weight", (config.head_dim,)


def _mlp(config: ModelConfig, prefix: str, width: int, *, bias: bool) -> Iterator[NamedShape]:
    yield from _linear(f"{prefix}gate_proj", width, config.hidden_size, bias=bias)
    yield from _linear(f"{prefix}up_proj", width, config.hidden_size, bias=bias)
    yield from _linear(f"{prefix}down_proj", config.hidden_size, width, bias=bias)


def _moe(config: ModelConfig, moe: MoEConfig, prefix: str) -> Iterator[NamedShape]:
    yield f"{prefix}gate.weight", (moe.num_experts, config.hidden_size)
    for expert in range(moe.num_experts):
        yield from _mlp(config, f"{prefix}experts.{expert}.", moe.intermediate_size, bias=False)


def _head(config: ModelConfig) -> Iterator[NamedShape]:
    if config.value_model:
        yield from _linear("score", 1, config.hidden_size, bias=config.value_bias)
    elif not config.tied:
        yield "lm_head.weight", (config.vocab_size, config.hidden_size)

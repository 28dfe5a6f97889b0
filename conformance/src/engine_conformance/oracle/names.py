"""The Hugging Face checkpoint names and shapes of a model, written out from its architecture."""

from __future__ import annotations

from collections.abc import Iterator

from engine_conformance.oracle.config import LatentAttention, ModelConfig, MoEConfig

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
    shapes.update(_norm(config, f"model.{config.names.final_norm}", config.hidden_size))
    shapes.update(_head(config))
    return shapes


def _norm(config: ModelConfig, name: str, width: int) -> Iterator[NamedShape]:
    yield f"{name}.weight", (width,)
    if config.layer_norms:
        yield f"{name}.bias", (width,)


def _layer(config: ModelConfig, index: int) -> Iterator[NamedShape]:
    prefix = f"model.layers.{index}."
    names = config.names
    yield from _norm(config, f"{prefix}{names.attention_norm}", config.hidden_size)
    if index in config.mixers:
        yield from _convolution(config, f"{prefix}conv.")
    elif config.latent is not None:
        yield from _latent(config, config.latent, f"{prefix}self_attn.")
    else:
        yield from _attention(config, f"{prefix}self_attn.")
    if not config.parallel:
        yield from _norm(config, f"{prefix}{names.mlp_norm}", config.hidden_size)
    if config.norms_after:
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            yield f"{prefix}{name}.weight", (config.hidden_size,)
    if config.moe is not None and index in config.moe.sparse_layers:
        yield from _moe(config, config.moe, f"{prefix}mlp.")
    else:
        width = config.intermediate_size
        yield from _mlp(config, f"{prefix}{names.mlp}.", width, bias=config.mlp_bias)


def _convolution(config: ModelConfig, prefix: str) -> Iterator[NamedShape]:
    hidden = config.hidden_size
    yield f"{prefix}conv.weight", (hidden, 1, config.mixer_width)
    yield f"{prefix}in_proj.weight", (3 * hidden, hidden)
    yield f"{prefix}out_proj.weight", (hidden, hidden)


def _latent(config: ModelConfig, own: LatentAttention, prefix: str) -> Iterator[NamedShape]:
    hidden, heads = config.hidden_size, config.num_heads
    yield f"{prefix}q_a_proj.weight", (own.query_rank, hidden)
    yield f"{prefix}q_a_layernorm.weight", (own.query_rank,)
    width = own.plain_dim + own.rotary_dim
    yield f"{prefix}q_b_proj.weight", (heads * width, own.query_rank)
    yield f"{prefix}kv_a_proj_with_mqa.weight", (own.key_rank + own.rotary_dim, hidden)
    yield f"{prefix}kv_a_layernorm.weight", (own.key_rank,)
    yield f"{prefix}kv_b_proj.weight", (heads * (own.plain_dim + own.value_dim), own.key_rank)
    yield f"{prefix}o_proj.weight", (hidden, heads * own.value_dim)
    if own.selected is None:
        return
    yield f"{prefix}indexer.wq_b.weight", (own.index_heads * own.index_dim, own.query_rank)
    yield f"{prefix}indexer.wk.weight", (own.index_dim, hidden)
    yield f"{prefix}indexer.k_norm.weight", (own.index_dim,)
    yield f"{prefix}indexer.k_norm.bias", (own.index_dim,)
    yield f"{prefix}indexer.weights_proj.weight", (own.index_heads, hidden)


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
    yield from _linear(f"{prefix}{config.names.output}", hidden, width, bias=config.o_bias)
    if config.qk_norm:
        yield f"{prefix}{config.names.query_norm}.weight", (config.head_dim,)
        yield f"{prefix}{config.names.key_norm}.weight", (config.head_dim,)
    if config.sinks:
        yield f"{prefix}sinks", (config.num_heads,)


def _mlp(config: ModelConfig, prefix: str, width: int, *, bias: bool) -> Iterator[NamedShape]:
    names = config.names
    if names.gate:
        yield from _linear(f"{prefix}{names.gate}", width, config.hidden_size, bias=bias)
    yield from _linear(f"{prefix}{names.up}", width, config.hidden_size, bias=bias)
    yield from _linear(f"{prefix}{names.down}", config.hidden_size, width, bias=bias)


def _moe(config: ModelConfig, moe: MoEConfig, prefix: str) -> Iterator[NamedShape]:
    experts, hidden, width = moe.num_experts, config.hidden_size, moe.intermediate_size
    yield from _linear(f"{prefix}{moe.router}", experts, hidden, bias=moe.clamped)
    if moe.clamped:
        yield f"{prefix}experts.gate_up_proj", (experts, hidden, 2 * width)
        yield f"{prefix}experts.gate_up_proj_bias", (experts, 2 * width)
        yield f"{prefix}experts.down_proj", (experts, width, hidden)
        yield f"{prefix}experts.down_proj_bias", (experts, hidden)
        return
    if moe.sigmoid:
        yield f"{prefix}gate.e_score_correction_bias", (experts,)
    for expert in range(experts):
        yield from _mlp(config, f"{prefix}experts.{expert}.", width, bias=False)
    if moe.shared_size:
        yield from _mlp(config, f"{prefix}shared_experts.", moe.shared_size, bias=False)


def _head(config: ModelConfig) -> Iterator[NamedShape]:
    if config.value_model:
        yield from _linear("score", 1, config.hidden_size, bias=config.value_bias)
    elif not config.tied:
        yield "lm_head.weight", (config.vocab_size, config.hidden_size)
        if config.head_bias:
            yield "lm_head.bias", (config.vocab_size,)

"""torchtitan's tree of model configurations, made from transformers' configuration of a folder.

torchtitan's own ready-made trees (its flavors) are never used. Each field of ``config.json`` is
either mapped to the tree, known to change nothing, or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_api.errors import UnsupportedCapability
from engine_api.hf_mtp import MTP_COUNTS
from engine_torch.model import Kind
from engine_torchtitan.families import FAMILIES, Family
from engine_torchtitan.library import (
    Decoder,
    Embedding,
    FeedForward,
    Linear,
    RMSNorm,
    ShardingConfig,
    TransformerBlock,
    make_ffn_config,
    rowwise_config,
)

__all__ = ["build_tree", "has_experts", "set_layouts"]

_ENGINE = "engine-torchtitan"

# Fields that are read of every family.
_MAPPED = frozenset(
    {
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        "tie_word_embeddings",
        "token_classification_bias",
        "vocab_size",
    }
)
# Fields that say nothing about what a model computes in a forward pass: names and versions, tokens
# of generation, a head that predicts further tokens, what transformers returns, a dropout that a
# value head does not apply, and numbers for training and initialization that the engine reads
# elsewhere or that other keys turn on.
_IDLE = MTP_COUNTS | {
    "_name_or_path",
    "architectures",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "max_position_embeddings",
    "max_window_layers",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
# Fields with the one value that torchtitan's blocks compute. `refuse_noise` refuses rates of
# dropout for an engine that trains, and inference has none.
_FIXED: Mapping[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "sliding_window": None,
    "use_sliding_window": False,
}
_RATES = frozenset({"attention_dropout"})
# Fields of rope_parameters, by type. Frequencies of other types follow the length of a document.
_ROPE: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "factor",
            "mscale",
            "mscale_all_dim",
            "original_max_position_embeddings",
            "truncate",
        }
    ),
}


def build_tree(hf_config: Any, kind: Kind) -> Decoder.Config:
    """Return torchtitan's configuration of a model.

    The head of a value model has the place of the language model's.

    Args:
        hf_config: transformers' configuration of a family in ``FAMILIES``, with overrides applied.
        kind: kind of the model.

    Raises:
        UnsupportedCapability: a field has no mapping to the tree.
    """
    family = FAMILIES[hf_config.model_type]
    _refuse_unmapped(hf_config, family)
    dim = hf_config.hidden_size

    def make_norm() -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=dim, eps=hf_config.rms_norm_eps)

    def make_dense() -> FeedForward.Config:
        return make_ffn_config(
            dim=dim,
            hidden_dim=hf_config.intermediate_size,
            # The weights are read or drawn when the model has been divided.
            w1_param_init={},
            w2w3_param_init={},
        )

    def make_block(index: int) -> TransformerBlock.Config:
        experts = family.make_experts if family.is_sparse(hf_config, index) else None
        return family.block(
            attention_norm=make_norm(),
            ffn_norm=make_norm(),
            attention=family.make_attention(hf_config, index),
            feed_forward=make_dense() if experts is None else None,
            moe=None if experts is None else experts(hf_config),
        )

    has_values = kind == "value_model"
    return family.model(
        vocab_size=hf_config.vocab_size,
        dim=dim,
        norm=make_norm(),
        enable_weight_tying=hf_config.tie_word_embeddings and not has_values,
        tok_embeddings=Embedding.Config(num_embeddings=hf_config.vocab_size, embedding_dim=dim),
        lm_head=Linear.Config(
            in_features=dim,
            out_features=1 if has_values else hf_config.vocab_size,
            bias=has_values and getattr(hf_config, "token_classification_bias", True),
        ),
        layers=[make_block(index) for index in range(hf_config.num_hidden_layers)],
    )


def has_experts(hf_config: Any) -> bool:
    """Return whether a model that ``build_tree`` has taken has a layer with experts."""
    family = FAMILIES[hf_config.model_type]
    return any(family.is_sparse(hf_config, i) for i in range(hf_config.num_hidden_layers))


def set_layouts(
    tree: Decoder.Config,
    model_type: str,
    kind: Kind,
    *,
    sequence_parallel: bool,
    divides_experts: bool,
) -> None:
    """Give each part of a tree torchtitan's layout of tensor and expert parallelism.

    ``Decoder.Config.update_from_config`` would do so, too, and imports torchtitan's trainer.
    """
    FAMILIES[model_type].set_layouts(
        tree,
        enable_sp=sequence_parallel,
        **({} if model_type == "llama" else {"enable_ep": divides_experts}),
    )
    for block in tree.layers:
        # The frequencies are the same on each rank, and take part as a plain tensor.
        block.attention.rope.sharding_config = None
    if kind == "value_model":
        # One output cannot be divided: each rank computes all values. A bias of rows is whole, too.
        whole = rowwise_config().state_shardings["bias"]
        tree.lm_head.sharding_config = ShardingConfig(
            state_shardings={"weight": whole, "bias": whole}
        )


def _refuse_unmapped(hf_config: Any, family: Family) -> None:
    """Raise ``UnsupportedCapability`` for the first field that would be left out."""
    taken = (_MAPPED | family.mapped) | (_IDLE | family.idle) | _RATES
    fixed = {**_FIXED, **family.fixed}
    for name, value in hf_config.to_dict().items():
        # transformers' own null means that a field says nothing.
        if name in taken or value is None:
            continue
        if name == "layer_types" and set(value) == {"full_attention"}:
            continue
        if name not in fixed:
            _refuse(name, value, "this engine has no mapping for it")
        if value != fixed[name]:
            _refuse(name, value, f"torchtitan's blocks compute {fixed[name]!r} alone")
    for name in family.needed:
        if getattr(hf_config, name) is None:
            raise UnsupportedCapability(
                f"{name}: null in config.json",
                where=_ENGINE,
                why="transformers computes no such model",
                remedy=f"set {name} in config.json or in model.config_overrides",
            )
    if hf_config.model_type == "deepseek_v3":
        _refuse_other_heads(hf_config)
    if "layer_types" in family.mapped:
        _refuse_other_layers(hf_config)
    _refuse_unmapped_rope(dict(hf_config.rope_parameters))


def _refuse_other_heads(hf_config: Any) -> None:
    """Raise ``UnsupportedCapability`` for sizes of latent heads that transformers does not have."""
    heads = hf_config.num_attention_heads
    if hf_config.num_key_value_heads != heads:
        why = f"each of the {heads} heads has keys of its own"
        _refuse("num_key_value_heads", hf_config.num_key_value_heads, why)
    rotated = hf_config.qk_rope_head_dim
    if hf_config.head_dim != rotated:
        _refuse("head_dim", hf_config.head_dim, f"qk_rope_head_dim is {rotated}")


def _refuse_other_layers(hf_config: Any) -> None:
    """Raise ``UnsupportedCapability`` for layers other than whole attention and windows."""
    types = hf_config.layer_types
    other = sorted(set(types) - {"full_attention", "sliding_attention"})
    if other or len(types) != hf_config.num_hidden_layers:
        why = "expected full_attention or sliding_attention for each layer"
        _refuse("layer_types", types, why)
    if "sliding_attention" in types and not hf_config.sliding_window:
        _refuse("sliding_window", hf_config.sliding_window, "layers of layer_types have a window")


def _refuse_unmapped_rope(rope: dict[str, Any]) -> None:
    """Raise ``UnsupportedCapability`` for rotary positions that would be computed differently."""
    kind = rope.pop("rope_type", "default")
    rope.pop("rope_theta", None)
    if kind not in _ROPE:
        _refuse("rope_parameters.rope_type", kind, f"this engine has {', '.join(_ROPE)}")
    for name, value in rope.items():
        if name == "partial_rotary_factor" and value == 1.0:
            continue
        if name not in _ROPE[kind] and name != "type":
            _refuse(f"rope_parameters.{name}", value, "this engine has no mapping for it")


def _refuse(name: str, value: Any, why: str) -> None:
    raise UnsupportedCapability(
        f"{name}: {value!r:.100} in config.json",
        where=_ENGINE,
        why=why,
        remedy="use backend fsdp2 for this model, or set the field to null in "
        "model.config_overrides if it changes nothing",
    )

"""torchtitan's tree of model configurations, made from transformers' configuration of a folder.

torchtitan's own ready-made trees (its flavors) are never used. Each field of ``config.json`` is
either mapped to the tree, known to change nothing, or refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine_api.errors import UnsupportedCapability
from engine_api.hf_mtp import MTP_COUNTS
from engine_torchtitan.library import (
    Decoder,
    Embedding,
    FeedForward,
    Linear,
    Llama3Model,
    Llama3StateDictAdapter,
    Llama3TransformerBlock,
    Qwen3Model,
    Qwen3StateDictAdapter,
    Qwen3TransformerBlock,
    RMSNorm,
    StateDictAdapter,
    TransformerBlock,
    make_ffn_config,
    make_gqa_config,
    make_routed_experts_config,
    set_llama3_sharding_config,
    set_qwen3_sharding_config,
)
from engine_torchtitan.modules import (
    Exchange,
    Experts,
    FrequencyRoPE,
    Mixture,
    PackedAttention,
    Router,
)

__all__ = ["FAMILIES", "Family", "build_tree", "has_experts", "set_layouts"]

_ENGINE = "engine-torchtitan"


@dataclass(frozen=True, kw_only=True)
class Family:
    """torchtitan's classes of one model family."""

    model: type[Decoder.Config]
    """Configuration of the whole model."""

    block: type[TransformerBlock.Config]
    """Configuration of one block."""

    adapter: type[StateDictAdapter]
    """Class with torchtitan's names of the saved tensors."""

    normalizes_heads: bool = False
    """True if queries and keys are normalized head by head."""

    has_experts: bool = False
    """True if its layers may be mixtures of experts."""

    set_layouts: Callable[..., None]
    """Function that gives each part of the tree its layout of tensor parallelism."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        model=Llama3Model.Config,
        block=Llama3TransformerBlock.Config,
        adapter=Llama3StateDictAdapter,
        set_layouts=set_llama3_sharding_config,
    ),
    "qwen3": Family(
        model=Qwen3Model.Config,
        block=Qwen3TransformerBlock.Config,
        adapter=Qwen3StateDictAdapter,
        normalizes_heads=True,
        set_layouts=set_qwen3_sharding_config,
    ),
    "qwen3_moe": Family(
        model=Qwen3Model.Config,
        block=Qwen3TransformerBlock.Config,
        adapter=Qwen3StateDictAdapter,
        normalizes_heads=True,
        has_experts=True,
        set_layouts=set_qwen3_sharding_config,
    ),
}
"""The families that the engine builds, by ``model_type`` in ``config.json``."""

# Fields that `build_tree` reads.
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
        "vocab_size",
    }
)
# Fields that `build_tree` reads of a family with experts.
_MAPPED_OF_EXPERTS = frozenset(
    {
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts",
        "num_experts_per_tok",
        "num_local_experts",
    }
)
# Fields that say nothing about what a model computes in a forward pass: names and versions, tokens
# of generation, a head that predicts further tokens, what transformers returns, and numbers for
# training and initialization that the engine reads elsewhere or that other keys turn on.
_IDLE = MTP_COUNTS | {
    "_name_or_path",
    "architectures",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
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


def build_tree(hf_config: Any) -> Decoder.Config:
    """Return torchtitan's configuration of a model.

    Args:
        hf_config: transformers' configuration of a family in ``FAMILIES``, with overrides applied.

    Raises:
        UnsupportedCapability: a field has no mapping to the tree.
    """
    _refuse_unmapped(hf_config)
    family = FAMILIES[hf_config.model_type]
    dim = hf_config.hidden_size
    head_dim = getattr(hf_config, "head_dim", None) or dim // hf_config.num_attention_heads
    frequencies, amplitude = _find_frequencies(hf_config, head_dim)
    rope = FrequencyRoPE.Config(
        dim=head_dim,
        # The engine's positions need no table, so nothing has this length.
        max_seq_len=hf_config.max_position_embeddings,
        frequencies=frequencies,
        amplitude=amplitude,
    )

    def make_norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=hf_config.rms_norm_eps)

    def make_dense() -> FeedForward.Config:
        return make_ffn_config(
            dim=dim,
            hidden_dim=hf_config.intermediate_size,
            w1_param_init={},
            w2w3_param_init={},
        )

    def make_block(index: int) -> TransformerBlock.Config:
        sparse = family.has_experts and _is_sparse(hf_config, index)
        return family.block(
            attention_norm=make_norm(dim),
            ffn_norm=make_norm(dim),
            attention=make_gqa_config(
                dim=dim,
                n_heads=hf_config.num_attention_heads,
                n_kv_heads=hf_config.num_key_value_heads,
                head_dim=head_dim,
                # The weights are read or drawn when the model has been divided.
                wqkv_param_init={},
                wo_param_init={},
                inner_attention=PackedAttention.Config(),
                # A fused weight would be saved as three, of which each rank holds several ranges.
                fuse_qkv=False,
                rope=rope,
                qk_norm=make_norm(head_dim) if family.normalizes_heads else None,
            ),
            feed_forward=None if sparse else make_dense(),
            moe=_make_experts(hf_config) if sparse else None,
        )

    return family.model(
        vocab_size=hf_config.vocab_size,
        dim=dim,
        norm=make_norm(dim),
        enable_weight_tying=hf_config.tie_word_embeddings,
        tok_embeddings=Embedding.Config(num_embeddings=hf_config.vocab_size, embedding_dim=dim),
        lm_head=Linear.Config(in_features=dim, out_features=hf_config.vocab_size),
        layers=[make_block(index) for index in range(hf_config.num_hidden_layers)],
    )


def has_experts(hf_config: Any) -> bool:
    """Return whether a model that ``build_tree`` has taken has a layer with experts."""
    family = FAMILIES[hf_config.model_type]
    layers = range(hf_config.num_hidden_layers)
    return family.has_experts and any(_is_sparse(hf_config, index) for index in layers)


def _is_sparse(hf_config: Any, index: int) -> bool:
    """Return whether a layer is a mixture of experts, by the rule of Qwen3's configuration."""
    return (
        index not in hf_config.mlp_only_layers
        and hf_config.num_experts > 0
        and (index + 1) % hf_config.decoder_sparse_step == 0
    )


def _make_experts(hf_config: Any) -> Mixture.Config:
    """Return the configuration of a layer's experts and their router."""
    sizes = {
        "dim": hf_config.hidden_size,
        "hidden_dim": hf_config.moe_intermediate_size,
        "num_experts": hf_config.num_experts,
    }
    top_k = hf_config.num_experts_per_tok
    # This exchange of tokens is torch's all-to-all, and nothing where experts are not divided.
    routed = make_routed_experts_config(
        **sizes, top_k=top_k, param_init={}, comm_backend="standard"
    )
    routed.inner_experts = Experts.Config(**sizes)
    routed.token_dispatcher = Exchange.Config(num_experts=sizes["num_experts"], top_k=top_k)
    return Mixture.Config(
        num_experts=hf_config.num_experts,
        routed_experts=routed,
        router=Router.Config(
            num_experts=hf_config.num_experts,
            gate=Linear.Config(in_features=sizes["dim"], out_features=sizes["num_experts"]),
            top_k=top_k,
            score_func="softmax",
            route_norm=hf_config.norm_topk_prob,
        ),
        # A bias that balances the experts would move in training and be in no export, so that a
        # rollout would serve another model.
        load_balance_coeff=None,
    )


def set_layouts(
    tree: Decoder.Config, model_type: str, *, sequence_parallel: bool, divides_experts: bool
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


def _refuse_unmapped(hf_config: Any) -> None:
    """Raise ``UnsupportedCapability`` for the first field that would be left out."""
    mapped = _MAPPED
    if FAMILIES[hf_config.model_type].has_experts:
        mapped |= _MAPPED_OF_EXPERTS
    for name, value in hf_config.to_dict().items():
        # transformers' own null means that a field says nothing.
        if name in mapped or name in _IDLE or name in _RATES or value is None:
            continue
        if name == "layer_types" and set(value) == {"full_attention"}:
            continue
        if name not in _FIXED:
            _refuse(name, value, "this engine has no mapping for it")
        if value != _FIXED[name]:
            _refuse(name, value, f"torchtitan's blocks compute {_FIXED[name]!r} alone")
    _refuse_unmapped_rope(dict(hf_config.rope_parameters))


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


def _find_frequencies(hf_config: Any, head_dim: int) -> tuple[Tensor, float]:
    """Return the rotary frequencies ``[head_dim / 2]`` and the factor of cosines and sines.

    transformers' own functions compute them, so that both round alike.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = hf_config.rope_parameters.get("rope_type", "default")
    if kind == "default":
        base = hf_config.rope_parameters["rope_theta"]
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return 1.0 / (base**exponents), 1.0
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    return frequencies.float(), float(amplitude)

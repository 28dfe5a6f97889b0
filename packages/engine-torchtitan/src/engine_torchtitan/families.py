"""The families that torchtitan has, and what they make of a transformers configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine_torchtitan.library import (
    BaseAttention,
    Decoder,
    DeepSeekV3Model,
    DeepSeekV3StateDictAdapter,
    DeepSeekV3TransformerBlock,
    GptOssModel,
    GptOssStateDictAdapter,
    GptOssTransformerBlock,
    GroupedExperts,
    LatentAttention,
    Linear,
    Llama3Model,
    Llama3StateDictAdapter,
    Llama3TransformerBlock,
    QKVLinear,
    Qwen3Model,
    Qwen3StateDictAdapter,
    Qwen3TransformerBlock,
    RMSNorm,
    RoutedExperts,
    StateDictAdapter,
    TransformerBlock,
    make_ffn_config,
    make_gqa_config,
    rowwise_config,
    set_deepseek_v3_sharding_config,
    set_gpt_oss_sharding_config,
    set_llama3_sharding_config,
    set_qwen3_sharding_config,
)
from engine_torchtitan.modules import (
    BiasedExperts,
    ExactGate,
    Exchange,
    Experts,
    FrequencyRoPE,
    GroupRouter,
    LogitRouter,
    Mixture,
    PackedAttention,
    Router,
    SinkAttention,
)

__all__ = ["FAMILIES", "Family"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """torchtitan's classes of one model family, and the fields of its configuration."""

    model: type[Decoder.Config]
    """Configuration of the whole model."""

    block: type[TransformerBlock.Config]
    """Configuration of one block."""

    adapter: type[StateDictAdapter]
    """Class with torchtitan's names of the saved tensors."""

    set_layouts: Callable[..., None]
    """Function that gives each part of the tree its layout of tensor parallelism."""

    make_attention: Callable[[Any, int], BaseAttention.Config]
    """Function of the configuration and a layer's number that returns its attention."""

    make_experts: Callable[[Any], Mixture.Config] | None = None
    """Function of the configuration that returns a layer's experts, or None without experts."""

    is_sparse: Callable[[Any, int], bool] = lambda _config, _index: False
    """Function that returns whether the layer of this number is a mixture of experts."""

    experts: str = "num_experts"
    """Field with the number of experts."""

    expert_width: str = "moe_intermediate_size"
    """Field with the width of an expert."""

    dense_width: str | None = "intermediate_size"
    """Field with the width of layers without experts, or None for a family without such layers."""

    mapped: frozenset[str] = frozenset()
    """Fields that are read in addition to those that are read of every family."""

    idle: frozenset[str] = frozenset()
    """Fields that its published models have, and transformers does not read."""

    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields with the one value that is computed."""

    needed: tuple[str, ...] = ()
    """Fields that transformers needs and lets be null."""

    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Saved names, by torchtitan's, that its adapter does not have as transformers has them."""

    transposed: frozenset[str] = frozenset()
    """Names of parameters, as in the adapter, that are saved transposed."""

    divides_context: bool = True
    """True if context parallelism can divide the tokens of its attention."""


# --- parts of every family ----------------------------------------------------------------------


def _make_rope(hf_config: Any, dim: int, **given: Any) -> FrequencyRoPE.Config:
    """Return rotary positions of heads with ``dim`` rotated dimensions."""
    frequencies, amplitude = _find_frequencies(hf_config, dim)
    return FrequencyRoPE.Config(
        dim=dim,
        # The engine's positions need no table, so nothing has this length.
        max_seq_len=hf_config.max_position_embeddings,
        frequencies=frequencies,
        amplitude=amplitude,
        **given,
    )


def _find_frequencies(hf_config: Any, dim: int) -> tuple[Tensor, float]:
    """Return the rotary frequencies ``[dim / 2]`` and the factor of cosines and sines.

    transformers' own functions compute them, so that both round alike.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = hf_config.rope_parameters.get("rope_type", "default")
    if kind == "default":
        base = hf_config.rope_parameters["rope_theta"]
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return 1.0 / (base**exponents), 1.0
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    return frequencies.float(), float(amplitude)


def _head_dim(hf_config: Any) -> int:
    """Return the size of a head of grouped attention."""
    size = getattr(hf_config, "head_dim", None)
    return int(size or hf_config.hidden_size // hf_config.num_attention_heads)


def _make_mixture(
    hf_config: Any,
    experts: GroupedExperts.Config,
    router: Router.Config,
    *,
    is_biased: bool = False,
    shared: int = 0,
) -> Mixture.Config:
    """Return a layer's experts with their router.

    Args:
        hf_config: configuration of the model.
        experts: configuration of the experts.
        router: configuration of the router.
        is_biased: True where a saved bias selects experts.
        shared: width of the expert of all tokens, or 0 for none.
    """
    return Mixture.Config(
        num_experts=experts.num_experts,
        routed_experts=RoutedExperts.Config(
            inner_experts=experts,
            # This exchange of tokens is torch's all-to-all, and nothing where experts are not
            # divided.
            token_dispatcher=Exchange.Config(num_experts=experts.num_experts, top_k=router.top_k),
        ),
        router=router,
        shared_experts=_make_shared(hf_config, shared) if shared else None,
        # torchtitan makes the bias where it has a speed to move it. Its trainer would move it, and
        # this engine does not: the bias stays as it is saved.
        load_balance_coeff=1.0 if is_biased else None,
    )


def _make_shared(hf_config: Any, width: int) -> Any:
    return make_ffn_config(
        dim=hf_config.hidden_size, hidden_dim=width, w1_param_init={}, w2w3_param_init={}
    )


# --- Llama 3 and Qwen3 --------------------------------------------------------------------------


def _make_grouped(
    hf_config: Any, _index: int, *, normalizes_heads: bool = False
) -> BaseAttention.Config:
    """Return the attention of Llama and Qwen3.

    ``normalizes_heads`` is true if queries and keys are normalized head by head.
    """
    head_dim = _head_dim(hf_config)
    norm = RMSNorm.Config(normalized_shape=head_dim, eps=hf_config.rms_norm_eps)
    return make_gqa_config(
        dim=hf_config.hidden_size,
        n_heads=hf_config.num_attention_heads,
        n_kv_heads=hf_config.num_key_value_heads,
        head_dim=head_dim,
        # The weights are read or drawn when the model has been divided.
        wqkv_param_init={},
        wo_param_init={},
        inner_attention=PackedAttention.Config(),
        # A fused weight would be saved as three, of which each rank holds several ranges.
        fuse_qkv=False,
        rope=_make_rope(hf_config, head_dim),
        qk_norm=norm if normalizes_heads else None,
    )


def _is_sparse_in_qwen(hf_config: Any, index: int) -> bool:
    return (
        index not in hf_config.mlp_only_layers
        and hf_config.num_experts > 0
        and (index + 1) % hf_config.decoder_sparse_step == 0
    )


def _make_experts_of_qwen(hf_config: Any) -> Mixture.Config:
    number = hf_config.num_experts
    return _make_mixture(
        hf_config,
        Experts.Config(
            dim=hf_config.hidden_size,
            hidden_dim=hf_config.moe_intermediate_size,
            num_experts=number,
        ),
        Router.Config(
            num_experts=number,
            gate=Linear.Config(in_features=hf_config.hidden_size, out_features=number),
            top_k=hf_config.num_experts_per_tok,
            score_func="softmax",
            route_norm=hf_config.norm_topk_prob,
        ),
    )


# --- DeepSeek-V3 --------------------------------------------------------------------------------

# transformers normalizes latent vectors with this epsilon, whatever rms_norm_eps is.
_LATENT_EPS = 1e-6


def _make_latent(hf_config: Any, _index: int) -> BaseAttention.Config:
    """Return the latent attention of DeepSeek-V3."""
    dim = hf_config.hidden_size
    heads = hf_config.num_attention_heads
    key_dim = hf_config.qk_nope_head_dim + hf_config.qk_rope_head_dim
    query_rank = hf_config.q_lora_rank or 0
    rank = hf_config.kv_lora_rank
    scaling = hf_config.rope_parameters

    def make_linear(size: int, out: int) -> Linear.Config:
        return Linear.Config(in_features=size, out_features=out)

    queries: dict[str, Any] = (
        {
            "wq_a": make_linear(dim, query_rank),
            "wq_b": make_linear(query_rank, heads * key_dim),
        }
        if query_rank
        else {"wq": make_linear(dim, heads * key_dim)}
    )
    # torchtitan multiplies scores by the square of a factor, as transformers does where
    # rope_parameters has mscale_all_dim. Without it the factor is 1.
    is_scaled = bool(scaling.get("rope_type") == "yarn" and scaling.get("mscale_all_dim"))
    return LatentAttention.Config(
        n_heads=heads,
        dim=dim,
        **queries,
        wkv_a=make_linear(dim, rank + hf_config.qk_rope_head_dim),
        wkv_b=make_linear(rank, heads * (hf_config.qk_nope_head_dim + hf_config.v_head_dim)),
        wo=make_linear(heads * hf_config.v_head_dim, dim),
        q_lora_rank=query_rank,
        kv_lora_rank=rank,
        q_norm=RMSNorm.Config(normalized_shape=query_rank, eps=_LATENT_EPS),
        kv_norm=RMSNorm.Config(normalized_shape=rank, eps=_LATENT_EPS),
        qk_nope_head_dim=hf_config.qk_nope_head_dim,
        qk_rope_head_dim=hf_config.qk_rope_head_dim,
        v_head_dim=hf_config.v_head_dim,
        rope=_make_rope(
            hf_config,
            hf_config.qk_rope_head_dim,
            interleaved=bool(hf_config.rope_interleave),
            scaling="yarn" if is_scaled else "none",
            rope_factor=float(scaling["factor"]) if is_scaled else 1.0,
        ),
        inner_attention=PackedAttention.Config(),
        mscale=float(scaling["mscale_all_dim"]) if is_scaled else 1.0,
    )


def _make_experts_of_deepseek(hf_config: Any) -> Mixture.Config:
    number = hf_config.n_routed_experts
    width = hf_config.moe_intermediate_size
    return _make_mixture(
        hf_config,
        Experts.Config(dim=hf_config.hidden_size, hidden_dim=width, num_experts=number),
        GroupRouter.Config(
            num_experts=number,
            gate=ExactGate.Config(in_features=hf_config.hidden_size, out_features=number),
            num_expert_groups=hf_config.n_group,
            num_limited_groups=hf_config.topk_group,
            top_k=hf_config.num_experts_per_tok,
            route_norm=bool(hf_config.norm_topk_prob),
            route_scale=hf_config.routed_scaling_factor,
        ),
        is_biased=True,
        shared=width * hf_config.n_shared_experts,
    )


# --- gpt-oss ------------------------------------------------------------------------------------

_GPT_OSS_EXPERTS = "layers.{}.moe.routed_experts.inner_experts."


def _make_attention_with_sinks(hf_config: Any, index: int) -> BaseAttention.Config:
    """Return the attention of gpt-oss, which has a window in some layers."""
    dim = hf_config.hidden_size
    head_dim = _head_dim(hf_config)
    heads, groups = hf_config.num_attention_heads, hf_config.num_key_value_heads
    windowed = hf_config.layer_types[index] == "sliding_attention"

    def make_linear(size: int, out: int) -> Linear.Config:
        return Linear.Config(in_features=size, out_features=out, bias=hf_config.attention_bias)

    return SinkAttention.Config(
        n_heads=heads,
        n_kv_heads=groups,
        head_dim=head_dim,
        dim=dim,
        qkv_linear=QKVLinear.Config(
            head_dim=head_dim,
            wq=make_linear(dim, heads * head_dim),
            wkv=make_linear(dim, groups * head_dim),
        ),
        wo=make_linear(heads * head_dim, dim),
        inner_attention=PackedAttention.Config(
            window=hf_config.sliding_window if windowed else None
        ),
        rope=_make_rope(hf_config, head_dim),
    )


def _make_experts_of_gpt_oss(hf_config: Any) -> Mixture.Config:
    number = hf_config.num_local_experts
    return _make_mixture(
        hf_config,
        BiasedExperts.Config(
            dim=hf_config.hidden_size,
            hidden_dim=hf_config.intermediate_size,
            num_experts=number,
            # transformers before 5.19 has these numbers in its model, not in its configuration.
            swiglu_limit=getattr(hf_config, "swiglu_limit", 7.0),
            swiglu_alpha=getattr(hf_config, "swiglu_alpha", 1.702),
        ),
        LogitRouter.Config(
            num_experts=number,
            gate=Linear.Config(in_features=hf_config.hidden_size, out_features=number, bias=True),
            top_k=hf_config.num_experts_per_tok,
        ),
    )


def _set_layouts_of_gpt_oss(tree: Any, *, enable_sp: bool, enable_ep: bool) -> None:
    """Give each part of gpt-oss its layout of tensor parallelism.

    torchtitan divides the bias behind attention by the number of ranks, for another SPMD backend.
    DTensor adds it once, and gives each rank its whole gradient.
    """
    set_gpt_oss_sharding_config(tree, enable_sp=enable_sp, enable_ep=enable_ep)
    for block in tree.layers:
        block.attention.wo.sharding_config = rowwise_config(output_sp=enable_sp)


_QWEN: dict[str, Any] = {
    "model": Qwen3Model.Config,
    "block": Qwen3TransformerBlock.Config,
    "adapter": Qwen3StateDictAdapter,
    "set_layouts": set_qwen3_sharding_config,
    "make_attention": partial(_make_grouped, normalizes_heads=True),
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        model=Llama3Model.Config,
        block=Llama3TransformerBlock.Config,
        adapter=Llama3StateDictAdapter,
        set_layouts=set_llama3_sharding_config,
        make_attention=_make_grouped,
    ),
    "qwen3": Family(**_QWEN),
    "qwen3_moe": Family(
        **_QWEN,
        make_experts=_make_experts_of_qwen,
        is_sparse=_is_sparse_in_qwen,
        mapped=frozenset(
            {
                "decoder_sparse_step",
                "mlp_only_layers",
                "moe_intermediate_size",
                "norm_topk_prob",
                "num_experts",
                "num_experts_per_tok",
                "num_local_experts",
            }
        ),
    ),
    "deepseek_v3": Family(
        model=DeepSeekV3Model.Config,
        block=DeepSeekV3TransformerBlock.Config,
        adapter=DeepSeekV3StateDictAdapter,
        set_layouts=set_deepseek_v3_sharding_config,
        make_attention=_make_latent,
        make_experts=_make_experts_of_deepseek,
        is_sparse=lambda config, index: index >= config.first_k_dense_replace,
        experts="n_routed_experts",
        mapped=frozenset(
            {
                "first_k_dense_replace",
                "kv_lora_rank",
                "moe_intermediate_size",
                "n_group",
                "n_routed_experts",
                "n_shared_experts",
                "norm_topk_prob",
                "num_experts_per_tok",
                "num_local_experts",
                "q_lora_rank",
                "qk_nope_head_dim",
                "qk_rope_head_dim",
                "rope_interleave",
                "routed_scaling_factor",
                "topk_group",
                "v_head_dim",
            }
        ),
        idle=frozenset({"aux_loss_alpha", "ep_size", "qk_head_dim", "seq_aux"}),
        fixed={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        needed=(
            "first_k_dense_replace",
            "n_group",
            "num_experts_per_tok",
            "topk_group",
            "v_head_dim",
        ),
    ),
    "gpt_oss": Family(
        model=GptOssModel.Config,
        block=GptOssTransformerBlock.Config,
        adapter=GptOssStateDictAdapter,
        set_layouts=_set_layouts_of_gpt_oss,
        make_attention=_make_attention_with_sinks,
        make_experts=_make_experts_of_gpt_oss,
        is_sparse=lambda _config, _index: True,
        experts="num_local_experts",
        expert_width="intermediate_size",
        dense_width=None,
        mapped=frozenset(
            {
                "attention_bias",
                "layer_types",
                "num_experts",
                "num_experts_per_tok",
                "num_local_experts",
                "sliding_window",
                "swiglu_alpha",
                "swiglu_limit",
            }
        ),
        # Names of the number of experts of a token, and of YaRN's length, in older files.
        idle=frozenset({"experts_per_token", "initial_context_length"}),
        # The adapter has the names of files in MXFP4.
        names={
            f"{_GPT_OSS_EXPERTS}mlp1_weight_EGD": "model.layers.{}.mlp.experts.gate_up_proj",
            f"{_GPT_OSS_EXPERTS}mlp1_bias_EG": "model.layers.{}.mlp.experts.gate_up_proj_bias",
            f"{_GPT_OSS_EXPERTS}mlp2_weight_EDF": "model.layers.{}.mlp.experts.down_proj",
            f"{_GPT_OSS_EXPERTS}mlp2_bias_ED": "model.layers.{}.mlp.experts.down_proj_bias",
        },
        transposed=frozenset(
            {f"{_GPT_OSS_EXPERTS}mlp1_weight_EGD", f"{_GPT_OSS_EXPERTS}mlp2_weight_EDF"}
        ),
        divides_context=False,
    ),
}
"""The families that the engine builds, by ``model_type`` in ``config.json``."""

"""Megatron's GPT model for a Hugging Face configuration, and one forward over a micro-batch."""

# Megatron is not annotated.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn

from engine_api.balance import Balance
from engine_api.batch import ROUTED_EXPERTS, Batch
from engine_api.config import EngineConfig, LoraConfig
from engine_api.devices import device_of, move_tensor
from engine_api.results import TokenOutputs
from engine_megatron.balance import StepBalance, add_balance
from engine_megatron.context import ContextShard, gather_outputs, token_order
from engine_megatron.head import Vocabulary, log_probs
from engine_megatron.latent import LatentAttention
from engine_megatron.layers import (
    BiasedColumns,
    BiasedRows,
    ExpertRows,
    GatedSharedExperts,
    Norm,
    PackedAttention,
    Packing,
    build_packing,
    steady_longest,
)
from engine_megatron.lora import add_adapters, freeze_base, require_embedding_gradient
from engine_megatron.options import MegatronOptions
from engine_megatron.parallel import DTYPES, Layout, context_group, tensor_group
from engine_megatron.replay import add_replay
from engine_megatron.shape import Mixture, Shape
from engine_megatron.te import FP8_TOKENS
from engine_megatron.weights import padded_vocabulary

# The router's products are computed by plain torch: Transformer Engine's would be in TF32. Without
# Transformer Engine the name is not even defined.
moe_utils.te_general_gemm = None
# Megatron's names of its generators.
_GENERATORS = ("model-parallel-rng", "expert-parallel-rng", "data-parallel-rng")
# Megatron's default refuses lengths that vary, with and without experts.
_DISPATCHER = "alltoall"
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class PackedGPT(GPTModel):
    """A GPT model whose last stage returns normalized hidden states.

    The heads are this engine's own.
    """

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def transformer_config(
    shape: Shape, config: EngineConfig, options: MegatronOptions, layout: Layout, *, on_cpu: bool
) -> TransformerConfig:
    """Build Megatron's configuration, with losses as sums instead of means.

    The local spec has no fused kernels.
    """
    extra: dict[str, Any] = {
        **_attention_settings(shape, layout),
        **_expert_settings(shape, layout),
        **_transformer_engine_settings(shape, config),
    }
    if layout.virtual > 1:
        # With messages in batches, Megatron's default, two messages between the same two ranks are
        # mistaken for each other.
        extra |= {
            "virtual_pipeline_model_parallel_size": layout.virtual,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    if config.memory.recompute == "full":
        extra |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    dtype = DTYPES[config.precision.compute]
    build: Any = TransformerConfig if shape.latent is None else MLATransformerConfig
    settings: TransformerConfig = build(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.eps,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=_ACTIVATIONS[shape.activation],
        # Biases of single projections are the layer spec's.
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.stages,
        context_parallel_size=layout.context,
        sequence_parallel=options.sequence_parallel,
        variable_seq_lengths=layout.stages > 1,
        moe_token_dispatcher_type=_DISPATCHER,
        use_cpu_initialization=on_cpu,
        perform_initialization=False,
        # The denominator is the caller's and is applied once before backward: Megatron must not
        # divide by the number of ranks or micro-batches.
        calculate_per_token_loss=True,
        # Megatron writes the choice to the environment (NVTE_…), so it is the same for both specs.
        # There is no fallback: input that the fused backend does not accept is an error.
        attention_backend=AttnBackend.fused,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **extra,
    )
    if shape.mixture is not None and shape.mixture.biased:
        _set_biased_experts(settings, shape.mixture)
    return settings


def _set_biased_experts(settings: TransformerConfig, mixture: Mixture) -> None:
    """Set gpt-oss's biases and its clamped gate, ``(up + 1) · gate · sigmoid(alpha · gate)``.

    Megatron's layers compute it for any function, and its checks know one alone.
    """
    settings.add_bias_linear = True
    settings.activation_func = partial(_gate, alpha=mixture.alpha)
    settings.activation_func_clamp_value = mixture.clamp
    settings.glu_linear_offset = 1.0


def _gate(x: Tensor, *, alpha: float) -> Tensor:
    return x * torch.sigmoid(alpha * x)


def _attention_settings(shape: Shape, layout: Layout) -> dict[str, Any]:
    """Return the settings of attention beyond its sizes."""
    settings: dict[str, Any] = {}
    if shape.latent is not None:
        return {
            "q_lora_rank": shape.latent.query_rank,
            "kv_lora_rank": shape.latent.rank,
            "qk_head_dim": shape.latent.plain,
            "qk_pos_emb_head_dim": shape.latent.rotary,
            "v_head_dim": shape.latent.value,
            # `LatentAttention` brings its own frequencies and scale. Megatron computes a table of
            # angles all the same, which the context-parallel ranks divide.
            "rope_type": "yarn",
            "original_max_position_embeddings": 2 * layout.context,
            "rotary_scaling_factor": 1.0,
        }
    if shape.rope.factor != 1.0 or shape.factors.scores is not None:
        scale = shape.factors.scores
        if scale is None:
            scale = 1.0 / math.sqrt(shape.head_dim)
        # Queries and keys both have RoPE's factor. Megatron applies it in its unfused RoPE alone.
        settings["softmax_scale"] = shape.rope.factor**2 * scale
    if shape.window is not None:
        settings["window_size"] = (shape.window - 1, 0)
        settings["window_attn_skip_freq"] = [int(one is not None) for one in shape.windows]
    if shape.sinks:
        settings["softmax_type"] = "learnable"
    return settings


def _transformer_engine_settings(shape: Shape, config: EngineConfig) -> dict[str, Any]:
    """Return the settings that only Transformer Engine's layers have.

    They compute RoPE and the experts in one kernel each, and FP8 products in DeepSeek-V3's blocks.
    """
    if shape.spec == "local":
        return {}
    fused: dict[str, Any] = {"apply_rope_fusion": True, "moe_grouped_gemm": bool(shape.experts)}
    if config.precision.compute == "float8":
        # Quantized weights are not kept between micro-batches: the layers would not notice a step
        # or a loaded checkpoint.
        fused |= {
            "fp8": "e4m3",
            "fp8_recipe": "blockwise",
            "disable_parameter_transpose_cache": True,
        }
    return fused


def _expert_settings(shape: Shape, layout: Layout) -> dict[str, Any]:
    """Return the settings of router and experts, without balancing loss and without capacity.

    Without renormalization the softmax is over all experts. A sigmoid's scores are renormalized in
    any case. The bias that is added to them is not Megatron's, which would change it in each step.
    """
    mixture = shape.mixture
    if mixture is None:
        return {}
    settings: dict[str, Any] = {
        "num_moe_experts": mixture.experts,
        "moe_router_topk": mixture.top_k,
        "moe_router_dtype": "fp32",
        "moe_ffn_hidden_size": mixture.intermediate,
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": layout.experts,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "moe_aux_loss_coeff": 0.0,
        "moe_router_pre_softmax": mixture.sigmoid or not mixture.normalized,
        "moe_layer_freq": [int(sparse) for sparse in mixture.sparse],
    }
    if mixture.sigmoid:
        settings["moe_router_score_function"] = "sigmoid"
    if mixture.scale != 1.0:
        settings["moe_router_topk_scaling_factor"] = mixture.scale
    if mixture.groups:
        settings["moe_router_num_groups"] = mixture.groups
        settings["moe_router_group_topk"] = mixture.top_groups
    if mixture.shared:
        settings["moe_shared_expert_intermediate_size"] = mixture.shared
        settings["moe_shared_expert_gate"] = mixture.gated
    return settings


def build_model(
    shape: Shape,
    config: TransformerConfig,
    options: MegatronOptions,
    layout: Layout,
    *,
    lora: LoraConfig | None = None,
    replays: bool = False,
    balanced: bool = False,
) -> nn.ModuleList:
    """Build this rank's stage: its model chunks (`PackedGPT`) in order, the weights not filled.

    With ``lora`` they have adapters, and all other weights but a value head are frozen. With
    ``replays`` their routers take the experts that a packing brings along, and with ``balanced``
    they add its balance loss.
    """
    if options.sequence_parallel or shape.spec == "te":
        _add_generators()
    chunks = nn.ModuleList(
        _build_chunk(shape, config, options, layout, number) for number in range(layout.virtual)
    )
    # Megatron is not annotated.
    built: list[Any] = list(chunks)
    for number, chunk in enumerate(built):
        layers = dict(enumerate(chunk.decoder.layers, _first_layer(shape, layout, number)))
        if replays:
            add_replay(layers)
        if balanced:
            assert shape.mixture is not None, "a model without experts is refused"
            add_balance(layers, sigmoid=shape.mixture.sigmoid)
        if lora is not None:
            add_adapters(layers, shape, lora, config)
            freeze_base(chunk)
            if chunk.pre_process:
                require_embedding_gradient(chunk.embedding)
    return chunks


def _first_layer(shape: Shape, layout: Layout, number: int) -> int:
    """Return the number in the model of the first layer of chunk ``number`` on this rank."""
    count = shape.layers // (layout.stages * layout.virtual)
    return (number * layout.stages + layout.here.stage) * count


def _build_chunk(
    shape: Shape, config: TransformerConfig, options: MegatronOptions, layout: Layout, number: int
) -> PackedGPT:
    is_first = layout.is_first and number == 0
    is_last = layout.is_last and number == layout.virtual - 1
    model = PackedGPT(
        config=config,
        transformer_layer_spec=_chunk_spec(shape, layout, number),
        vocab_size=padded_vocabulary(shape, layout, options.vocabulary_multiple),
        max_sequence_length=shape.max_positions,
        pre_process=is_first,
        post_process=is_last,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=shape.tied,
        vp_stage=number if layout.virtual > 1 else None,
    )
    if shape.latent is None:
        model.rotary_pos_emb.inv_freq = torch.tensor(shape.rope.frequencies)
    if is_first and shape.factors.embeddings != 1.0:
        model.embedding.register_forward_hook(partial(_scale, shape.factors.embeddings))
    layers: Any = model.decoder.layers
    for layer in layers:
        if shape.factors.layers != 1.0:
            for linear in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
                linear.register_forward_hook(partial(_scale_linear, shape.factors.layers))
        if isinstance(layer.mlp, MoELayer):
            _place_router(layer.mlp.router)
            if shape.mixture is not None and shape.mixture.sigmoid:
                _add_router_bias(layer.mlp.router)
    if is_last and shape.kind == "value_model":
        device = next(model.parameters()).device
        del model.output_layer
        model.score = nn.utils.skip_init(
            nn.Linear,
            shape.hidden,
            1,
            bias=shape.value_bias,
            dtype=config.params_dtype,
            device=device,
        )
    return model


def _scale(factor: float, _: nn.Module, __: tuple[Any, ...], out: Tensor) -> Tensor:
    return out * factor


def _scale_linear(
    factor: float, _: nn.Module, __: tuple[Any, ...], outputs: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    out, bias = outputs
    return out * factor, None if bias is None else bias * factor


def release_model(chunks: nn.ModuleList) -> None:
    """Cut the references that would keep an unused model, with its memory and its groups' threads.

    A token dispatcher keeps the last micro-batch's probabilities, whose graph ends in the hooks
    that hold the model. This is a cycle through autograd, which Python's collector cannot see.
    RoPE's cache of frequencies has the module as a key.
    """
    for layer in chunks.modules():
        if (dispatcher := getattr(layer, "token_dispatcher", None)) is not None:
            vars(dispatcher).clear()
    RotaryEmbedding.forward.cache_clear()  # type: ignore[attr-defined]


@contextmanager
def kept_generators(device_type: str) -> Iterator[None]:
    """Leave the generators of the device and of Megatron's layers as they were before.

    Transformer Engine's fused attention takes numbers from them also without dropout.
    """
    device = device_of(device_type)
    tracker: Any = get_cuda_rng_tracker()
    before, tracked = device.rng_state(), tracker.get_states()
    try:
        yield
    finally:
        tracker.set_states(tracked)
        if before is not None:
            device.set_rng_state(before)


def _add_generators() -> None:
    """Add the generators that Megatron and Transformer Engine switch to in their layers.

    Without dropout no number is drawn from them.
    """
    tracker: Any = get_cuda_rng_tracker()
    for seed, name in enumerate(_GENERATORS):
        if name not in tracker.get_states():
            tracker.add(name, seed=seed)


def _place_router(router: Any) -> None:
    """Make a router's parameters on the device, with Megatron's marks.

    Megatron makes them on the CPU and replaces their data at their first use. Masters and hooks of
    gradients exist before that, and would stay with the data that is replaced.
    """
    if router.config.use_cpu_initialization:
        return
    device = torch.accelerator.current_device_index()
    for name, param in list(router.named_parameters(recurse=False)):
        placed = nn.Parameter(torch.empty_like(param, device=device))
        vars(placed).update(vars(param))
        setattr(router, name, placed)


def _add_router_bias(router: Any) -> None:
    """Give a router the saved bias of its scores, as a parameter that is not trained.

    Megatron's own is a buffer that its training loop updates.
    """
    del router.expert_bias
    bias = torch.zeros(router.num_experts, device=router.weight.device)
    router.expert_bias = nn.Parameter(bias, requires_grad=False)


def _chunk_spec(shape: Shape, layout: Layout, number: int) -> Any:
    """Return the spec of the layers of chunk ``number``, and of the last norm."""
    block: Any = TransformerBlockSubmodules
    count = shape.layers // (layout.stages * layout.virtual)
    first = _first_layer(shape, layout, number)
    build = _te_layer if shape.spec == "te" else _local_layer
    # Equal layers share a spec.
    kinds = {sparse: build(shape, sparse=sparse) for sparse in (True, False) if _has(shape, sparse)}
    layers = [kinds[shape.has_experts(layer)] for layer in range(first, first + count)]
    return block(layer_specs=layers, layer_norm=_norm_of(shape))


def _has(shape: Shape, sparse: bool) -> bool:
    return any(shape.has_experts(layer) == sparse for layer in range(shape.layers))


def _norm_of(shape: Shape) -> Any:
    if shape.spec == "local":
        return Norm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _te_layer(shape: Shape, *, sparse: bool) -> Any:
    """Return the spec of Transformer Engine's layer.

    It has its norms inside the linear layers, attention over packed documents, and grouped experts.
    """
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=shape.experts if sparse else None,
        moe_grouped_gemm=sparse,
        qk_layernorm=shape.qk_norm,
    )


def _local_layer(shape: Shape, *, sparse: bool) -> Any:
    """Return the spec of Megatron's own layer with this package's attention and norms."""
    latent = shape.latent is not None
    layer: Any = get_gpt_layer_local_spec(
        num_experts=shape.experts if sparse else None,
        moe_grouped_gemm=False,
        qk_layernorm=shape.qk_norm or latent,
        multi_latent_attention=latent,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if latent:
        attention.q_layernorm = attention.kv_layernorm = Norm
        parts.self_attention = ModuleSpec(
            module=LatentAttention,
            params={"attn_mask_type": AttnMaskType.causal, "rope": shape.rope},
            submodules=attention,
        )
    elif shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
    if shape.output_bias:
        attention.linear_proj = BiasedRows
    if sparse and shape.mixture is not None and shape.mixture.biased:
        parts.mlp.submodules.experts.submodules.linear_fc2 = ExpertRows
    if sparse and shape.mixture is not None and shape.mixture.gated:
        parts.mlp.submodules.shared_experts.module = GatedSharedExperts
    if shape.mlp_bias:
        parts.mlp.submodules.linear_fc1 = BiasedColumns
        parts.mlp.submodules.linear_fc2 = BiasedRows
    return layer


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedInputs:
    """This rank's tokens of a micro-batch on the device.

    The micro-batch has T tokens and T' with padding; n of them are here (all without cp).

    Attributes:
        ids, positions: ``[1, n]`` int64.
        targets: ``[n]`` int64, the token after each token.
        source: ``[T]`` int64, for each token of the batch the index of the token before it in the
            outputs of all ranks.
        first: ``[T]`` bool, true at the first token of each document.
        packing: the documents' lengths and boundaries, padding included.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    source: Tensor
    first: Tensor
    packing: Packing


def pack_inputs(
    batch: Batch,
    *,
    multiple: int,
    layout: Layout,
    device: torch.device,
    steady: bool = False,
    splits_tokens: bool = False,
    step_balance: StepBalance | None = None,
) -> PackedInputs:
    """Pad a micro-batch and move this rank's tokens to the device.

    The micro-batch is padded to a multiple of ``multiple`` with a separate document at its end; an
    empty one is all padding. Under context parallelism each document is padded to a multiple of
    twice the ranks. With ``steady`` the stated length of the longest document is rounded up
    (`steady_longest`). With ``splits_tokens``, sequence parallelism, a router sees the tokens of
    one tensor-parallel rank. ``step_balance`` is the balance loss of a training call.
    """
    step = 2 * layout.context if layout.context > 1 else 1
    lengths, real = _pad_lengths(batch.lengths, multiple, step)
    ids = torch.zeros(sum(lengths), dtype=torch.int64)
    ids[real] = batch.input_ids.cpu()
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    positions = torch.arange(len(ids)) - torch.repeat_interleave(starts, torch.tensor(lengths))
    order = token_order(lengths, layout.context)
    own = order[layout.here.context]
    place = order.flatten().argsort()
    shard: ContextShard | None = None
    if layout.context > 1:
        shard = ContextShard(
            ranks=layout.context,
            rank=layout.here.context,
            place=move_tensor(place, device),
            group=context_group(),
        )

    def route(values: Tensor, fill: int) -> Tensor:
        """Return values of the batch's tokens for those that this rank's routers see."""
        whole = values.new_full((len(ids), *values.shape[1:]), fill)
        whole[real] = values
        mine = move_tensor(whole[own], device)
        return mine.chunk(layout.tensor)[layout.here.tensor] if splits_tokens else mine

    experts: Tensor | None = None
    if ROUTED_EXPERTS in batch.fields:
        # Padding is left to the router.
        experts = route(batch[ROUTED_EXPERTS].cpu().long(), -1)
    balance: Balance | None = None
    if step_balance is not None:
        count = batch.num_documents
        own_lengths = torch.tensor(batch.lengths, dtype=torch.int64)
        documents = torch.repeat_interleave(torch.arange(count), own_lengths)
        # The ranks that share the tokens of a document.
        groups = [context_group()] if layout.context > 1 else []
        if splits_tokens:
            groups.append(tensor_group())
        balance = step_balance.add(route(documents, count), count, groups)
    longest = steady_longest(lengths, 2 * layout.context) if steady else 0
    return PackedInputs(
        ids=move_tensor(ids[own][None], device),
        positions=move_tensor(positions[own][None], device),
        targets=move_tensor(ids.roll(-1)[own], device),
        source=move_tensor(place[(real - 1).clamp(min=0)], device),
        first=move_tensor(positions[real] == 0, device),
        packing=build_packing(
            lengths, device, shard, longest=longest, experts=experts, balance=balance
        ),
    )


def _pad_lengths(lengths: Sequence[int], multiple: int, step: int) -> tuple[list[int], Tensor]:
    """Return the lengths with padding, and the indices of the batch's tokens in them.

    The indices are ``[T]`` int64. ``step`` divides each document's padded length.
    """
    padded = [-(-length // step) * step for length in lengths]
    total = sum(padded)
    rest = -total % multiple or (0 if total else multiple)
    within = [torch.arange(length) for length in lengths]
    starts = [sum(padded[:i]) for i in range(len(padded))]
    indices = [start + part for start, part in zip(starts, within, strict=True)]
    real = torch.cat(indices) if indices else torch.empty(0)
    return [*padded, *([rest] if rest else [])], real.long()


def token_multiple(config: EngineConfig, options: MegatronOptions, layout: Layout) -> int:
    """Return the number that the tokens of a micro-batch are padded to a multiple of.

    Each rank then has equally many tokens, and with FP8 whole blocks of them.
    """
    ranks = layout.context * (layout.tensor if options.sequence_parallel else 1)
    block = FP8_TOKENS if config.precision.compute == "float8" else 1
    each = math.lcm(config.memory.pad_to_multiple, block)
    return math.lcm(each * ranks, 2 * layout.context if layout.context > 1 else 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """The path of a micro-batch through this rank's chunks and the head.

    Attributes:
        multiple: the tokens of a micro-batch are padded to a multiple of it.
        splits_tokens: whether sequence parallelism divides them over tensor-parallel ranks.
        logit_chunk: number of tokens whose logits exist at the same time.
        step_balance: the balance loss of the current training call, or None for none at all.
    """

    chunks: nn.ModuleList
    shape: Shape
    layout: Layout
    multiple: int
    splits_tokens: bool
    logit_chunk: int
    device: torch.device
    step_balance: StepBalance | None = None

    def pack_inputs(self, batch: Batch) -> PackedInputs:
        """Pad a micro-batch and move this rank's tokens to the device."""
        # Transformer Engine's attention is built again for each longest length.
        steady = self.shape.spec == "te"
        return pack_inputs(
            batch,
            multiple=self.multiple,
            layout=self.layout,
            device=self.device,
            steady=steady,
            splits_tokens=self.splits_tokens,
            step_balance=self.step_balance if self.chunks.training else None,
        )

    @property
    def _last(self) -> PackedGPT:
        last: Any = self.chunks[-1]
        return last

    def hidden(self, packed: PackedInputs, chunk: Any) -> Tensor:
        """Return the output of ``chunk`` for the next chunk or the head, ``[n (/ tp), 1, d]``.

        ``chunk`` is one of `chunks` or its wrapper.
        """
        result: Tensor = chunk(packed.ids, packed.positions, None, packed_seq_params=packed.packing)
        return result

    def outputs(
        self, hidden: Tensor, packed: PackedInputs, needs: Sequence[str], temperature: float
    ) -> TokenOutputs:
        """Return aligned float32 outputs ``[T]`` of the last stage.

        They are the same on all ranks that have the same documents.
        """
        if self.shape.kind == "value_model":
            return TokenOutputs(values=self._align(self._values(hidden), packed))
        chosen, entropy = self._log_probs(hidden, packed.targets, temperature)
        return TokenOutputs(
            log_probs=self._align(chosen, packed),
            entropy=self._align(entropy, packed) if "entropy" in needs else None,
        )

    def _align(self, about_next: Tensor, packed: PackedInputs) -> Tensor:
        """Shift values about the next token to values about this token, and leave padding out.

        Values about this token are the contract's alignment.
        """
        if self.layout.context > 1:
            about_next = gather_outputs(about_next, context_group())
        return about_next.index_select(0, packed.source).masked_fill(packed.first, 0.0)

    def _values(self, hidden: Tensor) -> Tensor:
        if self._last.config.sequence_parallel:
            # Every rank continues with the same loss, so a rank's gradient is its own slice.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        head: nn.Module = self._last.get_submodule("score")
        values: Tensor = head(hidden[:, 0])
        return values.squeeze(-1).float()

    def _log_probs(
        self, hidden: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        if self._last.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        weight = self._last.output_layer.weight
        if weight is None:
            weight = self._last.shared_embedding_or_output_weight()
        return log_probs(
            hidden[:, 0],
            weight,
            targets,
            temperature=temperature * self.shape.factors.logits,
            chunk=self.logit_chunk,
            vocabulary=self._vocabulary(weight.shape[0]),
        )

    def _vocabulary(self, rows: int) -> Vocabulary:
        first = self.layout.here.tensor * rows
        size = max(0, min(rows, self.shape.vocab_size - first))
        return Vocabulary(
            first=first, size=size, group=tensor_group() if self.layout.tensor > 1 else None
        )

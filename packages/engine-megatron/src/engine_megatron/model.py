"""Megatron's GPT model for a Hugging Face configuration, and one forward over a micro-batch."""

# Megatron is not annotated.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
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
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from engine_api.batch import Batch
from engine_api.config import EngineConfig
from engine_api.results import TokenOutputs
from engine_megatron.context import ContextShard, gather_outputs, token_order
from engine_megatron.head import Vocabulary, log_probs
from engine_megatron.layers import Norm, PackedAttention, Packing, build_packing, steady_longest
from engine_megatron.options import MegatronOptions
from engine_megatron.parallel import DTYPES, Layout, context_group, tensor_group
from engine_megatron.shape import Shape
from engine_megatron.te import FP8_TOKENS
from engine_megatron.weights import padded_vocabulary

# The router's products are computed by plain torch: Transformer Engine's would be in TF32. Without
# Transformer Engine the name is not even defined.
moe_utils.te_general_gemm = None
# Megatron's names of its generators.
_GENERATORS = ("model-parallel-rng", "expert-parallel-rng", "data-parallel-rng")
# Megatron's default refuses lengths that vary, with and without experts.
_DISPATCHER = "alltoall"


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
    extra: dict[str, Any] = _expert_settings(shape, layout) | _transformer_engine_settings(
        shape, config
    )
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
    return TransformerConfig(
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
        activation_func=torch.nn.functional.silu,
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

    Without renormalization the softmax is over all experts.
    """
    if not shape.experts:
        return {}
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.top_k,
        "moe_router_dtype": "fp32",
        "moe_ffn_hidden_size": shape.expert_intermediate,
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": layout.experts,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "moe_aux_loss_coeff": 0.0,
        "moe_router_pre_softmax": not shape.norm_topk_prob,
    }


def build_model(
    shape: Shape, config: TransformerConfig, options: MegatronOptions, layout: Layout
) -> nn.ModuleList:
    """Build this rank's stage: its model chunks (`PackedGPT`) in order, the weights not filled."""
    if options.sequence_parallel or shape.spec == "te":
        _add_generators()
    return nn.ModuleList(
        _build_chunk(shape, config, options, layout, number) for number in range(layout.virtual)
    )


def _build_chunk(
    shape: Shape, config: TransformerConfig, options: MegatronOptions, layout: Layout, number: int
) -> PackedGPT:
    is_first = layout.is_first and number == 0
    is_last = layout.is_last and number == layout.virtual - 1
    model = PackedGPT(
        config=config,
        transformer_layer_spec=_chunk_spec(shape, layout),
        vocab_size=padded_vocabulary(shape, layout, options.vocabulary_multiple),
        max_sequence_length=shape.max_positions,
        pre_process=is_first,
        post_process=is_last,
        position_embedding_type="rope",
        rotary_base=shape.rope_base,  # type: ignore[arg-type] - any number
        share_embeddings_and_output_weights=shape.tied,
        vp_stage=number if layout.virtual > 1 else None,
    )
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


def _add_generators() -> None:
    """Add the generators that Megatron and Transformer Engine switch to in their layers.

    Without dropout no number is drawn from them.
    """
    tracker: Any = get_cuda_rng_tracker()
    for seed, name in enumerate(_GENERATORS):
        if name not in tracker.get_states():
            tracker.add(name, seed=seed)


def _chunk_spec(shape: Shape, layout: Layout) -> Any:
    """Return the spec of a chunk's layers and of the last norm."""
    block: Any = TransformerBlockSubmodules
    layer, norm = _te_layer(shape) if shape.spec == "te" else _local_layer(shape)
    return block(
        layer_specs=[layer] * (shape.layers // (layout.stages * layout.virtual)), layer_norm=norm
    )


def _te_layer(shape: Shape) -> tuple[Any, Any]:
    """Return the specs of Transformer Engine's layer and norm.

    The layer has its norms inside the linear layers, attention over packed documents, and grouped
    experts.
    """
    from megatron.core.extensions.transformer_engine import TENorm

    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=shape.experts or None,
        moe_grouped_gemm=bool(shape.experts),
        qk_layernorm=shape.qk_norm,
    ), TENorm


def _local_layer(shape: Shape) -> tuple[Any, Any]:
    """Return the spec of Megatron's own layer with this package's attention, and the norm."""
    layer: Any = get_gpt_layer_local_spec(
        num_experts=shape.experts or None,
        moe_grouped_gemm=False,
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return layer, Norm


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
    batch: Batch, *, multiple: int, layout: Layout, device: torch.device, steady: bool = False
) -> PackedInputs:
    """Pad a micro-batch and move this rank's tokens to the device.

    The micro-batch is padded to a multiple of ``multiple`` with a separate document at its end; an
    empty one is all padding. Under context parallelism each document is padded to a multiple of
    twice the ranks. With ``steady`` the stated length of the longest document is rounded up
    (`steady_longest`).
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
            place=place.to(device),
            group=context_group(),
        )
    longest = steady_longest(lengths, 2 * layout.context) if steady else 0
    return PackedInputs(
        ids=ids[own][None].to(device),
        positions=positions[own][None].to(device),
        targets=ids.roll(-1)[own].to(device),
        source=place[(real - 1).clamp(min=0)].to(device),
        first=(positions[real] == 0).to(device),
        packing=build_packing(lengths, device, shard, longest=longest),
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
        logit_chunk: number of tokens whose logits exist at the same time.
    """

    chunks: nn.ModuleList
    shape: Shape
    layout: Layout
    multiple: int
    logit_chunk: int
    device: torch.device

    def pack_inputs(self, batch: Batch) -> PackedInputs:
        """Pad a micro-batch and move this rank's tokens to the device."""
        # Transformer Engine's attention is built again for each longest length.
        steady = self.shape.spec == "te"
        return pack_inputs(
            batch, multiple=self.multiple, layout=self.layout, device=self.device, steady=steady
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
            temperature=temperature,
            chunk=self.logit_chunk,
            vocabulary=self._vocabulary(weight.shape[0]),
        )

    def _vocabulary(self, rows: int) -> Vocabulary:
        first = self.layout.here.tensor * rows
        size = max(0, min(rows, self.shape.vocab_size - first))
        return Vocabulary(
            first=first, size=size, group=tensor_group() if self.layout.tensor > 1 else None
        )

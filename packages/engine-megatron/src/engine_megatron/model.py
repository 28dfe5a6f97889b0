"""Megatron's GPT model of a Hugging Face configuration, and one forward over a packed micro-batch."""

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
from engine_megatron.context import Share, gather_outputs, token_order
from engine_megatron.head import Vocabulary, log_probs
from engine_megatron.layers import Norm, PackedAttention, Packing, build_packing, steady_longest
from engine_megatron.options import MegatronOptions
from engine_megatron.parallel import DTYPES, Layout, context_group, tensor_group
from engine_megatron.shape import Shape
from engine_megatron.te import FP8_TOKENS
from engine_megatron.weights import padded_vocabulary

# The router's products in plain torch: Transformer Engine's would be TF32. Without it the name is not even defined.
moe_utils.te_general_gemm = None
_GENERATORS = ("model-parallel-rng", "expert-parallel-rng", "data-parallel-rng")  # Megatron's names
_DISPATCHER = (
    "alltoall"  # Megatron's default refuses lengths that vary, whether there are experts or not
)


class PackedGPT(GPTModel):
    """A GPT model whose last stage gives normalized hidden states: heads are this engine's own."""

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def transformer_config(
    shape: Shape, config: EngineConfig, options: MegatronOptions, layout: Layout, *, on_cpu: bool
) -> TransformerConfig:
    """Megatron's configuration. The local spec has no fused kernels; sums, never means."""
    extra: dict[str, Any] = _experts(shape, layout) | _engine_of(shape, config)
    if layout.virtual > 1:
        # With messages in batches, Megatron's default, two between the same two ranks are taken for each other.
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
        # The denominator is the caller's, applied once before backward: Megatron must not divide by ranks or micro-batches.
        calculate_per_token_loss=True,
        # Megatron puts it into NVTE_… of the environment, so it is the same for both specs. No other backend is fallen
        # back to: what the fused one does not take is an error.
        attention_backend=AttnBackend.fused,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **extra,
    )


def _engine_of(shape: Shape, config: EngineConfig) -> dict[str, Any]:
    """What only Transformer Engine's layers do: RoPE and experts in one kernel each, FP8 products (DeepSeek-V3's blocks)."""
    if shape.spec == "local":
        return {}
    fused: dict[str, Any] = {"apply_rope_fusion": True, "moe_grouped_gemm": bool(shape.experts)}
    if config.precision.compute == "float8":
        # Quantized weights are not kept over micro-batches: nothing would tell the layers of a step or a loaded checkpoint.
        fused |= {
            "fp8": "e4m3",
            "fp8_recipe": "blockwise",
            "disable_parameter_transpose_cache": True,
        }
    return fused


def _experts(shape: Shape, layout: Layout) -> dict[str, Any]:
    """Router and experts: no balancing loss, no capacity. Without renormalization the softmax is over all experts."""
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
    """This rank's stage: its model chunks (`PackedGPT`) in their order, the weights not yet filled."""
    if options.sequence_parallel or shape.spec == "te":
        _add_generators()
    return nn.ModuleList(
        _chunk(shape, config, options, layout, number) for number in range(layout.virtual)
    )


def _chunk(
    shape: Shape, config: TransformerConfig, options: MegatronOptions, layout: Layout, number: int
) -> PackedGPT:
    is_first, is_last = (
        layout.is_first and number == 0,
        layout.is_last and number == layout.virtual - 1,
    )
    model = PackedGPT(
        config=config,
        transformer_layer_spec=_spec(shape, layout),
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


def let_go(chunks: nn.ModuleList) -> None:
    """Cut what would keep a model that nobody uses, with its memory and its groups' threads.

    A token dispatcher keeps the last micro-batch's probabilities, whose graph ends in the hooks that hold the model: a circle
    through autograd, which Python's collector cannot see. RoPE's cache of frequencies has the module for a key.
    """
    for layer in chunks.modules():
        if (dispatcher := getattr(layer, "token_dispatcher", None)) is not None:
            vars(dispatcher).clear()
    RotaryEmbedding.forward.cache_clear()  # type: ignore[attr-defined]


def _add_generators() -> None:
    """The generators that Megatron and Transformer Engine switch to in their layers; without dropout nothing is drawn."""
    tracker: Any = get_cuda_rng_tracker()
    for seed, name in enumerate(_GENERATORS):
        if name not in tracker.get_states():
            tracker.add(name, seed=seed)


def _spec(shape: Shape, layout: Layout) -> Any:
    """The layers of a chunk, and the last norm."""
    block: Any = TransformerBlockSubmodules
    layer, norm = _te_layer(shape) if shape.spec == "te" else _local_layer(shape)
    return block(
        layer_specs=[layer] * (shape.layers // (layout.stages * layout.virtual)), layer_norm=norm
    )


def _te_layer(shape: Shape) -> tuple[Any, Any]:
    """Transformer Engine's layer: norms inside of the linear layers, attention over packed documents, grouped experts."""
    from megatron.core.extensions.transformer_engine import TENorm

    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=shape.experts or None,
        moe_grouped_gemm=bool(shape.experts),
        qk_layernorm=shape.qk_norm,
    ), TENorm


def _local_layer(shape: Shape) -> tuple[Any, Any]:
    """Megatron's own layer with this package's norms and attention."""
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
class Packed:
    """This rank's tokens of a micro-batch on the device: T' of it and its padding, n of them here (all without cp).

    Attributes:
        ids, positions: ``[1, n]`` int64.
        targets: ``[n]`` int64, the token after each.
        source: ``[T]`` int64, for each token of the batch where the one before it stands in the outputs of all ranks.
        first: ``[T]`` bool, true at the first token of each document.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    source: Tensor
    first: Tensor
    packing: Packing


def pack(
    batch: Batch, *, multiple: int, layout: Layout, device: torch.device, steady: bool = False
) -> Packed:
    """Pad to a multiple of ``multiple`` with a document of its own at the end; an empty micro-batch is all padding.

    Under context parallelism each document is padded to a multiple of twice the ranks. ``steady``: round the stated length
    of the longest document up (`steady_longest`).
    """
    lengths, real = _padded(
        batch.lengths, multiple, 2 * layout.context if layout.context > 1 else 1
    )
    ids = torch.zeros(sum(lengths), dtype=torch.int64)
    ids[real] = batch.input_ids.cpu()
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    positions = torch.arange(len(ids)) - torch.repeat_interleave(starts, torch.tensor(lengths))
    order = token_order(lengths, layout.context)
    own, place = order[layout.here.context], order.flatten().argsort()
    share = (
        None
        if layout.context == 1
        else Share(
            ranks=layout.context,
            rank=layout.here.context,
            place=place.to(device),
            group=context_group(),
        )
    )
    longest = steady_longest(lengths, 2 * layout.context) if steady else 0
    return Packed(
        ids=ids[own][None].to(device),
        positions=positions[own][None].to(device),
        targets=ids.roll(-1)[own].to(device),
        source=place[(real - 1).clamp(min=0)].to(device),
        first=(positions[real] == 0).to(device),
        packing=build_packing(lengths, device, share, longest=longest),
    )


def _padded(lengths: Sequence[int], multiple: int, step: int) -> tuple[list[int], Tensor]:
    """Lengths with padding, and ``[T]`` int64: where the batch's tokens then stand."""
    padded = [-(-length // step) * step for length in lengths]
    total = sum(padded)
    rest = -total % multiple or (0 if total else multiple)
    within = [torch.arange(length) for length in lengths]
    starts = [sum(padded[:i]) for i in range(len(padded))]
    real = (
        torch.cat([start + part for start, part in zip(starts, within, strict=True)])
        if within
        else torch.empty(0)
    )
    return [*padded, *([rest] if rest else [])], real.long()


def token_multiple(config: EngineConfig, options: MegatronOptions, layout: Layout) -> int:
    """What the tokens of a micro-batch are padded to: each rank has as many, and FP8 its blocks."""
    ranks = layout.context * (layout.tensor if options.sequence_parallel else 1)
    each = math.lcm(
        config.memory.pad_to_multiple, FP8_TOKENS if config.precision.compute == "float8" else 1
    )
    return math.lcm(each * ranks, 2 * layout.context if layout.context > 1 else 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """How a micro-batch goes through this rank's chunks, and the last chunk's hidden states through the head."""

    chunks: nn.ModuleList
    shape: Shape
    layout: Layout
    multiple: int  # tokens of a micro-batch are padded to a multiple of it
    logit_chunk: int
    device: torch.device

    def pack(self, batch: Batch) -> Packed:
        """The micro-batch on the device."""
        steady = self.shape.spec == "te"  # its attention is built anew for each longest length
        return pack(
            batch, multiple=self.multiple, layout=self.layout, device=self.device, steady=steady
        )

    @property
    def _last(self) -> PackedGPT:
        last: Any = self.chunks[-1]
        return last

    def hidden(self, packed: Packed, chunk: Any) -> Tensor:
        """``[n (/ tp), 1, d]``: what ``chunk``, one of `chunks` or its wrapper, gives the next, or the head."""
        result: Tensor = chunk(packed.ids, packed.positions, None, packed_seq_params=packed.packing)
        return result

    def outputs(
        self, hidden: Tensor, packed: Packed, needs: Sequence[str], temperature: float
    ) -> TokenOutputs:
        """Aligned float32 outputs ``[T]`` of the last stage, the same on all ranks that share the documents."""
        if self.shape.kind == "value_model":
            return TokenOutputs(values=self._align(self._values(hidden), packed))
        chosen, entropy = self._log_probs(hidden, packed.targets, temperature)
        return TokenOutputs(
            log_probs=self._align(chosen, packed),
            entropy=self._align(entropy, packed) if "entropy" in needs else None,
        )

    def _align(self, about_next: Tensor, packed: Packed) -> Tensor:
        """From "about the token after this one" to the contract's "about this token"; padding left out."""
        if self.layout.context > 1:
            about_next = gather_outputs(about_next, context_group())
        return about_next.index_select(0, packed.source).masked_fill(packed.first, 0.0)

    def _values(self, hidden: Tensor) -> Tensor:
        if self._last.config.sequence_parallel:
            # Every rank goes on with the same loss, so the gradient is its own slice.
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

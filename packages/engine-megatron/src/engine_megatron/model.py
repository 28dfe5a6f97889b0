"""Megatron's GPT model of a Hugging Face configuration, and one forward over a packed micro-batch."""

# Megatron is not annotated.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from engine_api.batch import Batch
from engine_api.config import EngineConfig
from engine_api.results import TokenOutputs
from engine_megatron.head import Vocabulary, log_probs
from engine_megatron.layers import Norm, PackedAttention, Packing, build_packing
from engine_megatron.options import MegatronOptions
from engine_megatron.parallel import DTYPES, Layout, tensor_group
from engine_megatron.shape import Shape
from engine_megatron.weights import padded_vocabulary

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # without Transformer Engine the name is undefined, though the code asks for None
_GENERATOR = "model-parallel-rng"  # Megatron's name
_DISPATCHER = "alltoall"  # Megatron's default refuses lengths that vary, whether there are experts or not


class PackedGPT(GPTModel):
    """A GPT model whose last stage gives normalized hidden states: heads are this engine's own."""

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def transformer_config(shape: Shape, config: EngineConfig, options: MegatronOptions, layout: Layout, *, on_cpu: bool) -> TransformerConfig:  # fmt: skip
    """Megatron's configuration. Nothing fused: the local spec has no kernels; sums, never means."""
    extra: dict[str, Any] = _experts(shape, layout)
    if config.memory.recompute == "full":
        extra |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    dtype = DTYPES[config.precision.compute]
    return TransformerConfig(
        num_layers=shape.layers, hidden_size=shape.hidden, ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.heads, num_query_groups=shape.kv_heads, kv_channels=shape.head_dim,
        normalization="RMSNorm", layernorm_epsilon=shape.eps, qk_layernorm=shape.qk_norm, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0, attention_dropout=0.0, params_dtype=dtype, bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype, tensor_model_parallel_size=layout.tensor, pipeline_model_parallel_size=layout.stages,
        sequence_parallel=options.sequence_parallel, variable_seq_lengths=layout.stages > 1,
        moe_token_dispatcher_type=_DISPATCHER,
        use_cpu_initialization=on_cpu, perform_initialization=False,
        # The denominator is the caller's, applied once before backward: Megatron must not divide by ranks or micro-batches.
        calculate_per_token_loss=True,
        bias_activation_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, **extra,
    )  # fmt: skip


def _experts(shape: Shape, layout: Layout) -> dict[str, Any]:
    """Router and experts: no balancing loss, no capacity. Without renormalization the softmax is over all experts."""
    if not shape.experts:
        return {}
    return {"num_moe_experts": shape.experts, "moe_router_topk": shape.top_k, "moe_router_dtype": "fp32",
            "moe_ffn_hidden_size": shape.expert_intermediate, "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": layout.experts, "expert_tensor_parallel_size": layout.expert_tensor,
            "moe_aux_loss_coeff": 0.0, "moe_router_pre_softmax": not shape.norm_topk_prob}  # fmt: skip


def build_model(shape: Shape, config: TransformerConfig, options: MegatronOptions, layout: Layout) -> PackedGPT:
    """This rank's stage, its weights not yet filled."""
    if options.sequence_parallel:
        _add_generator()
    model = PackedGPT(
        config=config, transformer_layer_spec=_spec(shape, layout),
        vocab_size=padded_vocabulary(shape, layout, options.vocabulary_multiple),
        max_sequence_length=shape.max_positions, pre_process=layout.is_first, post_process=layout.is_last,
        position_embedding_type="rope", rotary_base=shape.rope_base,  # type: ignore[arg-type] - any number
        share_embeddings_and_output_weights=shape.tied,
    )  # fmt: skip
    if layout.is_last and shape.kind == "value_model":
        device = next(model.parameters()).device
        del model.output_layer
        model.score = nn.utils.skip_init(nn.Linear, shape.hidden, 1, bias=shape.value_bias, dtype=config.params_dtype,
                                         device=device)  # fmt: skip
    return model


def _add_generator() -> None:
    """The generator that Megatron switches to inside of sequence-parallel layers; without dropout nothing is drawn."""
    tracker: Any = get_cuda_rng_tracker()
    if _GENERATOR not in tracker.get_states():
        tracker.add(_GENERATOR, seed=0)


def _spec(shape: Shape, layout: Layout) -> Any:
    """The local layer spec with this package's norms and attention."""
    layer: Any = get_gpt_layer_local_spec(num_experts=shape.experts or None, moe_grouped_gemm=False,
                                          qk_layernorm=shape.qk_norm, normalization="RMSNorm")  # fmt: skip
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
    block: Any = TransformerBlockSubmodules
    return block(layer_specs=[layer] * (shape.layers // layout.stages), layer_norm=Norm)


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """One micro-batch on the device, padded with a document of its own at the end.

    Attributes:
        ids, positions: ``[1, T']`` int64.
        targets: ``[T']`` int64, the token after each.
        first: ``[T']`` bool, true at the first token of each document.
        size: T, the tokens of the batch without padding.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    first: Tensor
    packing: Packing
    size: int


def pack(batch: Batch, *, multiple: int, device: torch.device) -> Packed:
    """Pad to a multiple of ``multiple``; an empty micro-batch is all padding."""
    padding = -batch.num_tokens % multiple or (0 if batch.num_tokens else multiple)
    lengths = [*batch.lengths, *([padding] if padding else [])]
    ids = torch.cat([batch.input_ids.cpu(), torch.zeros(padding, dtype=torch.int64)])
    ends = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.arange(len(ids)) - torch.repeat_interleave(ends[:-1], torch.tensor(lengths))
    return Packed(
        ids=ids[None].to(device), positions=positions[None].to(device), targets=ids.roll(-1).to(device),
        first=(positions == 0).to(device), packing=build_packing(lengths, device), size=batch.num_tokens,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """How a micro-batch goes through this rank's stage, and the last stage's hidden states through the head."""

    model: PackedGPT
    shape: Shape
    layout: Layout
    multiple: int  # tokens of a micro-batch are padded to a multiple of it
    logit_chunk: int
    device: torch.device

    def pack(self, batch: Batch) -> Packed:
        """The micro-batch on the device."""
        return pack(batch, multiple=self.multiple, device=self.device)

    def hidden(self, packed: Packed) -> Tensor:
        """``[T' (/ tp), 1, d]``: what this stage gives the next, or the head."""
        result: Tensor = self.model(packed.ids, packed.positions, None, packed_seq_params=packed.packing)
        return result

    def outputs(self, hidden: Tensor, packed: Packed, needs: Sequence[str], temperature: float) -> TokenOutputs:
        """Aligned float32 outputs of the last stage, the same on all its tensor-parallel ranks."""
        if self.shape.kind == "value_model":
            return TokenOutputs(values=_align(self._values(hidden), packed))
        chosen, entropy = self._log_probs(hidden, packed.targets, temperature)
        return TokenOutputs(
            log_probs=_align(chosen, packed), entropy=_align(entropy, packed) if "entropy" in needs else None
        )

    def _values(self, hidden: Tensor) -> Tensor:
        if self.model.config.sequence_parallel:
            # Every rank goes on with the same loss, so the gradient is its own slice.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        head: nn.Module = self.model.get_submodule("score")
        values: Tensor = head(hidden[:, 0])
        return values.squeeze(-1).float()

    def _log_probs(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        if self.model.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        weight = self.model.output_layer.weight
        if weight is None:
            weight = self.model.shared_embedding_or_output_weight()
        return log_probs(hidden[:, 0], weight, targets, temperature=temperature, chunk=self.logit_chunk,
                         vocabulary=self._vocabulary(weight.shape[0]))  # fmt: skip

    def _vocabulary(self, rows: int) -> Vocabulary:
        first = self.layout.here.tensor * rows
        size = max(0, min(rows, self.shape.vocab_size - first))
        return Vocabulary(first=first, size=size, group=tensor_group() if self.layout.tensor > 1 else None)


def _align(about_next: Tensor, packed: Packed) -> Tensor:
    """From "about the token after this one" to the contract's "about this token"; padding cut off."""
    return about_next.roll(1).masked_fill(packed.first, 0.0)[: packed.size]

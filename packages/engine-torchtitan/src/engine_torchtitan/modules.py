"""The engine's own parts of torchtitan's model tree: attention, rotary positions, experts.

torchtitan's attention casts to bfloat16 or compiles, and knows no documents on a CPU. Its rotary
positions keep a table of all positions for each layer, and have the scaling of Llama 3 only in the
order of dimensions that Hugging Face's weights do not have. Its experts compute in bfloat16,
whatever the model's dtype is, and its router asks for an autocast that a CPU does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from engine_torch.attention import Packing, packed_attention
from engine_torch.boxes import local_of
from engine_torchtitan.library import (
    AllToAllTokenDispatcher,
    CosSinRoPE,
    GptOssAttention,
    GptOssGroupedExperts,
    GroupedExperts,
    Linear,
    Module,
    MoE,
    ScaleBiasForward,
    TokenChoiceTopKRouter,
)

__all__ = [
    "BiasedExperts",
    "ExactGate",
    "Exchange",
    "Experts",
    "FrequencyRoPE",
    "GroupRouter",
    "LogitRouter",
    "Mixture",
    "PackedAttention",
    "Router",
    "SinkAttention",
]


class PackedAttention(Module):
    """Attention within the documents of a pack, of this rank's heads."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """The place of this attention in a model tree."""

        window: int | None = None
        """Number of tokens that a token attends to, itself included, or None for all."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.window = config.window

    # torchtitan's layouts of tensor parallelism name these arguments.
    def forward(
        self,
        q_BLNH: Tensor,  # noqa: N803
        k_BLNH: Tensor,  # noqa: N803
        v_BLNH: Tensor,  # noqa: N803
        *,
        attention_masks: Packing,
        scale: float | None = None,
        enable_gqa: bool = False,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention ``[1, T, H, e]`` of ``[1, T, H, d]`` queries and keys.

        Args:
            q_BLNH: queries.
            k_BLNH: keys, of fewer heads where queries share them.
            v_BLNH: values ``[1, T, H, e]``, of the keys' heads.
            attention_masks: the documents, in the place where torchtitan passes a mask.
            scale: factor of the scores.
            enable_gqa: whether queries share keys, which the number of heads shows as well.
            sinks: score of the sink of each of this rank's heads ``[H]``, or None.
        """
        del enable_gqa
        query, key, value = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        return packed_attention(
            self,
            query,
            key,
            value,
            None,
            packing=attention_masks,
            scaling=scale,
            sliding_window=self.window,
            s_aux=sinks,
        )[0]


class SinkAttention(GptOssAttention):
    """gpt-oss's attention, whose sinks are given to the attention of each head.

    torchtitan's rescales outputs with the log-sum-exp that its kernels return.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssAttention.Config):
        """The place of this attention in a model tree."""

    def forward(self, x: Tensor, attention_masks: Any, positions: Tensor | None = None) -> Tensor:
        """Return the outputs ``[1, T, D]`` of inputs ``[1, T, D]``.

        Args:
            x: inputs.
            attention_masks: the documents, in the place where torchtitan passes a mask.
            positions: positions ``[1, T]`` in the documents.
        """
        query, key, value = self.qkv_linear(x)
        query, key = self.rope(query, key, positions)
        sinks: Tensor = self.sinks
        if isinstance(sinks, DTensor):
            # Each rank has the sinks of its own heads, and their gradient.
            sinks = sinks.to_local(grad_placements=sinks.placements)
        attended: Tensor = self.inner_attention(
            query,
            key,
            value,
            attention_masks=attention_masks,
            scale=self.softmax_scale,
            sinks=sinks,
        )
        out: Tensor = self.wo(attended.contiguous().flatten(2))
        return out


class FrequencyRoPE(CosSinRoPE):
    """Rotary positions of given frequencies, whose cosines are computed for each micro-batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """The frequencies, which replace torchtitan's own settings of them."""

        frequencies: Tensor
        """``[dim / 2]`` float32 on the CPU, in radians per position."""

        amplitude: float = 1.0
        """Factor of cosines and sines, which YaRN has."""

        interleaved: bool = False
        """True where the dimensions of a pair are neighbours in the weights."""

    config: Config

    def forward(
        self, query: Tensor, key: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys ``[1, T, H, dim]`` by their positions ``[1, T]``.

        Interleaved dimensions come out with the first ones of all pairs before the second ones. The
        order is that of queries and keys alike, so that scores are the same.
        """
        if self.config.interleaved:
            query, key = (
                x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (query, key)
            )
        rotated: tuple[Tensor, Tensor] = super().forward(query, key, positions)
        return rotated

    def _precompute_cache(self) -> Tensor:
        """Return the frequencies on torch's default device, in the buffer for the table."""
        return self.config.frequencies.to(torch.get_default_device(), copy=True)

    def _reshape_cache(self, query: Tensor, positions: Tensor | None = None) -> Any:
        """Return cosines and sines ``[1, T, 1, 2 · dim]`` of the positions ``[1, T]``."""
        assert positions is not None
        angles = positions[:, :, None, None].float() * self.cache
        half = torch.cat([angles, angles], dim=-1)
        table = torch.cat([half.cos(), half.sin()], dim=-1) * self.config.amplitude
        if not isinstance(query, DTensor):
            return table
        mesh = query.device_mesh
        return DTensor.from_local(table, mesh, [Replicate()] * mesh.ndim, run_check=False)


class Experts(GroupedExperts):
    """Gated experts in the dtype of their input."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """The place of these experts in a model tree."""

    def forward(
        self,
        x_RD: Tensor,  # noqa: N803
        num_tokens_per_expert_E: Tensor,  # noqa: N803
    ) -> Tensor:
        """Return the outputs ``[R, D]`` of tokens that are sorted by expert.

        Args:
            x_RD: inputs of this rank's experts ``[R, D]``.
            num_tokens_per_expert_E: number of tokens of each of them.
        """
        if x_RD.dtype == torch.bfloat16:
            return super().forward(x_RD, num_tokens_per_expert_E)
        gate, down, up = (local_of(x) for x in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        parts = x_RD.split(num_tokens_per_expert_E.tolist())
        # An expert without a token takes part as well, so that it has a gradient.
        outputs = [
            (F.silu(part @ gate[index].T) * (part @ up[index].T)) @ down[index].T
            for index, part in enumerate(parts)
        ]
        return torch.cat(outputs)


class BiasedExperts(GptOssGroupedExperts):
    """gpt-oss's experts in the dtype of their input, with biases and a clamped gate."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        """The place of these experts in a model tree."""

        swiglu_alpha: float
        """Factor of the gate inside its sigmoid, which torchtitan has as a constant."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.swiglu_alpha = config.swiglu_alpha

    def forward(
        self,
        x_RD: Tensor,  # noqa: N803
        num_tokens_per_expert_E: Tensor,  # noqa: N803
    ) -> Tensor:
        """Return the outputs ``[R, D]`` of tokens that are sorted by expert.

        Args:
            x_RD: inputs of this rank's experts ``[R, D]``.
            num_tokens_per_expert_E: number of tokens of each of them.
        """
        counts = num_tokens_per_expert_E
        both = self._multiply(x_RD, local_of(self.mlp1_weight_EGD), counts)
        both = both + self._spread(self.mlp1_bias_EG, counts, len(x_RD))
        gate = both[..., ::2].clamp(max=self.swiglu_limit)
        up = both[..., 1::2].clamp(min=-self.swiglu_limit, max=self.swiglu_limit)
        hidden = (up + 1) * gate * torch.sigmoid(gate * self.swiglu_alpha)
        out = self._multiply(hidden, local_of(self.mlp2_weight_EDF), counts)
        bias = self._spread(self.mlp2_bias_ED, counts, len(x_RD))
        # Tensor-parallel ranks add their outputs, and each has the whole gradient of this bias.
        added: Tensor = ScaleBiasForward.apply(bias, self._count_divisions(), out.dtype)
        return out + added

    def _multiply(self, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """Return each expert's products ``[R, out]`` with its weight, of ``[E, out, in]``."""
        if x.dtype == torch.bfloat16:
            offsets = counts.cumsum(0, dtype=torch.int32)
            product: Tensor = self._grouped_mm(A=x, B_t=weight.transpose(-2, -1), offs=offsets)
            return product
        # An expert without a token takes part as well, so that it has a gradient.
        parts = x.split(counts.tolist())
        return torch.cat([part @ weight[index].T for index, part in enumerate(parts)])

    def _spread(self, bias: Tensor, counts: Tensor, rows: int) -> Tensor:
        """Return the bias of each token's expert, of ``[E, out]`` as ``[R, out]``."""
        return local_of(bias).repeat_interleave(counts, dim=0, output_size=rows)

    def _count_divisions(self) -> int:
        """Return the number of tensor-parallel ranks that divide each expert."""
        weight: Tensor = self.mlp1_weight_EGD
        if not isinstance(weight, DTensor) or "tp" not in (weight.device_mesh.mesh_dim_names or ()):
            return 1
        return weight.device_mesh["tp"].size()


class Exchange(AllToAllTokenDispatcher):
    """The exchange of tokens between the ranks that experts are spread over.

    torchtitan's asks torch, before each of its three collectives, for a name that came with 2.13.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        """The place of this exchange in a model tree."""

    @property
    def _mesh(self) -> DeviceMesh:
        """The ranks that experts are spread over."""
        mesh: DeviceMesh | None = self.ep_mesh
        assert mesh is not None, "experts that are not spread are not exchanged"
        return mesh

    def _token_count_exchange(
        self,
        num_local_tokens_per_expert_E: Tensor,  # noqa: N803
        pg: Any,
        ep_size: int,
    ) -> Tensor:
        del pg
        counts = num_local_tokens_per_expert_E.view(ep_size, -1)
        return all_to_all_single(counts, None, None, group=self._mesh)

    def _dispatch_token_exchange(
        self,
        routed_input_ND: Tensor,  # noqa: N803
        pg: Any,
        output_splits: list[int],
        input_splits: list[int],
    ) -> Tensor:
        del pg
        return all_to_all_single_autograd(
            routed_input_ND, output_splits, input_splits, group=self._mesh
        )

    def _combine_token_exchange(
        self,
        routed_output_RD: Tensor,  # noqa: N803
        pg: Any,
        input_splits: list[int],
        output_splits: list[int],
    ) -> Tensor:
        del pg
        # The tokens go the way back.
        return all_to_all_single_autograd(
            routed_output_RD, input_splits, output_splits, group=self._mesh
        )


class Mixture(MoE):
    """A mixture of experts whose input keeps its gradient under tensor parallelism.

    Its bias, which selects experts and is saved, is never moved.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        """The place of this mixture in a model tree."""

    def forward(self, x_BLD: Tensor) -> Tensor:  # noqa: N803
        """Return the outputs ``[1, T, D]`` of inputs ``[1, T, D]``."""
        # torchtitan gathers the tokens without waiting, and gives them to a local_map as they are.
        # In torch 2.13 it waits for such a tensor outside of autograd, so that the experts' inputs
        # would have no gradient. A copy waits inside.
        inputs = x_BLD.clone() if isinstance(x_BLD, DTensor) else x_BLD
        scores, experts, _ = self.router(inputs, self.expert_bias_E)
        counts = _count_tokens(experts, self.routed_experts.inner_experts.num_experts)
        outputs: Tensor = self.routed_experts(inputs, scores, experts, counts)
        return outputs if self.shared_experts is None else outputs + self.shared_experts(inputs)


def _count_tokens(experts: Tensor, number: int) -> Tensor:
    """Return the number of tokens of each expert, as a sum over the ranks that divide the tokens.

    torchtitan counts by writing into a DTensor, which torch 2.11 has no layout for.

    Args:
        experts: numbers of the chosen experts ``[1, T, K]``.
        number: number of experts.
    """
    local = local_of(experts)
    chosen = local.new_zeros(*local.shape[:-1], number, dtype=torch.bool).scatter(-1, local, True)
    counts = chosen.sum(dim=(0, 1))
    if not isinstance(experts, DTensor):
        return counts
    places = [Partial() if isinstance(one, Shard) else one for one in experts.placements]
    return DTensor.from_local(counts, experts.device_mesh, places, run_check=False)


class Router(TokenChoiceTopKRouter):
    """The choice of experts by a softmax in float32, as transformers computes Qwen3's."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        """The place of this router in a model tree."""

    def forward(
        self,
        x_BLD: Tensor,  # noqa: N803
        expert_bias_E: Tensor | None = None,  # noqa: N803
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights and numbers of the chosen experts ``[1, T, K]``, and all logits.

        Args:
            x_BLD: inputs ``[1, T, D]``.
            expert_bias_E: saved bias of the experts' scores ``[E]``, or None.
        """
        logits = self.gate(x_BLD)
        bias = None if expert_bias_E is None else local_of(expert_bias_E)
        chosen, experts = self._choose(
            logits.to_local() if isinstance(logits, DTensor) else logits, bias
        )
        if isinstance(logits, DTensor):
            # Every rank has all experts of its tokens. The gradient of the choice among the values
            # of a DTensor fails in torch 2.11.
            chosen, experts = (
                DTensor.from_local(one, logits.device_mesh, logits.placements, run_check=False)
                for one in (chosen, experts)
            )
        return chosen, experts, logits

    def _choose(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the weights of the chosen experts, and their numbers ``[1, T, K]``."""
        assert bias is None
        chosen, experts = torch.topk(logits.float().softmax(dim=-1), k=self.top_k, dim=-1)
        if self.route_norm:
            chosen = chosen / chosen.sum(dim=-1, keepdim=True)
        return chosen, experts


class LogitRouter(Router):
    """The choice of experts by their logits, of which a softmax makes the weights (gpt-oss)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Router.Config):
        """The place of this router in a model tree."""

    def _choose(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the weights of the chosen experts, and their numbers ``[1, T, K]``."""
        assert bias is None
        chosen, experts = torch.topk(logits, k=self.top_k, dim=-1)
        return chosen.softmax(dim=-1), experts


class GroupRouter(Router):
    """The choice of experts in the best groups, by sigmoids and a saved bias (DeepSeek-V3)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Router.Config):
        """The place of this router in a model tree."""

    def _choose(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the weights of the chosen experts, and their numbers ``[1, T, K]``.

        The bias selects experts, and is not in their weights.
        """
        assert bias is not None
        scores = logits.sigmoid()
        ranked = self._get_node_limited_routing_scores(scores.detach() + bias)
        experts = torch.topk(ranked, k=self.top_k, dim=-1, sorted=False)[1]
        chosen = scores.gather(-1, experts)
        if self.route_norm:
            chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen * self.route_scale, experts


class ExactGate(Linear):
    """The logits of a router in float32, from weights and inputs in any dtype."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """The place of this gate in a model tree."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torchtitan's layouts name it
        """Return the logits ``[1, T, E]`` of inputs ``[1, T, D]``."""
        return F.linear(input.float(), self.weight.float())

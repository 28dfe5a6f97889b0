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
    GroupedExperts,
    Module,
    MoE,
    TokenChoiceTopKRouter,
)

__all__ = ["Exchange", "Experts", "FrequencyRoPE", "Mixture", "PackedAttention", "Router"]


class PackedAttention(Module):
    """Attention within the documents of a pack, of this rank's heads."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """The place of this attention in a model tree."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        del config

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
    ) -> Tensor:
        """Return the attention ``[1, T, H, d]`` of ``[1, T, H, d]`` queries, keys and values.

        Args:
            q_BLNH: queries.
            k_BLNH: keys, of fewer heads where queries share them.
            v_BLNH: values, of the keys' heads.
            attention_masks: the documents, in the place where torchtitan passes a mask.
            scale: factor of the scores.
            enable_gqa: whether queries share keys, which the number of heads shows as well.
        """
        del enable_gqa
        query, key, value = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        return packed_attention(
            self, query, key, value, None, packing=attention_masks, scaling=scale
        )[0]


class FrequencyRoPE(CosSinRoPE):
    """Rotary positions of given frequencies, whose cosines are computed for each micro-batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """The frequencies, which replace torchtitan's own settings of them."""

        frequencies: Tensor
        """``[dim / 2]`` float32 on the CPU, in radians per position."""

        amplitude: float = 1.0
        """Factor of cosines and sines, which YaRN has."""

    config: Config

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
    """A mixture of experts whose input keeps its gradient under tensor parallelism."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        """The place of this mixture in a model tree."""

    def forward(self, x_BLD: Tensor) -> Tensor:  # noqa: N803
        """Return the outputs ``[1, T, D]`` of inputs ``[1, T, D]``."""
        # torchtitan gathers the tokens without waiting, and gives them to a local_map as they are.
        # In torch 2.13 it waits for such a tensor outside of autograd, so that the experts' inputs
        # would have no gradient. A copy waits inside.
        inputs = x_BLD.clone() if isinstance(x_BLD, DTensor) else x_BLD
        scores, experts, _ = self.router(inputs)
        counts = _count_tokens(experts, self.routed_experts.inner_experts.num_experts)
        outputs: Tensor = self.routed_experts(inputs, scores, experts, counts)
        return outputs


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
    """The choice of experts by a softmax in float32, as transformers computes it."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        """The place of this router in a model tree."""

    def forward(
        self,
        x_BLD: Tensor,  # noqa: N803
        expert_bias_E: Tensor | None = None,  # noqa: N803
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores and numbers of the chosen experts ``[1, T, K]``, and all scores.

        Args:
            x_BLD: inputs ``[1, T, D]``.
            expert_bias_E: always None, because a bias that moves in training would be in no export.
        """
        assert expert_bias_E is None
        scores = F.softmax(self.gate(x_BLD).float(), dim=-1)
        chosen, experts = self._choose(scores.to_local() if isinstance(scores, DTensor) else scores)
        if isinstance(scores, DTensor):
            # Every rank has all experts of its tokens. The gradient of the choice among the values
            # of a DTensor fails in torch 2.11.
            chosen, experts = (
                DTensor.from_local(one, scores.device_mesh, scores.placements, run_check=False)
                for one in (chosen, experts)
            )
        return chosen, experts, scores

    def _choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest scores and their experts ``[1, T, K]``."""
        chosen, experts = torch.topk(scores, k=self.top_k, dim=-1)
        if self.route_norm:
            chosen = chosen / chosen.sum(dim=-1, keepdim=True)
        return chosen, experts

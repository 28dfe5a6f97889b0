"""Multi-head latent attention over packed documents (DeepSeek-V2, arXiv:2405.04434, section 2.1).

It is Megatron's, with projections to the latents that no ranks split. Megatron's local spec splits
them over tensor-parallel ranks and gathers their outputs, where the gradient of the rotary keys,
which all heads share, would be that of one rank's heads alone.
"""

# Megatron is not annotated.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

from engine_megatron.layers import WholeLinear
from engine_megatron.shape import Rope

if not isinstance(multi_latent_attention.TELinear, type):
    # Without Transformer Engine, Megatron asks whether a layer is of what stands in for its class.
    multi_latent_attention.HAVE_TE = False
# Norms of latents have transformers' own default, whatever rms_norm_eps is.
_EPS = 1e-6


def _share_last(layer: WholeLinear, count: int) -> None:
    """Sum the gradient of a layer's last ``count`` outputs, which the heads of every rank use."""

    def share(
        _: nn.Module, __: tuple[Any, ...], outputs: tuple[Tensor, None]
    ) -> tuple[Tensor, None]:
        out = outputs[0]
        first, rest = out.split([out.shape[-1] - count, count], dim=-1)
        return torch.cat((first, copy_to_tensor_model_parallel_region(rest)), dim=-1), None

    layer.register_forward_hook(share)


class LatentRotary(RotaryEmbedding):
    """Megatron's rotary positions with given frequencies, and a factor as its YaRN has."""

    def __init__(self, rope: Rope, width: int, group: Any) -> None:
        super().__init__(width, rotary_percent=1.0, cp_group=group)
        self.inv_freq = torch.tensor(rope.frequencies)
        self.factor = rope.factor

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, float]:
        """Return the angles ``[n, 1, 1, width]``, and the factor of their cosine and sine."""
        angles: Tensor = super().forward(*args, **kwargs)
        return angles, self.factor


class LatentAttention(MLASelfAttention):
    """Megatron's latent attention with this package's projections and rotary positions."""

    def __init__(self, config: Any, submodules: Any, *args: Any, rope: Rope, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        rotary = config.qk_pos_emb_head_dim
        self.rotary_pos_emb = LatentRotary(rope, rotary, self.pg_collection.cp)
        self.core_attention.scale = rope.score_factor / math.sqrt(self.q_head_dim)
        width = config.kv_lora_rank + rotary
        self.linear_kv_down_proj = WholeLinear(config, width)
        if not config.sequence_parallel:
            _share_last(self.linear_kv_down_proj, rotary)
        norms: list[Any] = [self.kv_layernorm]
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.q_lora_rank)
            norms.append(self.q_layernorm)
        for norm in norms:
            norm.eps = _EPS

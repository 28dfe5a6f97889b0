"""The engine's own parts of torchtitan's model tree: attention and rotary positions.

torchtitan's attention casts to bfloat16 or compiles, and knows no documents on a CPU. Its rotary
positions keep a table of all positions for each layer, and have the scaling of Llama 3 only in the
order of dimensions that Hugging Face's weights do not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from engine_torch.attention import Packing, packed_attention
from engine_torchtitan.library import CosSinRoPE, Module

__all__ = ["FrequencyRoPE", "PackedAttention"]


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

"""The engine's own parts of Automodel's mixtures of experts.

Automodel's attention of these models knows documents through TransformerEngine only. Its rotary
positions take one kind of scaling for all, and its experts are stored in another order of
dimensions than Hugging Face's weights, of which a rank's part would be no box.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_automodel.library import GroupedExperts, Qwen3MoeAttention, apply_rotary_emb_qk
from engine_torch.attention import Packing, packed_attention

__all__ = ["Experts", "PackedAttention", "Rotary", "adapt"]


class PackedAttention(Qwen3MoeAttention):
    """Attention within the documents of a pack, of this rank's heads."""

    def forward(
        self,
        x: Tensor,
        *,
        freqs_cis: Tensor,
        attention_mask: Tensor | None = None,
        packing: Packing | None = None,
        **unused: Any,
    ) -> Tensor:
        """Return the outputs ``[1, T, D]`` of inputs ``[1, T, D]``.

        Args:
            x: inputs.
            freqs_cis: cosines and sines of the positions ``[1, T, d]``.
            attention_mask: always None.
            packing: the documents.
            **unused: arguments of transformers' models.
        """
        del unused
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_emb_qk(
            self.q_norm(query), self.k_norm(key), freqs_cis, rope_fusion=False
        )
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        out, _ = packed_attention(self, query, key, value, attention_mask, packing=packing)
        return self.o_proj(out.flatten(2))


class Rotary(nn.Module):
    """The frequencies of rotary positions, as transformers computes them."""

    def __init__(self, frequencies: Tensor, amplitude: float) -> None:
        super().__init__()
        # No buffer, because nothing shall cast it.
        self.frequencies = frequencies
        self.amplitude = amplitude

    # Automodel asks its own class by this name.
    def _compute_concentration_and_inv_freq(self) -> tuple[float, Tensor]:
        """Return the factor of cosines and sines, and the frequencies ``[d / 2]`` float32."""
        return self.amplitude, self.frequencies


class Experts(GroupedExperts):
    """Gated experts whose weights have Hugging Face's order of dimensions.

    ``gate_up_proj`` is ``[E, 2 · I, D]`` and ``down_proj`` is ``[E, D, I]``, under transformers'
    names.
    """

    gate_up_proj: Tensor
    down_proj: Tensor

    # The number of an expert's tokens is known in the middle of the pass, where ranks that share
    # experts exchange theirs.
    @torch.compiler.disable
    def forward(self, *arguments: Any) -> Tensor:
        """Return the weighted outputs of tokens (see ``GroupedExperts.forward``)."""
        outputs: Tensor = super().forward(*arguments)
        return outputs

    @property
    def gate_and_up_projs(self) -> Tensor:
        """Weights of gate and input in Automodel's order, ``[E, D, 2 · I]``."""
        return self.gate_up_proj.transpose(1, 2)

    @property
    def down_projs(self) -> Tensor:
        """Weights of the output in Automodel's order, ``[E, I, D]``."""
        return self.down_proj.transpose(1, 2)


def adapt(lm: nn.Module, device_type: str) -> None:
    """Put the engine's attention and experts into one of Automodel's mixtures of experts.

    Args:
        lm: the model, which has no values yet.
        device_type: kind of the device that will compute it.
    """
    for module in list(lm.modules()):
        if isinstance(module, Qwen3MoeAttention):
            module.__class__ = PackedAttention
        elif isinstance(module, GroupedExperts):
            _adapt_experts(module)
            if device_type == "cpu":
                # Automodel's own is compiled, which takes a compiler on a CPU.
                experts: Any = module
                experts.expert_activation_grouped = _gate


def _adapt_experts(experts: Any) -> None:
    """Give experts the order of dimensions of ``Experts``."""
    for theirs, ours in (("gate_and_up_projs", "gate_up_proj"), ("down_projs", "down_proj")):
        weight = getattr(experts, theirs)
        delattr(experts, theirs)
        turned = torch.empty_like(weight.transpose(1, 2), memory_format=torch.contiguous_format)
        experts.register_parameter(ours, nn.Parameter(turned))
    experts.__class__ = Experts


def _gate(values: Tensor, weights: Tensor) -> Tensor:
    """Return ``silu(gate) · input · weight`` ``[R, I]`` in the dtype of the values.

    Args:
        values: gates and inputs of the tokens ``[R, 2 · I]``.
        weights: weight of each token's expert ``[R, 1]``.
    """
    gate, up = values.chunk(2, dim=-1)
    return (F.silu(gate) * up * weights).to(values.dtype)

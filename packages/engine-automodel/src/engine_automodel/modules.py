"""The engine's own parts of Automodel's mixtures of experts.

Automodel's attention of these models knows documents through TransformerEngine only. Its rotary
positions take one kind of scaling for all, and its experts are stored in another order of
dimensions than Hugging Face's weights, of which a rank's part would be no box.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_automodel.library import (
    MLA,
    Glm4MoeAttention,
    GptOssAttention,
    GroupedExperts,
    MiniMaxM2Attention,
    Qwen3MoeAttention,
    apply_rotary_emb_qk,
    rotate_pairs,
)
from engine_torch.attention import Packing, packed_attention
from engine_torch.boxes import local_of

__all__ = ["Experts", "PackedAttention", "PackedLatentAttention", "Rotary", "adapt"]


class PackedAttention(nn.Module):
    """Attention within the documents of a pack, of this rank's heads.

    It is the forward pass of several classes of Automodel, whose modules it takes.
    """

    head_dim: int
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    scaling: float
    window: int | None

    def split_heads(self, projected: Tensor, norm: str) -> Tensor:
        """Return ``[1, T, H, d]`` of a projection ``[1, T, H · d]``, normalized by head.

        Args:
            projected: the projection.
            norm: name of the norm, which some models leave out.
        """
        heads = projected.unflatten(-1, (-1, self.head_dim))
        module = getattr(self, norm, None)
        return heads if module is None else module(heads)

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
        query, key = apply_rotary_emb_qk(
            self.split_heads(self.q_proj(x), "q_norm"),
            self.split_heads(self.k_proj(x), "k_norm"),
            freqs_cis,
            rope_fusion=False,
        )
        value = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        out, _ = packed_attention(
            self,
            query,
            key,
            value,
            attention_mask,
            packing=packing,
            scaling=self.scaling,
            sliding_window=self.window,
            s_aux=getattr(self, "sinks", None),
        )
        return self.o_proj(out.flatten(2))


class _PackedQwen3Moe(PackedAttention, Qwen3MoeAttention):
    """Attention of Qwen3-MoE."""


class _PackedGlm4Moe(PackedAttention, Glm4MoeAttention):
    """Attention of GLM-4.5."""


class _PackedGptOss(PackedAttention, GptOssAttention):
    """Attention of gpt-oss."""


class _PackedMiniMaxM2(PackedAttention, MiniMaxM2Attention):
    """Attention of MiniMax-M2, whose norms are over all heads together."""

    def split_heads(self, projected: Tensor, norm: str) -> Tensor:
        """Return ``[1, T, H, d]`` of a projection ``[1, T, H · d]``, normalized as a whole."""
        return getattr(self, norm)(projected).unflatten(-1, (-1, self.head_dim))


class PackedLatentAttention(MLA):
    """Latent attention within the documents of a pack."""

    scaling: float
    amplitude: float

    def forward(
        self,
        x: Tensor,
        freqs_cis: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packing: Packing | None = None,
        **unused: Any,
    ) -> Tensor:
        """Return the outputs ``[1, T, D]`` of inputs ``[1, T, D]``.

        Args:
            x: inputs.
            freqs_cis: rotations of the positions ``[1, T, d / 2]``, complex numbers of length 1.
            attention_mask: always None.
            packing: the documents.
            **unused: arguments of transformers' models.
        """
        del unused
        if self.q_lora_rank is None:
            query = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        parts = [self.qk_nope_head_dim, self.qk_rope_head_dim]
        plain, rotated = query.unflatten(-1, (self.n_heads, -1)).split(parts, dim=-1)
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.kv_lora_rank, parts[1]], dim=-1)
        rotated, shared = rotate_pairs(
            rotated, shared.unsqueeze(2), freqs_cis * self.amplitude, rope_fusion=False
        )
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.n_heads, -1))
        key, value = both.split([parts[0], self.v_head_dim], dim=-1)
        query = torch.cat([plain, rotated], dim=-1)
        key = torch.cat([key, shared.expand(-1, -1, self.n_heads, -1)], dim=-1)
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        out, _ = packed_attention(
            self, query, key, value, attention_mask, packing=packing, scaling=self.scaling
        )
        return self.o_proj(out.flatten(2))


_ATTENTION: Mapping[type[nn.Module], type[nn.Module]] = {
    Qwen3MoeAttention: _PackedQwen3Moe,
    Glm4MoeAttention: _PackedGlm4Moe,
    GptOssAttention: _PackedGptOss,
    MiniMaxM2Attention: _PackedMiniMaxM2,
    MLA: PackedLatentAttention,
}


class Rotary(nn.Module):
    """The frequencies of rotary positions, as transformers computes them.

    Args:
        kind: transformers' class of the family.
    """

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self._kind = kind
        self.frequencies = torch.empty(0)
        self.amplitude = 1.0

    def place(self, hf_config: Any, device: torch.device) -> None:
        """Compute the frequencies on a device."""
        with device:
            theirs = self._kind(hf_config)
        # torch would register a buffer again, and cast it. Detached it is a plain tensor.
        self.frequencies = theirs.inv_freq.float().to(device).detach()
        self.amplitude = float(theirs.attention_scaling)

    # Automodel asks its own class by this name.
    def _compute_concentration_and_inv_freq(self) -> tuple[float, Tensor]:
        """Return the factor of cosines and sines, and the frequencies ``[d / 2]`` float32."""
        return self.amplitude, self.frequencies


class Experts(GroupedExperts):
    """Gated experts whose weights have Hugging Face's order of dimensions.

    ``gate_up_proj`` is ``[E, 2 · I, D]`` and ``down_proj`` is ``[E, D, I]``, under transformers'
    names. Those of gpt-oss are ``[E, D, 2 · I]`` and ``[E, I, D]`` there, too.
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    turned: bool

    @property
    def gate_and_up_projs(self) -> Tensor:
        """Weights of gate and input in Automodel's order, ``[E, D, 2 · I]``."""
        return self.gate_up_proj.transpose(1, 2) if self.turned else self.gate_up_proj

    @property
    def down_projs(self) -> Tensor:
        """Weights of the output in Automodel's order, ``[E, I, D]``."""
        return self.down_proj.transpose(1, 2) if self.turned else self.down_proj

    # The number of an expert's tokens is known in the middle of the pass, where ranks that share
    # experts exchange theirs.
    @torch.compiler.disable
    def forward(self, x: Tensor, *routed: Any) -> Tensor:
        """Return the weighted outputs of the tokens' experts (see ``GroupedExperts.forward``)."""
        out: Tensor = super().forward(x, *routed)
        if not self.expert_bias:
            return out
        # Automodel gives the biases no gradient on a rank of whose experts no token has one, and
        # the ranks that share them would then not meet.
        for bias in (self.gate_up_proj_bias, self.down_proj_bias):
            assert bias is not None
            out = out + 0.0 * local_of(bias).sum().to(out.dtype)
        return out


def adapt(lm: nn.Module, twin: Any, device_type: str) -> None:
    """Put the engine's attention, experts and positions into one of Automodel's models.

    Args:
        lm: a mixture of experts, which has no values yet.
        twin: transformers' model of the same configuration, on any device.
        device_type: kind of the device that will compute it.
    """
    for name, module in list(lm.named_modules()):
        packed = _ATTENTION.get(type(module))
        if packed is not None:
            _adapt_attention(module, packed, twin.get_submodule(name))
        elif isinstance(module, GroupedExperts):
            _adapt_experts(module, device_type)
    decoder: Any = lm.model
    decoder.rotary_emb = Rotary(type(twin.model.rotary_emb))
    if hasattr(decoder, "freqs_cis"):
        # A buffer, which would be cast and emptied.
        del decoder.freqs_cis


def _adapt_attention(module: Any, packed: type[nn.Module], theirs: Any) -> None:
    """Give an attention the engine's forward pass, with the numbers of transformers' own."""
    module.__class__ = packed
    module.scaling = theirs.scaling
    module.window = getattr(theirs, "sliding_window", None)
    if getattr(module, "sinks", None) is not None:
        # Automodel makes them in torch's default dtype, and FSDP asks for one dtype.
        sinks = torch.empty_like(module.sinks, dtype=module.q_proj.weight.dtype)
        module.sinks = nn.Parameter(sinks)


def _adapt_experts(experts: Any, device_type: str) -> None:
    """Give experts the order of dimensions of ``Experts``, and an activation."""
    clamped = experts.config.expert_activation == "quick_geglu"
    experts.turned = not clamped
    for theirs, ours in (("gate_and_up_projs", "gate_up_proj"), ("down_projs", "down_proj")):
        weight = getattr(experts, theirs)
        delattr(experts, theirs)
        if experts.turned:
            turned = weight.transpose(1, 2)
            weight = torch.empty_like(turned, memory_format=torch.contiguous_format)
        experts.register_parameter(ours, nn.Parameter(weight))
    experts.__class__ = Experts
    if clamped:
        # Automodel's own is compiled and tuned for each number of tokens.
        experts.expert_activation_grouped = partial(
            _gate_clamped,
            alpha=experts.config.activation_alpha,
            limit=experts.config.activation_limit,
        )
    elif device_type == "cpu":
        # Automodel's own is compiled, which takes a compiler on a CPU.
        experts.expert_activation_grouped = _gate


def _gate(values: Tensor, weights: Tensor) -> Tensor:
    """Return ``silu(gate) · input · weight`` ``[R, I]`` in the dtype of the values.

    Args:
        values: gates and inputs of the tokens ``[R, 2 · I]``.
        weights: weight of each token's expert ``[R, 1]``.
    """
    gate, up = values.chunk(2, dim=-1)
    return (F.silu(gate) * up * weights).to(values.dtype)


def _gate_clamped(values: Tensor, weights: Tensor, *, alpha: float, limit: float) -> Tensor:
    """Return ``gate · σ(alpha · gate) · (input + 1) · weight`` ``[R, I]`` of clamped values.

    Args:
        values: gates and inputs of the tokens, interleaved, ``[R, 2 · I]``.
        weights: weight of each token's expert ``[R, 1]``.
        alpha: factor of the gate in the sigmoid.
        limit: largest gate, and largest absolute input.
    """
    gate = values[..., ::2].clamp(max=limit)
    up = values[..., 1::2].clamp(min=-limit, max=limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1) * weights).to(values.dtype)

"""Layers of a decoder as plain float64 functions of one document.

Shapes: L tokens of the document, C hidden size, N query heads, G key-value heads, H
head width, E experts, V vocabulary. Every function takes the parameters by Hugging Face
name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import silu

from engine_conformance.oracle.config import ModelConfig, MoEConfig

__all__ = ["attention_block", "feed_forward_block", "linear", "rms_norm", "routing_gap"]

Params = Mapping[str, Tensor]


def linear(params: Params, name: str, x: Tensor) -> Tensor:
    """Return ``x @ W.T (+ b)``.

    The bias is added when the checkpoint has one.
    """
    y = x @ params[f"{name}.weight"].T
    bias = params.get(f"{name}.bias")
    return y if bias is None else y + bias


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the root-mean-square norm over the last axis.

    Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4.
    """
    return weight * x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def attention_block(params: Params, config: ModelConfig, index: int, x: Tensor) -> Tensor:
    """Compute the first half of a pre-norm decoder layer, ``[L, C]`` to ``[L, C]``."""
    prefix = f"model.layers.{index}."
    normed = rms_norm(x, params[f"{prefix}input_layernorm.weight"], config.rms_norm_eps)
    return x + attention(params, config, f"{prefix}self_attn.", normed)


def feed_forward_block(params: Params, config: ModelConfig, index: int, x: Tensor) -> Tensor:
    """Compute the second half, a dense or a mixture layer, ``[L, C]`` to ``[L, C]``."""
    normed = feed_forward_input(params, config, index, x)
    prefix = f"model.layers.{index}.mlp."
    if config.moe is not None and index in config.moe.sparse_layers:
        return x + mixture(params, config.moe, prefix, normed)
    return x + mlp(params, prefix, normed)


def feed_forward_input(params: Params, config: ModelConfig, index: int, x: Tensor) -> Tensor:
    """Return the input ``[L, C]`` of a layer's router and experts."""
    return rms_norm(
        x, params[f"model.layers.{index}.post_attention_layernorm.weight"], config.rms_norm_eps
    )


def routing_gap(params: Params, config: ModelConfig, index: int, x: Tensor) -> Tensor:
    """Return the lead ``[L]`` of the last chosen expert's router logit over the next expert's."""
    if config.moe is None or index not in config.moe.sparse_layers:
        return torch.full(x.shape[:1], math.inf, dtype=torch.float64)
    normed = feed_forward_input(params, config, index, x)
    k = config.moe.top_k
    logits = linear(params, f"model.layers.{index}.mlp.gate", normed)
    padded = torch.cat((logits, torch.full_like(logits[:, :1], -math.inf)), dim=-1)
    ordered = padded.sort(dim=-1, descending=True).values
    return ordered[:, k - 1] - ordered[:, k]


def mlp(params: Params, prefix: str, x: Tensor) -> Tensor:
    """Compute SwiGLU (Shazeer 2020, arXiv:2002.05202): ``down(silu(gate(x)) * up(x))``."""
    gated = silu(linear(params, f"{prefix}gate_proj", x)) * linear(params, f"{prefix}up_proj", x)
    return linear(params, f"{prefix}down_proj", gated)


def mixture(params: Params, moe: MoEConfig, prefix: str, x: Tensor) -> Tensor:
    """Mix the top k of a softmax over all experts, renormalised or not, without capacity limits."""
    probs = linear(params, f"{prefix}gate", x).softmax(dim=-1)  # [L, E]
    weights, chosen = probs.topk(moe.top_k, dim=-1)  # [L, k]
    if moe.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    # [L, E], zero for experts that are not chosen.
    mixed = torch.zeros_like(probs).scatter(-1, chosen, weights)
    # Every expert sees every token: that is costly, but leaves no dispatch that could be wrong.
    outputs = [mlp(params, f"{prefix}experts.{expert}.", x) for expert in range(moe.num_experts)]
    return (mixed.unsqueeze(-1) * torch.stack(outputs, dim=1)).sum(dim=1)


def attention(params: Params, config: ModelConfig, prefix: str, x: Tensor) -> Tensor:
    """Compute causal softmax attention of one document, with grouped key-value heads and RoPE."""
    q = _heads(linear(params, f"{prefix}q_proj", x), config.num_heads)  # [N, L, H]
    k = _heads(linear(params, f"{prefix}k_proj", x), config.num_kv_heads)  # [G, L, H]
    v = _heads(linear(params, f"{prefix}v_proj", x), config.num_kv_heads)
    if config.qk_norm:
        q = rms_norm(q, params[f"{prefix}q_norm.weight"], config.rms_norm_eps)
        k = rms_norm(k, params[f"{prefix}k_norm.weight"], config.rms_norm_eps)
    q = _rope(q, config.rope_theta)
    k = _rope(k, config.rope_theta)
    group = config.num_heads // config.num_kv_heads
    k = k.repeat_interleave(group, dim=0)
    v = v.repeat_interleave(group, dim=0)
    scores = q @ k.transpose(-1, -2) / math.sqrt(config.head_dim)  # [N, L, L]
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, -math.inf).softmax(dim=-1) @ v
    return linear(params, f"{prefix}o_proj", mixed.transpose(0, 1).flatten(1))


def _heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(0, 1)


def _rope(x: Tensor, theta: float) -> Tensor:
    """Apply rotary embedding to ``[heads, L, H]``, with positions from 0.

    Su et al. 2021, arXiv:2104.09864.
    Hugging Face pairs dimension i with i + H/2, not with i + 1 as the paper does.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequency  # [L, H/2]
    cos = angle.cos()
    sin = angle.sin()
    first = x[..., :half]
    second = x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

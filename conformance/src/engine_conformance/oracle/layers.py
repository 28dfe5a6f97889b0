"""Layers of a decoder as plain float64 functions of one document.

Shapes: L tokens of the document, C hidden size, N query heads, G key-value heads, H
head width, E experts, V vocabulary. Every function takes the parameters by Hugging Face
name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from engine_conformance.oracle.config import ModelConfig, MoEConfig
from engine_conformance.oracle.rope import rotate

__all__ = ["attention_block", "cap", "feed_forward_block", "linear", "norm", "routing_gap"]

Params = Mapping[str, Tensor]


def linear(params: Params, name: str, x: Tensor) -> Tensor:
    """Return ``x @ W.T (+ b)``.

    The bias is added when the checkpoint has one.
    """
    y = x @ params[f"{name}.weight"].T
    bias = params.get(f"{name}.bias")
    return y if bias is None else y + bias


def norm(params: Params, config: ModelConfig, name: str, x: Tensor) -> Tensor:
    """Return the root-mean-square norm over the last axis.

    Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4.
    """
    weight = config.norm_offset + params[f"{name}.weight"]
    return weight * x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + config.rms_norm_eps)


def cap(x: Tensor, bound: float | None) -> Tensor:
    """Return ``bound * tanh(x / bound)``, or ``x`` without a bound."""
    return x if bound is None else bound * torch.tanh(x / bound)


def attention_block(params: Params, config: ModelConfig, index: int, x: Tensor) -> Tensor:
    """Compute the first half of a pre-norm decoder layer, ``[L, C]`` to ``[L, C]``."""
    prefix = f"model.layers.{index}."
    normed = norm(params, config, f"{prefix}input_layernorm", x)
    mixed = attention(params, config, index, f"{prefix}self_attn.", normed)
    if config.norms_after:
        mixed = norm(params, config, f"{prefix}post_attention_layernorm", mixed)
    return x + mixed


def feed_forward_block(
    params: Params, config: ModelConfig, index: int, x: Tensor, replayed: Tensor | None = None
) -> Tensor:
    """Compute the second half, a dense or a mixture layer, ``[L, C]`` to ``[L, C]``.

    ``replayed [L, k]`` are the experts of each token, see `mixture`.
    """
    normed = feed_forward_input(params, config, index, x)
    prefix = f"model.layers.{index}.mlp."
    if config.moe is not None and index in config.moe.sparse_layers:
        return x + mixture(params, config, config.moe, prefix, normed, replayed)
    made = mlp(params, config, prefix, normed)
    if not config.norms_after:
        return x + made
    return x + norm(params, config, f"model.layers.{index}.post_feedforward_layernorm", made)


def feed_forward_input(params: Params, config: ModelConfig, index: int, x: Tensor) -> Tensor:
    """Return the input ``[L, C]`` of a layer's router and experts."""
    name = "pre_feedforward_layernorm" if config.norms_after else "post_attention_layernorm"
    return norm(params, config, f"model.layers.{index}.{name}", x)


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


def _gelu_tanh(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": relu,
}


def mlp(params: Params, config: ModelConfig, prefix: str, x: Tensor) -> Tensor:
    """Compute a gated MLP (Shazeer 2020, arXiv:2002.05202): ``down(act(gate(x)) * up(x))``."""
    gate = _ACTIVATIONS[config.activation](linear(params, f"{prefix}gate_proj", x))
    return linear(params, f"{prefix}down_proj", gate * linear(params, f"{prefix}up_proj", x))


def mixture(
    params: Params,
    config: ModelConfig,
    moe: MoEConfig,
    prefix: str,
    x: Tensor,
    replayed: Tensor | None = None,
) -> Tensor:
    """Mix the top k of a softmax over all experts, renormalised or not, without capacity limits.

    ``replayed [L, k]`` are experts in place of the top k, with the softmax's weights, or -1.
    """
    probs = linear(params, f"{prefix}gate", x).softmax(dim=-1)  # [L, E]
    chosen = probs.topk(moe.top_k, dim=-1).indices  # [L, k]
    if replayed is not None:
        chosen = torch.where(replayed < 0, chosen, replayed)
    weights = probs.gather(-1, chosen)
    if moe.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    # [L, E], zero for experts that are not chosen.
    mixed = torch.zeros_like(probs).scatter(-1, chosen, weights)
    # Every expert sees every token: that is costly, but leaves no dispatch that could be wrong.
    outputs = [
        mlp(params, config, f"{prefix}experts.{expert}.", x) for expert in range(moe.num_experts)
    ]
    return (mixed.unsqueeze(-1) * torch.stack(outputs, dim=1)).sum(dim=1)


def attention(params: Params, config: ModelConfig, index: int, prefix: str, x: Tensor) -> Tensor:
    """Compute causal softmax attention of one document, with grouped key-value heads and RoPE."""
    q = _heads(linear(params, f"{prefix}q_proj", x), config.num_heads)  # [N, L, H]
    k = _heads(linear(params, f"{prefix}k_proj", x), config.num_kv_heads)  # [G, L, H]
    v = _heads(linear(params, f"{prefix}v_proj", x), config.num_kv_heads)
    if config.qk_norm:
        q = norm(params, config, f"{prefix}q_norm", q)
        k = norm(params, config, f"{prefix}k_norm", k)
    q = rotate(q, config.rope)
    k = rotate(k, config.rope)
    group = config.num_heads // config.num_kv_heads
    k = k.repeat_interleave(group, dim=0)
    v = v.repeat_interleave(group, dim=0)
    scores = cap(q @ k.transpose(-1, -2) * config.attention_scale, config.attention_cap)
    unseen = _unseen(scores.shape[-1], config.windows[index])
    mixed = scores.masked_fill(unseen, -math.inf).softmax(dim=-1) @ v
    return linear(params, f"{prefix}o_proj", mixed.transpose(0, 1).flatten(1))


def _unseen(length: int, window: int | None) -> Tensor:
    """Return ``[L, L]``, true where the row's token does not attend to the column's."""
    every = torch.ones((length, length), dtype=torch.bool)
    later = every.triu(1)
    return later if window is None else later | every.tril(-window)


def _heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(0, 1)

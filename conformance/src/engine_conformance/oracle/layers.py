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

__all__ = [
    "KeysValues",
    "attention_block",
    "cap",
    "feed_forward_block",
    "keys_values",
    "linear",
    "norm",
    "routing_gap",
]

Params = Mapping[str, Tensor]
KeysValues = tuple[Tensor, Tensor]
"""Rotated keys and values of a layer, each ``[G, tokens, H]``."""


def linear(params: Params, name: str, x: Tensor) -> Tensor:
    """Return ``x @ W.T (+ b)``.

    The bias is added when the checkpoint has one.
    """
    y = x @ params[f"{name}.weight"].T
    bias = params.get(f"{name}.bias")
    return y if bias is None else y + bias


def norm(params: Params, config: ModelConfig, name: str, x: Tensor) -> Tensor:
    """Return the root-mean-square norm over the last axis.

    Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4. Norms of a model that subtracts the mean
    are those of Ba et al. 2016, arXiv:1607.06450.
    """
    if config.layer_norms or name.endswith("indexer.k_norm"):
        return layer_norm(params, config, name, x)
    weight = config.norm_offset + params[f"{name}.weight"]
    return weight * x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + config.rms_norm_eps)


def layer_norm(params: Params, config: ModelConfig, name: str, x: Tensor) -> Tensor:
    """Return the norm over the last axis that subtracts the mean and adds a bias."""
    centred = x - x.mean(dim=-1, keepdim=True)
    deviation = torch.sqrt(centred.square().mean(dim=-1, keepdim=True) + config.rms_norm_eps)
    return params[f"{name}.weight"] * centred / deviation + params[f"{name}.bias"]


def cap(x: Tensor, bound: float | None) -> Tensor:
    """Return ``bound * tanh(x / bound)``, or ``x`` without a bound."""
    return x if bound is None else bound * torch.tanh(x / bound)


def attention_block(
    params: Params, config: ModelConfig, index: int, x: Tensor, kept: KeysValues | None = None
) -> Tensor:
    """Compute the first half of a pre-norm decoder layer, ``[L, C]`` to ``[L, C]``.

    ``kept`` are keys and values of the first tokens in place of those of ``x``. The rows of these
    tokens then have no meaning.
    """
    prefix = f"model.layers.{index}."
    normed = norm(params, config, f"{prefix}{config.names.attention_norm}", x)
    if index in config.mixers:
        return x + convolution(params, config, f"{prefix}conv.", normed)
    name = f"{prefix}self_attn."
    if config.latent is None:
        attended = attention(params, config, index, name, normed, kept)
    else:
        attended = latent_attention(params, config, index, name, normed)
    mixed = config.residual_scale * attended
    if config.parallel:
        return x + mixed + mlp(params, config, f"{prefix}mlp.", normed)
    if config.norms_after:
        mixed = norm(params, config, f"{prefix}post_attention_layernorm", mixed)
    return x + mixed


def feed_forward_block(
    params: Params, config: ModelConfig, index: int, x: Tensor, replayed: Tensor | None = None
) -> Tensor:
    """Compute the second half, a dense or a mixture layer, ``[L, C]`` to ``[L, C]``.

    ``replayed [L, k]`` are the experts of each token, see `mixture`.
    """
    if config.parallel:
        return x
    normed = feed_forward_input(params, config, index, x)
    prefix = f"model.layers.{index}.{config.names.mlp}."
    if config.moe is not None and index in config.moe.sparse_layers:
        return x + mixture(params, config, config.moe, prefix, normed, replayed)
    made = config.residual_scale * mlp(params, config, prefix, normed)
    if not config.norms_after:
        return x + made
    return x + norm(params, config, f"model.layers.{index}.post_feedforward_layernorm", made)


def feed_forward_input(params: Params, config: ModelConfig, index: int, x: Tensor) -> Tensor:
    """Return the input ``[L, C]`` of a layer's router and experts."""
    name = "pre_feedforward_layernorm" if config.norms_after else config.names.mlp_norm
    return norm(params, config, f"model.layers.{index}.{name}", x)


def routing_gap(params: Params, config: ModelConfig, index: int, x: Tensor) -> Tensor:
    """Return the lead ``[L]`` of the last chosen expert's router logit over the next expert's."""
    if config.moe is None or index not in config.moe.sparse_layers:
        return torch.full(x.shape[:1], math.inf, dtype=torch.float64)
    normed = feed_forward_input(params, config, index, x)
    k = config.moe.top_k
    router = f"model.layers.{index}.mlp.{config.moe.router}"
    logits = linear(params, router, normed)
    if config.moe.sigmoid:
        # A sigmoid rises by at most a quarter of what its logit does.
        logits = 4 * (logits.sigmoid() + params[f"{router}.e_score_correction_bias"])
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
    """Compute a gated MLP (Shazeer 2020, arXiv:2002.05202): ``down(act(gate(x)) * up(x))``.

    Without a gate it is ``down(act(up(x)))``.
    """
    names = config.names
    act = _ACTIVATIONS[config.activation]
    up = linear(params, f"{prefix}{names.up}", x)
    made = act(linear(params, f"{prefix}{names.gate}", x)) * up if names.gate else act(up)
    return linear(params, f"{prefix}{names.down}", made)


def mixture(
    params: Params,
    config: ModelConfig,
    moe: MoEConfig,
    prefix: str,
    x: Tensor,
    replayed: Tensor | None = None,
) -> Tensor:
    """Mix the top k of a softmax over all experts, renormalised or not, without capacity limits.

    Sigmoids take the place of the softmax where the model says so, and a bias is then added to
    select. ``replayed [L, k]`` are experts in place of the top k, with their own weights, or -1.
    """
    logits = linear(params, f"{prefix}{moe.router}", x)
    probs = logits.sigmoid() if moe.sigmoid else logits.softmax(dim=-1)  # [L, E]
    bias = params[f"{prefix}gate.e_score_correction_bias"] if moe.sigmoid else 0.0
    chosen = (probs + bias).topk(moe.top_k, dim=-1).indices  # [L, k]
    if replayed is not None:
        chosen = torch.where(replayed < 0, chosen, replayed)
    weights = probs.gather(-1, chosen)
    if moe.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    weights = moe.scale * weights
    # [L, E], zero for experts that are not chosen.
    mixed = torch.zeros_like(probs).scatter(-1, chosen, weights)
    # Every expert sees every token: that is costly, but leaves no dispatch that could be wrong.
    if moe.clamped:
        outputs = _clamped_experts(params, f"{prefix}experts.", x)
    else:
        each = range(moe.num_experts)
        outputs = [mlp(params, config, f"{prefix}experts.{expert}.", x) for expert in each]
    routed = (mixed.unsqueeze(-1) * torch.stack(outputs, dim=1)).sum(dim=1)
    if not moe.shared_size:
        return routed
    return routed + mlp(params, config, f"{prefix}shared_experts.", x)


def _clamped_experts(params: Params, prefix: str, x: Tensor) -> list[Tensor]:
    """Return what each expert of gpt-oss makes of ``x [L, C]``, as OpenAI's own model computes it.

    Gate and other half are interleaved and bounded, and 1 is added to the latter.
    """
    found: list[Tensor] = []
    for up, up_bias, down, down_bias in zip(
        params[f"{prefix}gate_up_proj"],
        params[f"{prefix}gate_up_proj_bias"],
        params[f"{prefix}down_proj"],
        params[f"{prefix}down_proj_bias"],
        strict=True,
    ):
        both = x @ up + up_bias
        gate = both[:, 0::2].clamp(max=7.0)
        made = (both[:, 1::2].clamp(-7.0, 7.0) + 1) * gate * (1.702 * gate).sigmoid()
        found.append(made @ down + down_bias)
    return found


def convolution(params: Params, config: ModelConfig, prefix: str, x: Tensor) -> Tensor:
    """Compute LFM2's gated short convolution: ``out(c * conv(b * h))`` of ``b, c, h = in(x)``.

    The convolution is causal, over ``mixer_width`` tokens and each channel alone.
    """
    b, c, h = linear(params, f"{prefix}in_proj", x).chunk(3, dim=-1)
    taps = params[f"{prefix}conv.weight"].squeeze(1)  # [C, K]
    width = config.mixer_width
    padded = torch.cat((torch.zeros(width - 1, h.shape[-1], dtype=torch.float64), b * h))
    mixed = sum(taps[:, k] * padded[k : k + len(x)] for k in range(width))
    return linear(params, f"{prefix}out_proj", c * mixed)


def keys_values(params: Params, config: ModelConfig, index: int, x: Tensor) -> KeysValues:
    """Return the keys and values of plain attention in a layer with the input ``x [L, C]``."""
    prefix = f"model.layers.{index}."
    normed = norm(params, config, f"{prefix}{config.names.attention_norm}", x)
    return _keys_values(params, config, f"{prefix}self_attn.", normed)


def _keys_values(params: Params, config: ModelConfig, prefix: str, x: Tensor) -> KeysValues:
    k = _heads(linear(params, f"{prefix}k_proj", x), config.num_kv_heads)
    v = _heads(linear(params, f"{prefix}v_proj", x), config.num_kv_heads)
    if config.qk_norm:
        k = norm(params, config, f"{prefix}{config.names.key_norm}", k)
    return _rotate_part(k, config), v


def attention(
    params: Params,
    config: ModelConfig,
    index: int,
    prefix: str,
    x: Tensor,
    kept: KeysValues | None = None,
) -> Tensor:
    """Compute causal softmax attention of one document, with grouped key-value heads and RoPE.

    ``kept`` are as in `attention_block`.
    """
    q = _heads(linear(params, f"{prefix}q_proj", x), config.num_heads)  # [N, L, H]
    if config.qk_norm:
        q = norm(params, config, f"{prefix}{config.names.query_norm}", q)
    q = _rotate_part(q, config)
    k, v = _keys_values(params, config, prefix, x)
    if kept is not None:
        k, v = (
            torch.cat((old, own[:, old.shape[1] :]), dim=1)
            for old, own in zip(kept, (k, v), strict=True)
        )
    group = config.num_heads // config.num_kv_heads
    k = k.repeat_interleave(group, dim=0)
    v = v.repeat_interleave(group, dim=0)
    scores = cap(q @ k.transpose(-1, -2) * config.attention_scale, config.attention_cap)
    unseen = config.mask(scores.shape[-1], config.windows[index])
    scores = scores.masked_fill(unseen, -math.inf)
    if config.sinks:
        # One more score of each head, of no token (Xiao et al. 2023, arXiv:2309.17453).
        sinks = params[f"{prefix}sinks"][:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    mixed = scores.softmax(dim=-1)[..., : x.shape[0]] @ v
    return linear(params, f"{prefix}{config.names.output}", mixed.transpose(0, 1).flatten(1))


def _rotate_part(x: Tensor, config: ModelConfig) -> Tensor:
    """Rotate the first dimensions of each head ``[heads, L, H]``, as many as RoPE has."""
    turned = config.rope.head_dim
    return torch.cat((rotate(x[..., :turned], config.rope), x[..., turned:]), dim=-1)


def latent_attention(
    params: Params, config: ModelConfig, index: int, prefix: str, x: Tensor
) -> Tensor:
    """Compute latent attention of one document, to the tokens that an index selects if any does.

    DeepSeek-V2, arXiv:2405.04434, section 2.1, and DeepSeek-V3.2, arXiv:2512.02556, section 2.1.
    Rotary positions of attention pair dimension 2i with 2i + 1, those of the index i with i + H/2.
    """
    own = config.latent
    assert own is not None
    latent = norm(params, config, f"{prefix}q_a_layernorm", linear(params, f"{prefix}q_a_proj", x))
    q = _heads(linear(params, f"{prefix}q_b_proj", latent), config.num_heads)
    q = torch.cat((q[..., : own.plain_dim], _rotate_pairs(q[..., own.plain_dim :], config)), dim=-1)
    compressed = linear(params, f"{prefix}kv_a_proj_with_mqa", x)
    shared = _rotate_pairs(compressed[None, :, own.key_rank :], config)  # [1, L, R]
    narrow = norm(params, config, f"{prefix}kv_a_layernorm", compressed[:, : own.key_rank])
    both = _heads(linear(params, f"{prefix}kv_b_proj", narrow), config.num_heads)
    k, v = both[..., : own.plain_dim], both[..., own.plain_dim :]
    k = torch.cat((k, shared.expand(config.num_heads, -1, -1)), dim=-1)
    scores = q @ k.transpose(-1, -2) * config.attention_scale
    unseen = config.mask(len(x), config.windows[index])
    if own.selected is not None:
        unseen = unseen | _unselected(params, config, f"{prefix}indexer.", x, latent, unseen)
    mixed = scores.masked_fill(unseen, -math.inf).softmax(dim=-1) @ v
    return linear(params, f"{prefix}o_proj", mixed.transpose(0, 1).flatten(1))


def _rotate_pairs(x: Tensor, config: ModelConfig) -> Tensor:
    """Rotate ``[heads, L, R]`` with dimension 2i and 2i + 1 as a pair."""
    return rotate(torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1), config.rope)


@torch.no_grad()
def _unselected(
    params: Params, config: ModelConfig, prefix: str, x: Tensor, latent: Tensor, unseen: Tensor
) -> Tensor:
    """Return ``[L, L]``, true where the row's token does not select the column's.

    The index has no gradient.
    """
    own = config.latent
    assert own is not None
    assert own.selected is not None
    q = _rotate_part(_heads(linear(params, f"{prefix}wq_b", latent), own.index_heads), config)
    k = norm(params, config, f"{prefix}k_norm", linear(params, f"{prefix}wk", x))[None]
    k = _rotate_part(k, config)
    scores = relu(q @ k.transpose(-1, -2) * own.index_dim**-0.5)  # [heads, L, L]
    weights = linear(params, f"{prefix}weights_proj", x) * own.index_heads**-0.5  # [L, heads]
    total = (weights.T[..., None] * scores).sum(dim=0).masked_fill(unseen, -math.inf)
    chosen = total.topk(min(own.selected, len(x)), dim=-1).indices
    return torch.ones_like(unseen).scatter(-1, chosen, False)


def _heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(0, 1)

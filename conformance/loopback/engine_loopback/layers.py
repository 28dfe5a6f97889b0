"""Layers of a decoder on packed tokens.

Every method has one job, so that it can be replaced alone.

Shapes: n tokens of this rank, T tokens of the micro-batch, C hidden size, H query heads and G
key-value heads *of this tensor-parallel rank*, D head width, E experts. A layer's weights are given
by their names inside the layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import dropout, silu

from engine_api.config import LoraConfig
from engine_loopback.parallel import Collectives
from engine_loopback.shape import Shape

Params = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedInputs:
    """One micro-batch on the device.

    Attributes:
        ids, positions, targets: ``[n]`` int64: tokens, their positions in their documents, and the
            tokens after them.
        mask: ``[n, T]`` bool, the tokens that each may attend to.
        first: ``[T]`` bool, true at the first token of each document.
        size: number of tokens of the batch without padding.
        parents: ``[T]`` int64, the token before each in its documents, where documents share their
            beginnings; ``targets`` are then the tokens themselves. None without sharing.
        rows: the computed token of each token of the batch ``[size]`` int64, or None as above.
        experts: ``[n, k]`` int64, the experts of each token in the layer that is computed, -1 where
            its router selects them; None where it selects all of them.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    mask: Tensor
    first: Tensor
    size: int
    parents: Tensor | None = None
    rows: Tensor | None = None
    experts: Tensor | None = None


class Layers:
    """The formulas, with tensor, sequence and expert parallelism."""

    training = False

    def __init__(self, shape: Shape, collectives: Collectives, lora: LoraConfig | None) -> None:
        self.shape = shape
        self.collectives = collectives
        self.lora = lora

    # --- linear layers -------------------------------------------------------------------------

    def linear(self, params: Params, name: str, x: Tensor) -> Tensor:
        """Return ``x Wᵀ``, plus ``alpha / rank · B A`` if there is an adapter.

        The bias is left out.
        """
        y = x @ params[f"{name}.weight"].T
        if self.lora is None or f"{name}.lora_A.weight" not in params:
            return y
        a = params[f"{name}.lora_A.weight"]
        b = params[f"{name}.lora_B.weight"]
        return y + self.adapter_scale() * (dropout(x, self.lora.dropout, self.training) @ a.T @ b.T)

    def adapter_scale(self) -> float:
        """Return ``alpha / rank`` (Hu et al. 2021, arXiv:2106.09685, section 4.1)."""
        assert self.lora is not None
        return self.lora.alpha / self.lora.rank

    def column(self, params: Params, name: str, x: Tensor) -> Tensor:
        """Apply a linear layer whose outputs are split, and its bias as well."""
        return self.with_bias(params, name, self.linear(params, name, x))

    def row(self, params: Params, name: str, x: Tensor) -> Tensor:
        """Apply a linear layer whose inputs are split.

        The bias is added once, after the sum.
        """
        total = self.collectives.reduce_from_tensor(self.linear(params, name, x))
        return self.with_bias(params, name, total)

    def with_bias(self, params: Params, name: str, y: Tensor) -> Tensor:
        """Add the bias if the model has one, and return the sum."""
        bias = params.get(f"{name}.bias")
        return y if bias is None else y + bias

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the root-mean-square norm over the last axis, computed in float32.

        Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4.
        """
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.shape.eps)
        return normed.to(x.dtype) * weight

    # --- attention -----------------------------------------------------------------------------

    def attention(self, params: Params, x: Tensor, packed: PackedInputs) -> Tensor:
        """Attend with own queries to keys and values of all tokens, ``[n, C]`` → ``[n, C]``."""
        x = self.collectives.copy_to_tensor(x)
        q, k, v = (self.heads(self.column(params, f"self_attn.{p}_proj", x)) for p in "qkv")
        if self.shape.qk_norm:
            q = self.norm(q, params["self_attn.q_norm.weight"])
            k = self.norm(k, params["self_attn.k_norm.weight"])
        q = self.rope(q, packed.positions)
        k = self.rope(k, packed.positions)
        k = self.collectives.gather_sequence(k)
        v = self.collectives.gather_sequence(v)
        return self.row(params, "self_attn.o_proj", self.attend(q, k, v, packed.mask).flatten(1))

    def heads(self, x: Tensor) -> Tensor:
        """Reshape ``[n, heads · D]`` to ``[n, heads, D]``."""
        return x.unflatten(-1, (-1, self.shape.head_dim))

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """Apply rotary embedding to ``[n, heads, D]``, with i paired with i + D/2.

        Su et al. 2021, arXiv:2104.09864.
        """
        half = x.shape[-1] // 2
        powers = torch.arange(half, device=x.device, dtype=torch.float32) / half
        angle = positions[:, None].float() * self.shape.theta**-powers
        cos = angle.cos()[:, None]
        sin = angle.sin()[:, None]
        a = x[..., :half].float()
        b = x[..., half:].float()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Compute softmax attention ``[n, H, D]``.

        Each key-value head serves ``H / G`` neighbouring query heads.
        """
        group = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k).float() / math.sqrt(self.shape.head_dim)
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1).to(v.dtype)
        return torch.einsum("hqk,khd->qhd", weights, v)

    def document_mask(self, documents: Tensor, own: Tensor) -> Tensor:
        """Return the mask ``[n, T]``: a token attends to those of its document up to itself.

        ``own [n]`` are this rank's indices.
        """
        index = torch.arange(len(documents))
        return (documents[own][:, None] == documents) & (own[:, None] >= index)

    # --- feed-forward --------------------------------------------------------------------------

    def mlp(self, params: Params, x: Tensor) -> Tensor:
        """Compute SwiGLU (Shazeer 2020, arXiv:2002.05202)."""
        x = self.collectives.copy_to_tensor(x)
        gate = silu(self.column(params, "mlp.gate_proj", x))
        gated = gate * self.column(params, "mlp.up_proj", x)
        return self.row(params, "mlp.down_proj", gated)

    def route(self, params: Params, x: Tensor, replayed: Tensor | None) -> Tensor:
        """Return the experts' weights ``[n, E]``: the top k of a softmax over all, else zero.

        The weights are renormalised if the model asks for it. ``replayed [n, k]`` are a token's
        experts in place of the top k, -1 where it has its own.
        """
        probs = self.linear(params, "mlp.gate", x).float().softmax(-1)
        weights, chosen = probs.topk(self.shape.top_k, dim=-1)
        if replayed is not None:
            chosen = torch.where(replayed < 0, chosen, replayed)
            weights = probs.gather(-1, chosen)
        if self.shape.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return torch.zeros_like(probs).scatter(-1, chosen, weights).to(x.dtype)

    def mixture(self, params: Params, x: Tensor, replayed: Tensor | None) -> Tensor:
        """Send tokens to all ranks with different experts, and sum what these return."""
        # The experts' outputs are parts of sums over tensor-parallel ranks, so the gradient of the
        # routing is too.
        mix = self.route(params, x, replayed)
        x = self.collectives.copy_to_tensor(x)
        mix = self.collectives.copy_to_tensor(mix)
        count = x.shape[0]
        x = self.collectives.gather_experts(self.collectives.even(x))
        mix = self.collectives.gather_experts(self.collectives.even(mix))
        y = self.collectives.scatter_experts(self.experts(params, x, mix))
        return self.collectives.reduce_from_tensor(y)[:count]

    def experts(self, params: Params, x: Tensor, mix: Tensor) -> Tensor:
        """Sum the weighted outputs of this rank's experts.

        Each expert sees every token, so that there is no dispatch that could be wrong.
        """
        total = torch.zeros_like(x)
        for expert in range(self.shape.experts):
            name = f"mlp.experts.{expert}"
            if f"{name}.gate_proj.weight" in params:
                gate = silu(self.linear(params, f"{name}.gate_proj", x))
                gated = gate * self.linear(params, f"{name}.up_proj", x)
                output = self.linear(params, f"{name}.down_proj", gated)
                total = total + mix[:, expert, None] * output
        return total

    def block(self, params: Params, x: Tensor, packed: PackedInputs) -> Tensor:
        """Compute one pre-norm layer, ``[n, C]`` → ``[n, C]``."""
        x = x + self.attention(params, self.norm(x, params["input_layernorm.weight"]), packed)
        normed = self.norm(x, params["post_attention_layernorm.weight"])
        if "mlp.gate.weight" in params:
            return x + self.mixture(params, normed, packed.experts)
        return x + self.mlp(params, normed)

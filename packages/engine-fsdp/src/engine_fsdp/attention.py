"""Attention over packed documents, registered with transformers' ``AttentionInterface``.

Tokens see only earlier tokens of their own document. Kernels (``model.attention``):

- ``sdpa``: PyTorch's scaled-dot-product attention, any device: documents side by side as a causal batch, or
  the whole pack under a block mask, whichever is less work;
- ``varlen``: ``torch.nn.attention.varlen`` (FlashAttention), CUDA, fp16 and bf16;
- ``auto``: varlen on CUDA in half precision, else sdpa.

Under Ulysses every kernel runs between two all-to-alls: heads are split over the ranks instead of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_api.errors import ConfigError, UnsupportedCapability
from engine_fsdp.parallel import heads_to_sequence, sequence_to_heads

NAME = "engine_fsdp_packed"
KERNELS = ("sdpa", "varlen")


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """The documents of one micro-batch; handed through the model's forward to every layer.

    Attributes:
        cu_seqlens: ``[D+1]`` int32, boundaries in the whole (gathered) pack.
        max_length: tokens of the longest document.
        padded_index: ``[D, max_length]`` int64 positions in the pack (0 where a document is shorter), or None.
        flat_index: ``[T]`` int64 positions in the flattened padded form, or None.
        mask: ``[1, 1, T, T]`` bool, who sees whom; or None.
        document: ``[T]`` int64, the document of each token.
    """

    kernel: str
    cu_seqlens: Tensor
    max_length: int
    document: Tensor
    padded_index: Tensor | None = None
    flat_index: Tensor | None = None
    mask: Tensor | None = None
    group: Any = None


def choose_kernel(requested: str, device_type: str, compute: str) -> str:
    """The kernel that ``requested`` means here; raises ``ConfigError`` when it cannot be had."""
    half = compute in ("bfloat16", "float16")
    if requested == "auto":
        return "varlen" if device_type == "cuda" and half else "sdpa"
    if requested not in KERNELS:
        raise ConfigError("model.attention", f"unknown kernel {requested!r}", remedy=f"auto, {', '.join(KERNELS)}")
    if requested == "varlen" and not (device_type == "cuda" and half):
        raise ConfigError("model.attention", f"varlen has no kernel for {compute} on {device_type}",
                          remedy="use sdpa, or precision.compute: bfloat16 on cuda")  # fmt: skip
    return requested


def check_heads(config: Any, ulysses: int) -> None:
    """Raise unless the model's heads can be split over ``ulysses`` ranks."""
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    fits = heads % ulysses == 0 and (kv_heads % ulysses == 0 or ulysses % kv_heads == 0)
    if not fits:
        raise ConfigError("parallelism.ulysses", f"{heads} heads and {kv_heads} KV heads cannot be split over {ulysses} ranks",
                          remedy="choose a divisor of the heads that divides, or is a multiple of, the KV heads")  # fmt: skip


def build_packing(lengths: list[int], kernel: str, device: torch.device, group: Any = None) -> Packing:
    """The packing of documents of these lengths."""
    cu = torch.tensor([0, *lengths]).cumsum(0)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    total, longest = int(cu[-1]), max(lengths)
    common: dict[str, Any] = {"kernel": kernel, "cu_seqlens": cu.to(device, torch.int32), "max_length": longest,
                              "document": document.to(device), "group": group}  # fmt: skip
    if kernel != "sdpa":
        return Packing(**common)
    if total * total <= len(lengths) * longest * longest:
        causal = torch.ones(total, total, dtype=torch.bool).tril()
        mask = causal & (document[:, None] == document[None, :])
        return Packing(**common, mask=mask[None, None].to(device))
    column = torch.arange(longest)
    inside = column[None, :] < torch.tensor(lengths)[:, None]
    padded = torch.where(inside, cu[:-1, None] + column[None, :], 0)
    flat = (document * longest + torch.arange(total) - cu[document]).to(device)
    return Packing(**common, padded_index=padded.to(device), flat_index=flat)


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    packing: Packing | None = None, scaling: float | None = None, dropout: float = 0.0,
    sliding_window: int | None = None, **extra: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The function registered with ``AttentionInterface``.

    Args:
        query: ``[1, H, T, d]``; key, value: ``[1, KV, T, d]`` (this rank's tokens under Ulysses).
        packing: given to the model's forward by the engine.

    Returns:
        ``[1, T, H, d]``, as transformers expects, and no weights.

    Raises:
        UnsupportedCapability: the layer asks for something that would silently be left out.
    """
    if packing is None:
        raise UnsupportedCapability("unpacked attention", where=NAME, remedy="call the model through its engine")
    unknown = sorted(n for n, v in extra.items() if v is not None and n not in _HARMLESS)
    if dropout or unknown:
        raise UnsupportedCapability(f"attention with {'dropout' if dropout else ', '.join(unknown)}", where=type(module).__name__,
                                    remedy="set attention_dropout: 0 in model.config_overrides, or use another engine")  # fmt: skip
    if packing.group is None:
        out = _attend(query, key, value, packing, scaling, sliding_window)
    else:
        size = torch.distributed.get_world_size(packing.group)
        if key.shape[1] < size:  # fewer KV heads than ranks: ranks share a head
            key, value = (x.repeat_interleave(size // x.shape[1], dim=1) for x in (key, value))
        q, k, v = (heads_to_sequence(x, packing.group) for x in (query, key, value))
        out = sequence_to_heads(_attend(q, k, v, packing, scaling, sliding_window), packing.group)
    return out.transpose(1, 2), None


# What transformers hands to every attention function and what does not change the result.
_HARMLESS = frozenset({"position_ids", "use_cache", "is_causal", "cache_position", "output_attentions", "past_key_values",
                       "return_dict", "output_router_logits", "position_embeddings"})  # fmt: skip


def _attend(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float | None, window: int | None) -> Tensor:
    """``[1, H, T, d]`` over all tokens of the pack."""
    if packing.kernel == "varlen":
        return _varlen(q, k, v, packing, scale, window)
    if packing.mask is not None or window is not None:
        mask = packing.mask if window is None else _window_mask(packing, window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    assert packing.padded_index is not None and packing.flat_index is not None
    q, k, v = (x[0][:, packing.padded_index].transpose(0, 1) for x in (q, k, v))  # [D, H, L, d]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(0, 1).flatten(1, 2)[:, packing.flat_index][None]


def _window_mask(packing: Packing, window: int) -> Tensor:
    position = torch.arange(packing.document.shape[0], device=packing.document.device)
    distance = position[:, None] - position[None, :]
    same = packing.document[:, None] == packing.document[None, :]
    return (same & (distance >= 0) & (distance < window))[None, None]


def _varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float | None, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if k.shape[1] != q.shape[1]:  # torch 2.11 has no GQA argument here
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [T, H, d]
    size = (-1 if window is None else window - 1, 0)
    out = varlen_attn(q, k, v, packing.cu_seqlens, packing.cu_seqlens, packing.max_length, packing.max_length,
                      scale=scale, window_size=size)  # fmt: skip
    assert isinstance(out, Tensor)
    return out.transpose(0, 1)[None]


def register() -> None:
    """Make the function known to transformers under ``NAME``."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)

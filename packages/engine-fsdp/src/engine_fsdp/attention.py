"""Attention over packed documents, registered with transformers' ``AttentionInterface``.

Tokens see only earlier tokens of their own document. Kernels (``model.attention``):

- ``sdpa``: PyTorch's scaled-dot-product attention, any device: documents side by side as a causal batch, or
  the whole pack under a block mask, whichever is less work;
- ``varlen``: ``torch.nn.attention.varlen`` (FlashAttention 2), CUDA, half precision;
- ``cudnn``: cuDNN by document (``engine_fsdp.cudnn``), CUDA of compute capability 9 or more, half precision;
- ``auto``: for each micro-batch, cudnn where documents are long enough to pay for it, else varlen; sdpa on the CPU
  and in float32. A plug-in may bring its device's own kernel (``register_kernel``), which is then preferred there.

Under Ulysses every kernel runs between two all-to-alls: heads are split over the ranks instead of tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from engine_api.devices import device_of
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_fsdp.cudnn import cudnn_packed
from engine_fsdp.parallel import heads_to_sequence, sequence_to_heads

NAME = "engine_fsdp_packed"
KERNELS = ("sdpa", "varlen", "cudnn")
# Below these lengths cuDNN's launches and plans cost more than its kernels gain (docs/benchmarks.md). A plan is made for each
# new length: where lengths differ, as those of answers do, few of them come again.
_CUDNN_EQUAL, _CUDNN_MEAN = 512, 8192

_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """The documents of one micro-batch; handed through the model's forward to every layer.

    Attributes:
        cu_seqlens: ``[D+1]`` int32, boundaries in the whole (gathered) pack.
        max_length: tokens of the longest document.
        padded_index: ``[D, max_length]`` int64 positions in the pack (0 where a document is shorter); None where
            documents have one length.
        flat_index: ``[T]`` int64 positions in the flattened padded form, or None.
        mask: ``[1, 1, T, T]`` bool, who sees whom; or None.
        document: ``[T]`` int64, the document of each token.
        bounds: ``[D+1]`` int64 on the CPU, the same as ``cu_seqlens``.
    """

    kernel: str
    cu_seqlens: Tensor
    max_length: int
    document: Tensor
    bounds: Tensor
    padded_index: Tensor | None = None
    flat_index: Tensor | None = None
    mask: Tensor | None = None
    group: Any = None


def choose_kernel(requested: str, device_type: str, compute: str) -> str:
    """What ``model.attention`` means here; raises ``ConfigError`` when it cannot be had.

    ``auto`` stays ``auto`` where the choice depends on each micro-batch.
    """
    own = device_of(device_type).attention(compute)
    if requested == "auto":
        return "auto" if "cudnn" in own else next(iter(own), "sdpa")
    known = dict.fromkeys((*KERNELS, *own))
    if requested not in known:
        raise ConfigError(
            "model.attention", f"unknown kernel {requested!r}", remedy=f"auto, {', '.join(known)}"
        )
    if requested == "cudnn" and "varlen" in own and "cudnn" not in own:
        raise ConfigError(
            "model.attention", "cudnn wants compute capability 9 or more", remedy="use varlen"
        )
    if requested not in ("sdpa", *own):
        raise ConfigError(
            "model.attention",
            f"{requested} has no kernel for {compute} on {device_type}",
            remedy=f"use {' or '.join(('sdpa', *own))}, or precision.compute: bfloat16 on a device that has it",
        )
    return requested


def _kernel_for(lengths: list[int], kernel: str) -> str:
    if kernel != "auto":
        return kernel
    equal = len(set(lengths)) == 1 and lengths[0] >= _CUDNN_EQUAL
    return "cudnn" if equal or sum(lengths) >= _CUDNN_MEAN * len(lengths) else "varlen"


def check_heads(config: Any, ulysses: int) -> None:
    """Raise unless the model's heads can be split over ``ulysses`` ranks."""
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    fits = heads % ulysses == 0 and (kv_heads % ulysses == 0 or ulysses % kv_heads == 0)
    if not fits:
        raise ConfigError(
            "parallelism.ulysses",
            f"{heads} heads and {kv_heads} KV heads cannot be split over {ulysses} ranks",
            remedy="choose a divisor of the heads that divides, or is a multiple of, the KV heads",
        )


def build_packing(
    lengths: list[int], kernel: str, device: torch.device, group: Any = None
) -> Packing:
    """The packing of documents of these lengths."""
    cu = torch.tensor([0, *lengths]).cumsum(0)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    total, longest = int(cu[-1]), max(lengths)
    kernel = _kernel_for(lengths, kernel)
    common: dict[str, Any] = {
        "kernel": kernel,
        "bounds": cu,
        "cu_seqlens": cu.to(device, torch.int32),
        "max_length": longest,
        "document": document.to(device),
        "group": group,
    }
    if kernel != "sdpa" or len(set(lengths)) == 1:
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
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """The function registered with ``AttentionInterface``.

    Args:
        query: ``[1, H, T, d]``; key, value: ``[1, KV, T, d]`` (this rank's tokens under Ulysses).
        attention_mask: always None; transformers makes no mask for a kernel that it does not know.
        packing: given to the model's forward by the engine.

    Returns:
        ``[1, T, H, d]``, as transformers expects, and no weights.

    Raises:
        UnsupportedCapability: the layer asks for something that would silently be left out.
    """
    if packing is None or attention_mask is not None:
        raise UnsupportedCapability(
            "unpacked attention", where=NAME, remedy="call the model through its engine"
        )
    _refuse_left_out(module, dropout, extra)
    if packing.group is None:
        out = _attend(query, key, value, packing, scaling, sliding_window)
    else:
        size = torch.distributed.get_world_size(packing.group)
        if key.shape[1] < size:  # fewer KV heads than ranks: ranks share a head
            key, value = (x.repeat_interleave(size // x.shape[1], dim=1) for x in (key, value))
        q, k, v = (heads_to_sequence(x, packing.group) for x in (query, key, value))
        out = sequence_to_heads(_attend(q, k, v, packing, scaling, sliding_window), packing.group)
    return out.transpose(1, 2).contiguous(), None  # some families view it in another shape


def _refuse_left_out(module: nn.Module, dropout: float, extra: dict[str, Any]) -> None:
    if dropout:
        raise UnsupportedCapability(
            "attention with dropout",
            where=type(module).__name__,
            remedy="set its rate to 0 in model.config_overrides",
        )
    unknown = sorted(n for n, v in extra.items() if v is not None and n not in _HARMLESS)
    if extra.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unknown = ["tokens that look ahead: it is not causal"]
    if unknown:
        raise UnsupportedCapability(
            f"attention with {', '.join(unknown)}",
            where=type(module).__name__,
            why="its kernels would leave that out",
            remedy="use another engine for this model family",
        )


# What transformers hands to every attention function and what does not change the result.
_HARMLESS = frozenset(
    {
        "position_ids",
        "use_cache",
        "is_causal",
        "cache_position",
        "output_attentions",
        "past_key_values",
        "return_dict",
        "output_router_logits",
        "position_embeddings",
    }
)


Kernel = Callable[[Tensor, Tensor, Tensor, Packing, float | None, int | None], Tensor]
_ADDED: dict[str, Kernel] = {}


def register_kernel(name: str, kernel: Kernel) -> None:
    """Make another device's kernel known under a name that its ``Device.attention`` gives.

    It is called with queries ``[1, H, T, d]``, keys and values ``[1, KV, T, d]`` of all tokens of the pack, the packing, the
    scale (None: ``d ** -0.5``) and the window (None: none), and returns ``[1, H, T, d]``, with a gradient.
    """
    _ADDED[name] = kernel


def _attend(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float | None, window: int | None
) -> Tensor:
    """``[1, H, T, d]`` over all tokens of the pack."""
    if packing.kernel in _ADDED:
        return _ADDED[packing.kernel](q, k, v, packing, scale, window)
    if packing.kernel == "cudnn" and window is None:
        parts = (x[0].transpose(0, 1) for x in (q, k, v))
        out, _ = cudnn_packed(*parts, packing.bounds, scale or q.shape[-1] ** -0.5)
        return out.transpose(0, 1)[None]
    if packing.kernel in ("varlen", "cudnn"):  # cuDNN has no window here
        return _varlen(q, k, v, packing, scale, window)
    if packing.mask is not None or window is not None:
        mask = packing.mask if window is None else _window_mask(packing, window)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    q, k, v = (_side_by_side(x[0], packing) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    flat = out.transpose(0, 1).flatten(1, 2)
    return (flat if packing.flat_index is None else flat[:, packing.flat_index])[None]


def _side_by_side(x: Tensor, packing: Packing) -> Tensor:
    """``[H, T, d]`` → ``[D, H, max_length, d]``; a view where all documents have one length."""
    if packing.padded_index is None:
        return x.unflatten(1, (-1, packing.max_length)).transpose(0, 1)
    return x[:, packing.padded_index].transpose(0, 1)


def _window_mask(packing: Packing, window: int) -> Tensor:
    position = torch.arange(packing.document.shape[0], device=packing.document.device)
    distance = position[:, None] - position[None, :]
    same = packing.document[:, None] == packing.document[None, :]
    return (same & (distance >= 0) & (distance < window))[None, None]


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float | None, window: int | None
) -> Tensor:
    grouped: dict[str, Any] = (
        {"enable_gqa": True} if _HAS_GQA else {}
    )  # before 2.13 unequal heads are simply accepted
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [T, H, d]
    size = (-1 if window is None else window - 1, 0)
    out = varlen_attn(
        q,
        k,
        v,
        packing.cu_seqlens,
        packing.cu_seqlens,
        packing.max_length,
        packing.max_length,
        scale=scale,
        window_size=size,
        **grouped,
    )
    assert isinstance(out, Tensor)
    return out.transpose(0, 1)[None]


def register() -> None:
    """Make the function known to transformers under ``NAME``."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)

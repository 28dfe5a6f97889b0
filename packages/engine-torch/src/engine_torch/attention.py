"""Attention over packed documents, registered with transformers' ``AttentionInterface``.

A token attends to itself and to earlier tokens of its own document. Kernels (``model.attention``):

- ``sdpa``: PyTorch's scaled-dot-product attention, on any device. It runs the documents as a causal
  batch with padding, or the whole pack under a block mask, whichever is less work.
- ``varlen``: ``torch.nn.attention.varlen`` (FlashAttention 2), on CUDA in half precision.
- ``cudnn``: cuDNN document by document (``engine_torch.cudnn``), on CUDA of compute capability 9 or
  more in half precision.
- ``auto``: for each micro-batch, cudnn where the documents are long enough to pay for it, else
  varlen. On the CPU and in float32, sdpa. A plug-in may register its device's own kernel
  (``register_kernel``), which ``auto`` then prefers on that device.

Under Ulysses every kernel runs between two all-to-alls, which split heads over the ranks instead of
tokens. Under context parallelism each rank gathers the keys and values, for sdpa or varlen
(``engine_torch.context``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from engine_api.devices import device_of
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_torch.context import GROUPED, Context, build_context
from engine_torch.cudnn import cudnn_packed
from engine_torch.ulysses import heads_to_sequence, sequence_to_heads

NAME = "engine_torch_packed"
KERNELS = ("sdpa", "varlen", "cudnn")

# Below these lengths cuDNN's launches and plans cost more than its kernels gain
# (docs/benchmarks.md). cuDNN makes a plan for each new length, and where lengths differ, as those
# of completions do, few repeat. The first is for documents of equal length, the second for the mean
# length of documents of any length.
_CUDNN_EQUAL = 512
_CUDNN_MEAN = 8192


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """The documents of one micro-batch, passed through the model's forward to every layer.

    Attributes:
        kernel: name of the kernel that computes this micro-batch's attention.
        cu_seqlens: ``[D+1]`` int32, boundaries in the whole (gathered) pack.
        max_length: tokens of the longest document.
        document: ``[T]`` int64, index of each token's document.
        bounds: ``[D+1]`` int64 on the CPU, the same as ``cu_seqlens``.
        padded_index: ``[D, max_length]`` int64 positions in the pack (0 where a document is
            shorter). None where the documents are equally long.
        flat_index: ``[T]`` int64 positions in the flattened padded form, or None.
        mask: ``[1, 1, T, T]`` bool, true where a query (row) attends to a key (column), or None.
        group: process group of Ulysses, or None.
        context: this rank's part of the pack under context parallelism, or None.
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
    context: Context | None = None


def choose_kernel(requested: str, device_type: str, compute: str) -> str:
    """Return the kernel that ``model.attention`` selects on this device and in this compute dtype.

    ``auto`` stays ``auto`` where the choice depends on each micro-batch.

    Raises:
        ConfigError: the kernel is unknown, or does not run on this device or in this dtype.
    """
    own = device_of(device_type).attention(compute)
    if requested == "auto":
        return "auto" if "cudnn" in own else next(iter(own), "sdpa")
    known = dict.fromkeys((*KERNELS, *own))
    if requested not in known:
        raise ConfigError(
            "model.attention",
            f"unknown kernel {requested!r}",
            remedy=f"use one of: auto, {', '.join(known)}",
        )
    if requested == "cudnn" and "varlen" in own and "cudnn" not in own:
        raise ConfigError(
            "model.attention", "cudnn needs compute capability 9 or more", remedy="use varlen"
        )
    available = ("sdpa", *own)
    if requested not in available:
        raise ConfigError(
            "model.attention",
            f"{requested} has no kernel for {compute} on {device_type}",
            remedy=f"use {' or '.join(available)}, "
            "or precision.compute: bfloat16 on a device that has it",
        )
    return requested


def _select_kernel(lengths: list[int], kernel: str) -> str:
    """Return the kernel for one micro-batch, given the lengths of its documents."""
    if kernel != "auto":
        return kernel
    equal = len(set(lengths)) == 1 and lengths[0] >= _CUDNN_EQUAL
    return "cudnn" if equal or sum(lengths) >= _CUDNN_MEAN * len(lengths) else "varlen"


def check_heads(config: Any, ulysses: int) -> None:
    """Raise ``ConfigError`` unless the model's heads can be split over ``ulysses`` ranks."""
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    kv_heads_fit = kv_heads % ulysses == 0 or ulysses % kv_heads == 0
    if heads % ulysses or not kv_heads_fit:
        raise ConfigError(
            "parallelism.ulysses",
            f"{heads} heads and {kv_heads} KV heads cannot be split over {ulysses} ranks",
            remedy="choose a divisor of the heads that divides, or is a multiple of, the KV heads",
        )


def build_packing(
    lengths: list[int], kernel: str, device: torch.device, group: Any = None
) -> Packing:
    """Build the packing of documents of these lengths (tokens).

    Where ``kernel`` is sdpa and lengths differ, the packing also holds a mask or the indices of a
    padded form.
    """
    cu = torch.tensor([0, *lengths]).cumsum(0)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    total = int(cu[-1])
    longest = max(lengths)
    kernel = _select_kernel(lengths, kernel)
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


def build_context_packing(
    lengths: list[int],
    kernel: str,
    device: torch.device,
    *,
    group: Any,
    parts: int,
    part: int,
) -> Packing:
    """Build the packing of one part of a pack under context parallelism (see ``build_context``).

    ``auto`` is varlen, because cuDNN's kernel takes whole documents.
    """
    kernel = "varlen" if kernel == "auto" else kernel
    context = build_context(lengths, kernel, device, group=group, parts=parts, part=part)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Packing(
        kernel=kernel,
        bounds=cu,
        cu_seqlens=cu.to(device, torch.int32),
        max_length=max(lengths),
        document=document.to(device),
        context=context,
    )


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
    """Compute attention within documents, as the function registered with ``AttentionInterface``.

    Args:
        module: the attention layer, named in errors.
        query: ``[1, H, T, d]``, under Ulysses and context parallelism of this rank's tokens.
        key: ``[1, KV, T, d]``.
        value: ``[1, KV, T, d]``.
        attention_mask: always None, since transformers makes no mask for a kernel that it does not
            know.
        packing: the documents, which the engine gives to the model's forward.
        scaling: factor of the scores (None: ``d ** -0.5``).
        dropout: rate of dropout, which must be 0.
        sliding_window: number of tokens that a token attends to, itself included (None: no window).
        **extra: further arguments of transformers; those that would change the result are refused.

    Returns:
        ``[1, T, H, d]``, as transformers expects, and None for the attention weights.

    Raises:
        UnsupportedCapability: the layer asks for something that the kernels would silently leave
            out.
    """
    if packing is None or attention_mask is not None:
        raise UnsupportedCapability(
            "unpacked attention", where=NAME, remedy="call the model through its engine"
        )
    _refuse_left_out(module, dropout, extra)
    if packing.context is not None:
        if sliding_window is not None:
            raise UnsupportedCapability(
                "a sliding window under context parallelism",
                where=type(module).__name__,
                remedy="set parallelism.cp: 1 for this model",
            )
        out = packing.context.attend(query, key, value, scaling)
    elif packing.group is None:
        out = _attend(query, key, value, packing, scaling, sliding_window)
    else:
        size = torch.distributed.get_world_size(packing.group)
        # With fewer KV heads than ranks, several ranks share a head.
        if key.shape[1] < size:
            key, value = (x.repeat_interleave(size // x.shape[1], dim=1) for x in (key, value))
        q, k, v = (heads_to_sequence(x, packing.group) for x in (query, key, value))
        attended = _attend(q, k, v, packing, scaling, sliding_window)
        out = sequence_to_heads(attended, packing.group)
    # Contiguous, because some families view the result in another shape.
    return out.transpose(1, 2).contiguous(), None


def _refuse_left_out(module: nn.Module, dropout: float, extra: dict[str, Any]) -> None:
    """Raise ``UnsupportedCapability`` for arguments that the kernels would leave out."""
    if dropout:
        raise UnsupportedCapability(
            "attention with dropout",
            where=type(module).__name__,
            remedy="set its rate to 0 in model.config_overrides",
        )
    unknown = sorted(n for n, v in extra.items() if v is not None and n not in _HARMLESS)
    if extra.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unknown = ["attention to later tokens (not causal)"]
    if unknown:
        raise UnsupportedCapability(
            f"attention with {', '.join(unknown)}",
            where=type(module).__name__,
            why="its kernels would leave that out",
            remedy="use another engine for this model family",
        )


# Arguments that transformers passes to every attention function, and that do not change the result.
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
    """Register another device's kernel under a name that its ``Device.attention`` returns.

    The kernel is called with queries ``[1, H, T, d]``, keys and values ``[1, KV, T, d]`` of all
    tokens of the pack, the packing, the scale (None: ``d ** -0.5``) and the window (None: no
    window). It returns ``[1, H, T, d]`` and must be differentiable.
    """
    _ADDED[name] = kernel


def _attend(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float | None, window: int | None
) -> Tensor:
    """Return the attention ``[1, H, T, d]`` over all tokens of the pack."""
    if packing.kernel in _ADDED:
        return _ADDED[packing.kernel](q, k, v, packing, scale, window)
    if packing.kernel == "cudnn" and window is None:
        parts = (x[0].transpose(0, 1) for x in (q, k, v))
        out, _ = cudnn_packed(*parts, packing.bounds, scale or q.shape[-1] ** -0.5)
        return out.transpose(0, 1)[None]
    # The cuDNN path has no window, so layers with one run on varlen.
    if packing.kernel in ("varlen", "cudnn"):
        return _varlen(q, k, v, packing, scale, window)
    if packing.mask is not None or window is not None:
        mask = packing.mask if window is None else _window_mask(packing, window)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    q, k, v = (_batch_documents(x[0], packing) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    flat = out.transpose(0, 1).flatten(1, 2)
    if packing.flat_index is not None:
        flat = flat[:, packing.flat_index]
    return flat[None]


def _batch_documents(x: Tensor, packing: Packing) -> Tensor:
    """Return ``[H, T, d]`` as a batch of documents ``[D, H, max_length, d]``.

    The result is a view where the documents are equally long.
    """
    if packing.padded_index is None:
        return x.unflatten(1, (-1, packing.max_length)).transpose(0, 1)
    return x[:, packing.padded_index].transpose(0, 1)


def _window_mask(packing: Packing, window: int) -> Tensor:
    """Build the mask ``[1, 1, T, T]`` of a sliding window inside each document."""
    position = torch.arange(packing.document.shape[0], device=packing.document.device)
    distance = position[:, None] - position[None, :]
    same = packing.document[:, None] == packing.document[None, :]
    return (same & (distance >= 0) & (distance < window))[None, None]


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float | None, window: int | None
) -> Tensor:
    """Return the attention ``[1, H, T, d]`` by ``torch.nn.attention.varlen``."""
    # The kernel takes [T, H, d].
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
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
        **GROUPED,
    )
    assert isinstance(out, Tensor)
    return out.transpose(0, 1)[None]


def register() -> None:
    """Register ``packed_attention`` with transformers under ``NAME``."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)

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

- ``flex``: ``flex_attention``, which ``auto`` chooses for documents that share their beginnings
  (``engine_torch.prefixes``), where it would choose varlen or cudnn without them. sdpa computes
  them under a mask of the whole pack.

What these kernels lack is computed by others, whichever of them is chosen:

- capped scores and sinks: in plain PyTorch under ``sdpa`` (``engine_torch.plain``); else by
  flex_attention (``engine_torch.flex``) and by FlashAttention 2 with a correction
  (``engine_torch.varlen``).
- values of another width than the keys, and heads wider than 256, which FlashAttention 2 does not
  take: padded with zeros, and by sdpa on batches of documents.

Under Ulysses every kernel runs between two all-to-alls, which split heads over the ranks instead of
tokens. Under context parallelism each rank gathers the keys and values, for sdpa or varlen
(``engine_torch.context``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.utils.rnn import pad_sequence

from engine_api.config import EngineConfig
from engine_api.devices import device_of, move_tensor
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_torch.context import GROUPED, Context, build_context
from engine_torch.cudnn import cudnn_packed
from engine_torch.flex import capped_attention, tree_attention
from engine_torch.mixers import DOCUMENTS, group_by_length
from engine_torch.plain import plain_packed
from engine_torch.prefixes import FLEX, mask_of, refuse_unshared, refuse_with
from engine_torch.ulysses import heads_to_sequence, sequence_to_heads
from engine_torch.varlen import varlen_with_sinks

NAME = "engine_torch_packed"
MASKED = "engine_torch_masked"
"""Name of the attention for layers that need a mask, ``[T, T]``, to select tokens by it."""
KERNELS = ("sdpa", "varlen", "cudnn")

# Below these lengths cuDNN's launches and plans cost more than its kernels gain
# (docs/benchmarks.md). cuDNN makes a plan for each new length, and where lengths differ, as those
# of completions do, few repeat. The first is for documents of equal length, the second for the mean
# length of documents of any length.
_CUDNN_EQUAL = 512
_CUDNN_MEAN = 8192

# Widest heads that FlashAttention 2 takes.
VARLEN_WIDTH = 256


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
        blocks: ``[T]`` int64, the number of the image to whose tokens each token attends in both
            directions, -1 for none, or None where all attention is causal.
        group: process group of Ulysses, or None.
        context: this rank's part of the pack under context parallelism, or None.
        ends: ``[T]`` int64, the index behind the last token that may attend to each token, where
            documents share their beginnings (``engine_torch.prefixes``), or None. The other
            attributes then take the whole pack for one document.
    """

    kernel: str
    cu_seqlens: Tensor
    max_length: int
    document: Tensor
    bounds: Tensor
    padded_index: Tensor | None = None
    flat_index: Tensor | None = None
    mask: Tensor | None = None
    blocks: Tensor | None = None
    group: Any = None
    context: Context | None = None
    ends: Tensor | None = None


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


def choose_kernel_of_trees(config: EngineConfig, kernel: str) -> str:
    """Return the kernel for documents that share their beginnings.

    ``kernel`` is what ``choose_kernel`` returned.

    Raises ``ConfigError`` or ``UnsupportedCapability`` for a setting that excludes them.
    """
    refuse_with(config, kernel, registered=kernel in _ADDED)
    return kernel if kernel == "sdpa" else FLEX


def _select_kernel(lengths: list[int], kernel: str) -> str:
    """Return the kernel for one micro-batch, given the lengths of its documents."""
    if kernel != "auto":
        return kernel
    equal = len(set(lengths)) == 1 and lengths[0] >= _CUDNN_EQUAL
    return "cudnn" if equal or sum(lengths) >= _CUDNN_MEAN * len(lengths) else "varlen"


def check_heads(config: Any, ulysses: int) -> None:
    """Raise ``ConfigError`` unless the model's heads can be split over ``ulysses`` ranks."""
    # Layers may have other numbers than the model as a whole.
    varies = getattr(config, "is_heterogeneous", False)
    for layer in config.per_layer_config if varies else [config]:
        _check_heads_of(layer, ulysses)


def _check_heads_of(config: Any, ulysses: int) -> None:
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        # A model without attention.
        return
    heads = int(heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    kv_heads_fit = kv_heads % ulysses == 0 or ulysses % kv_heads == 0
    if heads % ulysses or not kv_heads_fit:
        raise ConfigError(
            "parallelism.ulysses",
            f"{heads} heads and {kv_heads} KV heads cannot be split over {ulysses} ranks",
            remedy="choose a divisor of the heads that divides, or is a multiple of, the KV heads",
        )


def build_packing(
    lengths: list[int],
    kernel: str,
    device: torch.device,
    group: Any = None,
    blocks: Tensor | None = None,
) -> Packing:
    """Build the packing of documents of these lengths (tokens).

    Where ``kernel`` is sdpa and lengths differ, the packing also holds a mask or the indices of a
    padded form. Where tokens of ``blocks`` attend in both directions, the kernel is sdpa under a
    mask.
    """
    cu = torch.tensor([0, *lengths]).cumsum(0)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    total = int(cu[-1])
    longest = max(lengths)
    kernel = _select_kernel(lengths, kernel) if blocks is None else "sdpa"
    there = move_tensor(document, device)
    common: dict[str, Any] = {
        "kernel": kernel,
        "bounds": cu,
        "cu_seqlens": move_tensor(cu.int(), device),
        "max_length": longest,
        "document": there,
        "group": group,
    }
    # Masks are computed on the device: one of 24,576 tokens has 0.6 GB.
    if blocks is not None:
        blocks = move_tensor(blocks, device)
        same = (blocks[:, None] == blocks[None, :]) & (blocks[:, None] >= 0)
        earlier = torch.ones(total, total, dtype=torch.bool, device=device).tril()
        visible = (earlier | same) & (there[:, None] == there[None, :])
        return Packing(**common, mask=visible[None, None], blocks=blocks)
    if kernel != "sdpa" or len(set(lengths)) == 1:
        return Packing(**common)
    if total * total <= len(lengths) * longest * longest:
        causal = torch.ones(total, total, dtype=torch.bool, device=device).tril()
        mask = causal & (there[:, None] == there[None, :])
        return Packing(**common, mask=mask[None, None])
    column = torch.arange(longest)
    inside = column[None, :] < torch.tensor(lengths)[:, None]
    padded = torch.where(inside, cu[:-1, None] + column[None, :], 0)
    flat = move_tensor(document * longest + torch.arange(total) - cu[document], device)
    return Packing(**common, padded_index=move_tensor(padded, device), flat_index=flat)


def build_tree_packing(ends: Tensor, kernel: str, device: torch.device) -> Packing:
    """Build the packing of documents that share their beginnings.

    Args:
        ends: ``[S]`` int64 on the CPU, as in ``engine_torch.prefixes.PrefixTree``.
        kernel: ``sdpa`` or ``flex``.
        device: device of the tensors.
    """
    bounds = torch.tensor([0, len(ends)])
    ends = move_tensor(ends, device)
    return Packing(
        kernel=kernel,
        bounds=bounds,
        cu_seqlens=move_tensor(bounds.int(), device),
        max_length=len(ends),
        document=torch.zeros_like(ends),
        mask=mask_of(ends) if kernel == "sdpa" else None,
        ends=ends,
    )


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
        cu_seqlens=move_tensor(cu.int(), device),
        max_length=max(lengths),
        document=move_tensor(document, device),
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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Compute attention within documents, as the function registered with ``AttentionInterface``.

    Args:
        module: the attention layer, named in errors.
        query: ``[1, H, T, d]``, under Ulysses and context parallelism of this rank's tokens.
        key: ``[1, KV, T, d]``.
        value: ``[1, KV, T, e]``, where e may differ from d.
        attention_mask: always None, since transformers makes no mask for a kernel that it does not
            know.
        packing: the documents, which the engine gives to the model's forward. None where a family
            does not pass them on; ``module`` has them then.
        scaling: factor of the scores (None: ``d ** -0.5``).
        dropout: rate of dropout, which must be 0.
        sliding_window: number of tokens that a token attends to, itself included (None: no window).
        softcap: bound of the scaled scores (None: no cap).
        s_aux: score of each head's attention sink, ``[H]`` of all heads (None: no sinks).
        **extra: further arguments of transformers; those that would change the result are refused.

    Returns:
        ``[1, T, H, e]``, as transformers expects, and None for the attention weights.

    Raises:
        UnsupportedCapability: the layer asks for something that the kernels would silently leave
            out.
    """
    if packing is None:
        # Some families do not pass it on to their attention.
        packing = getattr(getattr(module, DOCUMENTS, None), "packing", None)
    if packing is None:
        raise UnsupportedCapability(
            "unpacked attention", where=NAME, remedy="call the model through its engine"
        )
    if attention_mask is not None:
        raise UnsupportedCapability(
            "attention_mask",
            where=type(module).__name__,
            why="the family makes a mask of its own, which the kernels would leave out",
            remedy="use another backend for this model family",
        )
    _refuse_left_out(module, dropout, extra)
    scores = _Scores(scale=scaling, window=sliding_window, cap=softcap or None, sinks=s_aux)
    if packing.ends is not None:
        special = {"a sliding window": sliding_window, "softcap": scores.cap, "sinks": s_aux}
        refuse_unshared(module, special)
    if packing.context is not None:
        _refuse_in_context(module, scores)
        out = packing.context.attend(query, key, value, scaling)
    elif packing.group is None:
        out = _attend(query, key, value, packing, scores)
    else:
        size = torch.distributed.get_world_size(packing.group)
        if s_aux is not None:
            own = s_aux.chunk(size)[torch.distributed.get_rank(packing.group)]
            scores = replace(scores, sinks=own)
        # With fewer KV heads than ranks, several ranks share a head.
        if key.shape[1] < size:
            key, value = (x.repeat_interleave(size // x.shape[1], dim=1) for x in (key, value))
        q, k, v = (heads_to_sequence(x, packing.group) for x in (query, key, value))
        attended = _attend(q, k, v, packing, scores)
        out = sequence_to_heads(attended, packing.group)
    # Contiguous, because some families view the result in another shape.
    return out.transpose(1, 2).contiguous(), None


def _refuse_in_context(module: nn.Module, scores: _Scores) -> None:
    """Raise ``UnsupportedCapability`` for a layer that a part of a pack cannot be computed with."""
    asked = {
        "a sliding window": scores.window is not None,
        "softcap": scores.cap is not None,
        "sinks": scores.sinks is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise UnsupportedCapability(
                f"{name} under context parallelism",
                where=type(module).__name__,
                why="the attention to gathered keys and values has no such thing",
                remedy="set parallelism.cp: 1 for this model",
            )


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
        "output_hidden_states",
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scores:
    """Treatment of the scores of a layer's queries and keys.

    Attributes:
        scale: their factor (None: ``d ** -0.5``).
        window: number of tokens that a token attends to, itself included (None: no window).
        cap: bound of the scaled scores (None: no cap).
        sinks: score of each head's sink ``[H]``, of the heads of this call (None: no sinks).
    """

    scale: float | None
    window: int | None
    cap: float | None = None
    sinks: Tensor | None = None


def _attend(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scores: _Scores) -> Tensor:
    """Return the attention ``[1, H, T, e]`` over all tokens of the pack."""
    scale, window = scores.scale, scores.window
    if packing.kernel in _ADDED:
        _refuse_special(packing.kernel, scores)
        return _ADDED[packing.kernel](q, k, v, packing, scale, window)
    if packing.kernel == FLEX:
        return tree_attention(q, k, v, packing, scale)
    if packing.kernel != "sdpa":
        return _attend_fused(q, k, v, packing, scores)
    if scores.cap is not None or scores.sinks is not None:
        _refuse_special_in_blocks(packing, scores)
        return _attend_plain(q, k, v, packing, scores)
    if q.shape[-1] != v.shape[-1] and torch.compiler.is_compiling():
        # torch 2.13's compiler fails on values of another width than the keys.
        own = v.shape[-1]
        width = max(q.shape[-1], own)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        return _attend(q, k, v, packing, replace(scores, scale=scale))[..., :own]
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


def _refuse_special_in_blocks(packing: Packing, scores: _Scores) -> None:
    """Raise ``UnsupportedCapability`` for a cap or sinks beside images seen in both directions."""
    if packing.blocks is None:
        return
    raise UnsupportedCapability(
        "softcap" if scores.cap is not None else "sinks",
        where="image tokens that attend in both directions",
        why="its kernel is causal",
        remedy="use another backend for this model family",
    )


def _refuse_special(kernel: str, scores: _Scores) -> None:
    """Raise ``UnsupportedCapability`` for a cap or sinks, which a registered kernel leaves out."""
    asked = {"softcap": scores.cap, "sinks": scores.sinks}
    for name, value in asked.items():
        if value is not None:
            raise UnsupportedCapability(
                name,
                where=f"model.attention: {kernel}",
                why="its kernel would leave that out",
                remedy="use model.attention: sdpa",
            )


def _attend_fused(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scores: _Scores) -> Tensor:
    """Return the attention ``[1, H, T, e]`` by a kernel of CUDA in half precision."""
    window = scores.window
    width = max(q.shape[-1], v.shape[-1])
    if scores.cap is not None and scores.sinks is not None:
        # No family asks for both.
        return _attend_plain(q, k, v, packing, scores)
    if scores.cap is not None:
        return capped_attention(q, k, v, packing, scores.scale, window, scores.cap)
    scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    if width > VARLEN_WIDTH:
        if scores.sinks is not None:
            return _attend_plain(q, k, v, packing, scores)
        return _attend_by_document(q, k, v, packing, scale, window)
    same = q.shape[-1] == v.shape[-1]
    if packing.kernel == "cudnn" and window is None and scores.sinks is None and same:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out, _ = cudnn_packed(q, k, v, packing.bounds, scale)
        return out.transpose(0, 1)[None]
    # The cuDNN path has no window, no sinks and one width, so other layers run on varlen.
    if not same:
        own = v.shape[-1]
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        return _varlen(q, k, v, packing, replace(scores, scale=scale))[..., :own]
    return _varlen(q, k, v, packing, scores)


def _attend_plain(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scores: _Scores) -> Tensor:
    """Return the attention ``[1, H, T, e]`` by ``engine_torch.plain``."""
    scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    cap, window = scores.cap or 0.0, scores.window or 0
    out, _ = plain_packed(q, k, v, scores.sinks, packing.bounds, scale, cap, window)
    return out.transpose(0, 1)[None]


# Compiled, every other set of lengths would be compiled anew.
@torch.compiler.disable()
def _attend_by_document(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int | None
) -> Tensor:
    """Return the attention ``[1, H, T, e]`` by sdpa, documents of about one length at a time.

    Shorter ones end with padding, which no earlier token attends to.
    """
    lengths: list[int] = packing.bounds.diff().tolist()
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        # The kernel of sdpa that takes any width takes no fewer heads of keys than of queries.
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    # [L, H, d] of each document.
    parts = [x[0].transpose(0, 1).split(lengths) for x in (q, k, v)]
    out: list[Tensor] = list(parts[2])
    for numbers in group_by_length(lengths):
        query, key, value = (
            pad_sequence([part[number] for number in numbers], batch_first=True).transpose(1, 2)
            for part in parts
        )
        mask = None
        if window is not None and query.shape[2] > window:
            position = torch.arange(query.shape[2], device=q.device)
            distance = position[:, None] - position[None, :]
            mask = (distance >= 0) & (distance < window)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale
        )
        for row, number in enumerate(numbers):
            out[number] = attended[row, :, : lengths[number]].transpose(0, 1)
    return torch.cat(out).transpose(0, 1)[None]


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
    visible = distance >= 0
    if packing.blocks is not None:
        blocks = packing.blocks
        visible |= (blocks[:, None] == blocks[None, :]) & (blocks[:, None] >= 0)
    same = packing.document[:, None] == packing.document[None, :]
    return (same & visible & (distance < window))[None, None]


def _varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scores: _Scores) -> Tensor:
    """Return the attention ``[1, H, T, d]`` by FlashAttention 2."""
    window = scores.window
    # The kernel takes [T, H, d].
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    if scores.sinks is not None:
        scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
        out, _ = varlen_with_sinks(
            q, k, v, scores.sinks, packing.cu_seqlens, packing.max_length, scale, window or 0
        )
        return out.transpose(0, 1)[None]
    size = (-1 if window is None else window - 1, 0)
    out = varlen_attn(
        q,
        k,
        v,
        packing.cu_seqlens,
        packing.cu_seqlens,
        packing.max_length,
        packing.max_length,
        scale=scores.scale,
        window_size=size,
        **GROUPED,
    )
    assert isinstance(out, Tensor)
    return out.transpose(0, 1)[None]


def masked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    indices: Tensor | None = None,
    s_aux: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Compute attention under a mask that transformers made, as the function named ``MASKED``.

    transformers sees the documents in the positions, which begin anew with each, and its mask holds
    documents, causality and windows. It takes memory for each pair of tokens of the pack.

    Args:
        module: the attention layer, named in errors.
        query: ``[1, H, T, d]``.
        key: ``[1, KV, T, d]``.
        value: ``[1, KV, T, e]``.
        attention_mask: ``[1, 1, T, T]`` bool, true where a query (row) may attend to a key.
        scaling: factor of the scores (None: ``d ** -0.5``).
        dropout: rate of dropout, which must be 0.
        sliding_window: window of the layer, which the mask holds already.
        indices: ``[1, T, k]`` keys that each query has selected (None: all). Where fewer are
            visible, some of them are not, and stay hidden.
        s_aux: score of each head's attention sink ``[H]`` (None: no sinks).
        **extra: further arguments of transformers; those that would change the result are refused.
    """
    del sliding_window
    packing = extra.pop("packing", None)
    if packing is not None:
        refuse_unshared(module, {"a selection of tokens": packing.ends})
    _refuse_left_out(module, dropout, extra)
    if indices is not None:
        selected = torch.zeros_like(attention_mask[:, 0]).scatter(-1, indices.long(), value=True)
        attention_mask = attention_mask & selected[:, None]
    if s_aux is None:
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=grouped
        )
        return out.transpose(1, 2).contiguous(), None
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~attention_mask, -torch.inf)
    column = s_aux[None, :, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, column.to(scores.dtype)], dim=-1).float().softmax(-1)
    out = weights[..., :-1].to(value.dtype) @ value
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Register the attention functions with transformers under ``NAME`` and ``MASKED``."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def make_mask(*arguments: Any, **options: Any) -> Any:
        # Left out, a mask could not be combined with a selection of tokens.
        return sdpa_mask(*arguments, **{**options, "allow_is_causal_skip": False})

    AttentionInterface.register(NAME, packed_attention)
    AttentionInterface.register(MASKED, masked_attention)
    AttentionMaskInterface.register(MASKED, make_mask)

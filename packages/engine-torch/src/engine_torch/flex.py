"""Attention on CUDA by ``torch.nn.attention.flex_attention``: capped, or of trees of documents.

The kernel is compiled once for each cap, kind of mask and head size. Blocks of the mask in which
no query has a key are never computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

__all__ = ["capped_attention", "tree_attention"]

# The kernel has an entry for each cap, scale, head size and dtype that a process has met, with and
# without gradients: a bound of eight, torch's own, ends a process that builds several models.
_ENTRIES = 64
# Masks by packing (which lives as long as its micro-batch) and window, because every layer needs
# one and there are at most two kinds of layers.
_MASKS: WeakKeyDictionary[Any, dict[int | None, BlockMask]] = WeakKeyDictionary()


@cache
def _compiled(function: Callable[..., Any], *, dynamic: bool | None) -> Callable[..., Any]:
    # Whole, because a part of it that is not compiled would compute all scores at once.
    return torch.compile(function, dynamic=dynamic, fullgraph=True)


@cache
def _cap_of(cap: float) -> Callable[..., Tensor]:
    """Return the function that caps a score. It is the same object for each call with a cap."""

    def limit(score: Tensor, *_: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    return limit


def _sees(packing: Any, window: int | None) -> Callable[..., Tensor]:
    """Return the function that tells whether a query attends to a key."""
    document: Tensor = packing.document
    ends: Tensor | None = packing.ends

    def in_document(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document[query] == document[key])

    if ends is not None:

        def in_tree(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (query < ends[key])

        return in_tree
    if window is None:
        return in_document

    def in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return in_document(batch, head, query, key) & (query - key < window)

    return in_window


def _mask_of(packing: Any, window: int | None) -> BlockMask:
    """Return the mask of documents, of causality and of a window, made once for a micro-batch."""
    masks = _MASKS.setdefault(packing, {})
    if window not in masks:
        document: Tensor = packing.document
        is_seen = _sees(packing, window)
        tokens = document.shape[0]
        # Compiled, because plain it makes the mask of each pair of tokens first.
        with torch._dynamo.config.patch(recompile_limit=_ENTRIES):  # noqa: SLF001
            masks[window] = _compiled(create_block_mask, dynamic=True)(
                is_seen, None, None, tokens, tokens, device=document.device
            )
    return masks[window]


def capped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Any,
    scale: float | None,
    window: int | None,
    cap: float,
) -> Tensor:
    """Compute causal attention within documents, with the scaled scores capped.

    Args:
        q: queries ``[1, H, T, d]`` on CUDA.
        k: keys ``[1, KV, T, d]``.
        v: values ``[1, KV, T, d]``.
        packing: the documents.
        scale: factor of the scores (None: ``d ** -0.5``).
        window: number of tokens that a token attends to, itself included (None: no window).
        cap: bound of the scaled scores.

    Returns:
        ``[1, H, T, d]``.
    """
    result: Tensor = _attend(q, k, v, packing, scale, window, cap)
    return result


def tree_attention(q: Tensor, k: Tensor, v: Tensor, packing: Any, scale: float | None) -> Tensor:
    """Compute attention in a tree of documents (``engine_torch.prefixes``).

    Args:
        q: queries ``[1, H, T, d]`` on CUDA.
        k: keys ``[1, KV, T, d]``.
        v: values ``[1, KV, T, e]``.
        packing: the documents, which share beginnings.
        scale: factor of the scores (None: ``d ** -0.5``).

    Returns:
        ``[1, H, T, e]``.
    """
    result: Tensor = _attend(q, k, v, packing, scale, None, None)
    return result


def _compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Any,
    scale: float | None,
    window: int | None,
    cap: float | None,
) -> Tensor:
    mask = _mask_of(packing, window)
    for x in (q, k, v):
        # One kernel for all numbers of tokens. (torch documents this call, underscore and all.)
        torch._dynamo.maybe_mark_dynamic(x, 2)  # noqa: SLF001
    # The kernel is written for one scale and one cap: it takes no floats as arguments.
    with torch._dynamo.config.patch(specialize_float=True, recompile_limit=_ENTRIES):  # noqa: SLF001
        result: Tensor = _compiled(flex_attention, dynamic=None)(
            q,
            k,
            v,
            score_mod=None if cap is None else _cap_of(cap),
            block_mask=mask,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    return result


# A block that is compiled calls the compiled kernel, and has no part in it.
_attend: Any = torch.compiler.disable(_compute)

"""Context parallelism: the tokens of each document on a rank, and the gathers over the ranks.

A document is cut into 2n equal chunks, and rank r of n has the chunks r and 2n-1-r, so that causal
attention costs all ranks the same (Megatron's and Transformer Engine's order for packed documents).
"""

# Megatron is not annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextShard:
    """One rank's tokens of a packed micro-batch.

    Each document is padded to a multiple of twice the number of ranks.

    Attributes:
        place: ``[T']`` int64, each token's index in the concatenation of all ranks' tokens.
        group: the process group of the context-parallel ranks.
    """

    ranks: int
    rank: int
    place: Tensor
    group: Any


def token_order(lengths: Sequence[int], ranks: int) -> Tensor:
    """Return the indices of each rank's tokens, documents in their order.

    The result is ``[ranks, T' / ranks]`` int64. One rank takes documents of any length.
    """
    if ranks == 1:
        return torch.arange(sum(lengths))[None]
    mine = torch.arange(ranks)
    pairs = torch.stack((mine, 2 * ranks - 1 - mine), dim=1)
    tokens = torch.arange(sum(lengths)).split(list(lengths))
    return torch.cat(
        [document.view(2 * ranks, -1)[pairs].reshape(ranks, -1) for document in tokens], dim=1
    )


def gather_outputs(local: Tensor, group: Any) -> Tensor:
    """Gather ``[n]`` of each rank to ``[ranks · n]``.

    All ranks continue with the same loss, so the gradient is this rank's slice.
    """
    gathered: Tensor = gather_from_sequence_parallel_region(
        local, tensor_parallel_output_grad=False, group=group
    )
    return gathered


def gather_documents(local: Tensor, shard: ContextShard) -> Tensor:
    """Gather this rank's tokens ``[T' / ranks, …]`` to all tokens ``[T', …]`` in their order.

    Gradients are summed over the ranks.
    """
    gathered: Tensor = gather_from_sequence_parallel_region(
        local, tensor_parallel_output_grad=True, group=shard.group
    )
    return gathered.index_select(0, shard.place)


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """The scores of attention.

    Attributes:
        scale: factor of a query's product with a key; None is one over the root of their width.
        window: number of tokens that a token attends to, itself included; None for all before it.
        sinks: ``[heads]`` scores that take probability and give no value, or None.
    """

    scale: float | None = None
    window: int | None = None
    sinks: Tensor | None = None


def attend(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Compute causal attention of the last tokens of one document over its beginning up to them.

    ``[heads, n, d]`` queries, ``[groups, m, d]`` keys and ``[groups, m, d']`` values, m at least n,
    give ``[heads, n, d']``.
    """
    count, size = query.shape[1], key.shape[1]
    if scores.window is not None:
        # No query sees the keys before the first one's window.
        first = max(0, size - count - scores.window + 1)
        key, value, size = key[:, first:], value[:, first:], size - first
    mask: Any = None
    is_causal = False
    if scores.sinks is not None:
        mask = _sink_mask(scores, count, size).to(query.dtype)
        key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
    elif scores.window is not None and size > scores.window:
        mask = _seen(scores, count, size, query.device)
    elif count == size:
        is_causal = True
    else:
        # Kernels that know this mask type need no [count, size] tensor of booleans.
        mask = causal_lower_right(count, size)
    return F.scaled_dot_product_attention(
        query[None],
        key[None],
        value[None],
        attn_mask=mask,
        is_causal=is_causal,
        scale=scores.scale,
        enable_gqa=query.shape[0] != key.shape[0],
    )[0]


def _seen(scores: Scores, count: int, size: int, device: torch.device) -> Tensor:
    """Return ``[count, size]``, true where the row's token attends to the column's."""
    seen = torch.ones(count, size, dtype=torch.bool, device=device).tril(size - count)
    return seen if scores.window is None else seen.triu(size - count - scores.window + 1)


def _sink_mask(scores: Scores, count: int, size: int) -> Tensor:
    """Return the mask ``[1, heads, count, size + 1]`` that adds the sinks as scores of a last key.

    The key and its value are zero.
    """
    sinks = scores.sinks
    assert sinks is not None
    seen = _seen(scores, count, size, sinks.device)
    mask = torch.zeros(count, size, dtype=sinks.dtype, device=sinks.device)
    mask = mask.masked_fill(~seen, -math.inf).expand(len(sinks), -1, -1)
    return torch.cat((mask, sinks[:, None, None].expand(-1, count, 1)), dim=-1)[None]


def attend_chunks(
    query: Tensor, key: Tensor, value: Tensor, shard: ContextShard, scores: Scores
) -> Tensor:
    """Compute causal attention of this rank's two chunks of one document over the whole document.

    ``[heads, 2c, d]`` queries and ``[groups, 2c · ranks, d]`` keys and values give
    ``[heads, 2c, d']``.
    """
    size = query.shape[1] // 2
    chunks = (shard.rank, 2 * shard.ranks - 1 - shard.rank)
    parts: list[Tensor] = []
    for part, chunk in zip(query.split(size, dim=1), chunks, strict=True):
        end = (chunk + 1) * size
        parts.append(attend(part, key[:, :end], value[:, :end], scores))
    return torch.cat(parts, dim=1)

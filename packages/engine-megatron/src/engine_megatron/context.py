"""Context parallelism: the tokens of each document on a rank, and the gathers over the ranks.

A document is cut into 2n equal chunks, and rank r of n has the chunks r and 2n-1-r, so that causal
attention costs all ranks the same (Megatron's and Transformer Engine's order for packed documents).
"""

# Megatron is not annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

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


def attend(
    query: Tensor, key: Tensor, value: Tensor, shard: ContextShard, scale: float | None
) -> Tensor:
    """Compute causal attention of this rank's two chunks of one document over the whole document.

    ``[heads, 2c, d]`` queries and ``[groups, 2c · ranks, d]`` keys and values give
    ``[heads, 2c, d]``.
    """
    size = query.shape[1] // 2
    chunks = (shard.rank, 2 * shard.ranks - 1 - shard.rank)
    parts: list[Tensor] = []
    for part, chunk in zip(query.split(size, dim=1), chunks, strict=True):
        end = (chunk + 1) * size
        # Kernels that know this mask type need no [size, end] tensor of booleans.
        mask = causal_lower_right(size, end)
        parts.append(
            F.scaled_dot_product_attention(
                part[None],
                key[None, :, :end],
                value[None, :, :end],
                attn_mask=mask,
                scale=scale,
                enable_gqa=True,
            )[0]
        )
    return torch.cat(parts, dim=1)

"""Context parallelism: which tokens of each document a rank has, and what is gathered from the others.

A document of 2n equal chunks gives rank r of n the chunks r and 2n-1-r, so that causal attention costs all ranks the same
(Megatron's and Transformer Engine's order for packed documents).
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
class Share:
    """One rank's share of a packed micro-batch whose documents are padded to a multiple of twice the ranks.

    Attributes:
        place: ``[T']`` int64, where each token stands in the ranks' tokens one rank after another.
        group: the context-parallel ranks.
    """

    ranks: int
    rank: int
    place: Tensor
    group: Any


def token_order(lengths: Sequence[int], ranks: int) -> Tensor:
    """``[ranks, T' / ranks]`` int64: the tokens of each rank, documents in their order."""
    if ranks == 1:  # documents of any length
        return torch.arange(sum(lengths))[None]
    mine = torch.arange(ranks)
    pairs = torch.stack((mine, 2 * ranks - 1 - mine), dim=1)
    tokens = torch.arange(sum(lengths)).split(list(lengths))
    return torch.cat(
        [document.view(2 * ranks, -1)[pairs].reshape(ranks, -1) for document in tokens], dim=1
    )


def gather_outputs(local: Tensor, group: Any) -> Tensor:
    """``[n]`` of each rank → ``[ranks · n]``. All ranks go on with the same loss: the gradient is this rank's slice."""
    gathered: Tensor = gather_from_sequence_parallel_region(
        local, tensor_parallel_output_grad=False, group=group
    )
    return gathered


def gather_documents(local: Tensor, share: Share) -> Tensor:
    """This rank's tokens ``[T' / ranks, …]`` → all ``[T', …]`` in their order; gradients are summed over the ranks."""
    gathered: Tensor = gather_from_sequence_parallel_region(
        local, tensor_parallel_output_grad=True, group=share.group
    )
    return gathered.index_select(0, share.place)


def attend(query: Tensor, key: Tensor, value: Tensor, share: Share, scale: float | None) -> Tensor:
    """Causal attention of this rank's two chunks of one document over the whole of it.

    ``[heads, 2c, d]`` queries, ``[groups, 2c · ranks, d]`` keys and values → ``[heads, 2c, d]``.
    """
    size = query.shape[1] // 2
    parts: list[Tensor] = []
    for part, chunk in zip(
        query.split(size, dim=1), (share.rank, 2 * share.ranks - 1 - share.rank), strict=True
    ):
        end = (chunk + 1) * size
        mask = causal_lower_right(
            size, end
        )  # a kernel that knows it needs no [size, end] of booleans
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

"""Context parallelism: attention of a rank's part of a pack to the keys and values of all parts.

Ranks divide the tokens of a pack into parts of equal length, in order. Each rank gathers keys and
values, and computes the attention of its own tokens to the documents in which they are. (Ulysses,
which exchanges heads for tokens, is in ``engine_torch.ulysses``.)
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from engine_api.devices import move_tensor
from engine_api.process_groups import all_gather, reduce_scatter

__all__ = ["CONTEXT_KERNELS", "GROUPED", "Context", "build_context"]

CONTEXT_KERNELS = ("sdpa", "varlen")
"""Names of the kernels that a part of a pack can be computed with."""

# Before torch 2.13 `varlen_attn` accepts fewer key heads than query heads without being asked to.
_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters

GROUPED: dict[str, Any] = {"enable_gqa": True} if _HAS_GQA else {}
"""Argument of ``varlen_attn`` for fewer key heads than query heads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """The documents of this rank's part of a pack, with the tokens that it attends to.

    These begin with the document of the part's first token, and end with the part. In each document
    of the part the queries are therefore the last tokens.

    Attributes:
        group: process group of the ranks that share the pack.
        kernel: ``sdpa`` or ``varlen``.
        first: index in the pack of the first token that is attended to.
        stop: index in the pack behind the last one, which is the end of the part.
        cu_queries: ``[D+1]`` int32, boundaries of the documents in the part.
        cu_keys: ``[D+1]`` int32, boundaries of the documents from ``first`` on.
        max_queries: tokens of the part in the document that has most there.
        max_keys: tokens of the longest document from ``first`` to ``stop``.
        mask: ``[1, 1, T/n, stop - first]`` bool, true where a query (row) attends to a key
            (column), for ``sdpa``.
    """

    group: Any
    kernel: str
    first: int
    stop: int
    cu_queries: Tensor
    cu_keys: Tensor
    max_queries: int
    max_keys: int
    mask: Tensor | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Return the attention ``[1, H, T/n, e]`` of this rank's tokens.

        Args:
            query: ``[1, H, T/n, d]``.
            key: ``[1, KV, T/n, d]``.
            value: ``[1, KV, T/n, e]``, where e may differ from d.
            scale: factor of the scores (None: ``d ** -0.5``).
        """
        own = value.shape[-1]
        if key.shape[-1] != own:
            # Both are gathered as one tensor.
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            width = max(query.shape[-1], own)
            query, key, value = (F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
            return self.attend(query, key, value, scale)[..., :own]
        # One gather of both, whose gradient adds those of all ranks' queries.
        both: Tensor = _GatherParts.apply(torch.cat([key, value]), self.group)  # type: ignore[no-untyped-call]
        key, value = both[:, :, self.first : self.stop].chunk(2)
        if self.kernel == "sdpa":
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=self.mask,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        # The kernel takes [T, H, d], and lets the last query attend to the last key.
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = varlen_attn(
            q,
            k,
            v,
            self.cu_queries,
            self.cu_keys,
            self.max_queries,
            self.max_keys,
            scale=scale,
            window_size=(-1, 0),
            **GROUPED,
        )
        assert isinstance(out, Tensor)
        return out.transpose(0, 1)[None]


class _GatherParts(torch.autograd.Function):
    """The all-gather of ``[2, KV, T/n, d]`` to ``[2, KV, T, d]``.

    Each rank's queries give all keys and values a gradient, so these are added over the ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        ranks = dist.get_world_size(group)
        received = x.new_empty(ranks * x.numel())
        all_gather(received, x.contiguous().view(-1), group)
        return torch.cat(received.view(ranks, *x.shape).unbind(0), dim=2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ranks = dist.get_world_size(ctx.group)
        parts = torch.stack(grads[0].chunk(ranks, dim=2)).contiguous()
        own = parts.new_empty(parts.shape[1:])
        reduce_scatter(own.view(-1), parts.view(-1), ctx.group)
        return own, None


def build_context(
    lengths: list[int],
    kernel: str,
    device: torch.device,
    *,
    group: Any,
    parts: int,
    part: int,
) -> Context:
    """Build the context of one part of a pack with documents of these lengths (tokens).

    Args:
        lengths: tokens of each document, whose sum ``parts`` divides.
        kernel: name of a kernel in ``CONTEXT_KERNELS``.
        device: device of the tensors.
        group: process group of the ranks that share the pack.
        parts: number of ranks in the group.
        part: this rank's index in the group.
    """
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    size = int(bounds[-1]) // parts
    start, stop = part * size, (part + 1) * size
    # The documents that have tokens in the part, as (first token, token behind the last one).
    own = [
        (begin, min(end, stop))
        for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        if begin < stop and end > start
    ]
    first = own[0][0]
    queries = [end - max(begin, start) for begin, end in own]
    keys = [end - begin for begin, end in own]
    mask = None
    if kernel == "sdpa":
        document = torch.repeat_interleave(torch.arange(len(keys)), torch.tensor(keys))
        document = move_tensor(document, device)
        token = torch.arange(stop - first, device=device)
        row = token[start - first :, None]
        same = document[start - first :, None] == document[None, :]
        mask = (same & (token[None, :] <= row))[None, None]
    return Context(
        group=group,
        kernel=kernel,
        first=first,
        stop=stop,
        cu_queries=_accumulate(queries, device),
        cu_keys=_accumulate(keys, device),
        max_queries=max(queries),
        max_keys=max(keys),
        mask=mask,
    )


def _accumulate(lengths: list[int], device: torch.device) -> Tensor:
    """Return the boundaries ``[D+1]`` of ranges of these lengths, as int32 on a device."""
    return move_tensor(torch.tensor([0, *lengths]).cumsum(0).int(), device)

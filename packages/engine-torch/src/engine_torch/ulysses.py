"""Collectives of Ulysses sequence parallelism (DeepSpeed-Ulysses, arXiv:2309.14509)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["gather_tokens", "heads_to_sequence", "sequence_to_heads"]


class _AllToAll(torch.autograd.Function):
    """The exchange that scatters one dimension over the group and gathers another.

    Its gradient is the inverse exchange.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, scatter: int, gather: int) -> Tensor:
        ctx.group = group
        ctx.scatter = scatter
        ctx.gather = gather
        return _all_to_all(x, group, scatter, gather)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.group, ctx.gather, ctx.scatter), None, None, None


def _all_to_all(x: Tensor, group: Any, scatter: int, gather: int) -> Tensor:
    """Scatter dimension ``scatter`` over the group and gather dimension ``gather``."""
    size = dist.get_world_size(group)
    send = torch.stack(x.chunk(size, dim=scatter)).contiguous()
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send, group=group)
    return torch.cat(receive.unbind(0), dim=gather)


def heads_to_sequence(x: Tensor, group: Any) -> Tensor:
    """Exchange ``[1, H, T/n, d]``, this rank's tokens, for ``[1, H/n, T, d]``, this rank's heads.

    The gradient is the exchange in the other direction.
    """
    result: Tensor = _AllToAll.apply(x, group, 1, 2)  # type: ignore[no-untyped-call]
    return result


def sequence_to_heads(x: Tensor, group: Any) -> Tensor:
    """Exchange ``[1, H/n, T, d]`` for ``[1, H, T/n, d]``, which inverts ``heads_to_sequence``."""
    result: Tensor = _AllToAll.apply(x, group, 2, 1)  # type: ignore[no-untyped-call]
    return result


class _GatherTokens(torch.autograd.Function):
    """The all-gather of ``[T/n]`` to ``[T]`` over the group.

    Every rank computes the same loss on the whole, so the gradient is this rank's slice, counted
    once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        size = dist.get_world_size(ctx.group)
        rank = dist.get_rank(ctx.group)
        return grads[0].chunk(size)[rank].contiguous(), None


def gather_tokens(x: Tensor, group: Any) -> Tensor:
    """Gather values ``[T/n]`` of this rank's tokens to ``[T]`` of all tokens, with gradient."""
    result: Tensor = _GatherTokens.apply(x, group)  # type: ignore[no-untyped-call]
    return result

"""Coordinates and groups of ranks, and the collectives with their gradients.

Ranks are numbered stage by stage, then data, sequence and tensor, the last one fastest. Experts are
spread over neighbours among the ranks that hold copies of the dense weights (data and sequence).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from engine_api.config import Parallelism
from engine_api.errors import ConfigError
from engine_api.results import Topology

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Coordinates of one rank."""

    stage: int
    data: int
    sequence: int
    tensor: int
    expert: int
    """Index among the ranks that hold different experts."""
    expert_copy: int
    """Index of the copy of all experts to which the rank belongs."""
    is_end: bool
    """True if the rank's stage is the first or the last."""


# An axis is a group of ranks: those for which this key is the same.
AXES: dict[str, Callable[[Place], tuple[int, ...]]] = {
    "tensor": lambda p: (p.stage, p.data, p.sequence),
    "sequence": lambda p: (p.stage, p.data, p.tensor),
    "stages": lambda p: (p.data, p.sequence, p.tensor),
    # First and last stage, which share a tied embedding.
    "ends": lambda p: (p.is_end, p.data, p.sequence, p.tensor),
    # Ranks with the same dense weights and different tokens.
    "copies": lambda p: (p.stage, p.tensor),
    "expert": lambda p: (p.stage, p.tensor, p.expert_copy),
    "expert_copies": lambda p: (p.stage, p.tensor, p.expert),
    "world": lambda _: (),
}


class Layout:
    """Grid of ranks, whose sizes must multiply to the world (else ``ConfigError``)."""

    def __init__(self, parallelism: Parallelism, world: int, rank: int) -> None:
        self.parallelism = p = parallelism
        self.stages = p.pp
        self.tensor = p.tp
        self.sequence = p.cp * p.ulysses
        self.expert = p.ep
        others = p.pp * p.tp * self.sequence * p.dp_replicate
        shard = world // others if p.dp_shard == -1 else p.dp_shard
        if shard * others != world:
            raise ConfigError(
                "parallelism",
                f"{p} does not make a world of {world}",
                remedy=(
                    "choose sizes whose product without ep is the number of ranks, or dp_shard: -1"
                ),
            )
        self.data = p.dp_replicate * shard
        self.world = world
        self.rank = rank
        if self.data * self.sequence % p.ep:
            raise ConfigError(
                "parallelism.ep",
                f"{p.ep} does not divide {self.data * self.sequence} ranks",
                why="experts are spread over data- and sequence-parallel ranks",
                remedy="choose a divisor",
            )
        self.places = [self.place(r) for r in range(world)]
        self.here = self.places[rank]
        self.groups: dict[str, Any] = {}

    def place(self, rank: int) -> Place:
        """Return the coordinates of ``rank``."""
        rest, tensor = divmod(rank, self.tensor)
        stage, copy = divmod(rest, self.data * self.sequence)
        data, sequence = divmod(copy, self.sequence)
        return Place(
            stage=stage,
            data=data,
            sequence=sequence,
            tensor=tensor,
            expert=copy % self.expert,
            expert_copy=copy // self.expert,
            is_end=stage in (0, self.stages - 1),
        )

    @property
    def topology(self) -> Topology:
        """This rank as the caller sees it.

        The first rank of a data-parallel rank is primary.
        """
        here = self.here
        sizes = {
            "pp": self.stages,
            "dp": self.data,
            "cp": self.parallelism.cp,
            "ulysses": self.parallelism.ulysses,
            "tp": self.tensor,
            "ep": self.expert,
        }
        return Topology(
            rank=self.rank,
            world_size=self.world,
            dp_rank=here.data,
            dp_size=self.data,
            is_primary=here.stage == here.sequence == here.tensor == 0,
            sizes=sizes,
        )

    @property
    def is_first(self) -> bool:
        """True on the first pipeline stage."""
        return self.here.stage == 0

    @property
    def is_last(self) -> bool:
        """True on the last pipeline stage."""
        return self.here.stage == self.stages - 1

    # --- groups --------------------------------------------------------------------------------

    def members(self, axis: str, place: Place) -> list[int]:
        """Return the ranks of the group along ``axis`` to which ``place`` belongs."""
        key = AXES[axis]
        return [rank for rank, other in enumerate(self.places) if key(other) == key(place)]

    def build_groups(self, timeout: timedelta) -> None:
        """Make every group of more than one rank, on all ranks and in the same order."""
        for axis in AXES:
            for members in sorted({tuple(self.members(axis, place)) for place in self.places}):
                if len(members) > 1:
                    group = dist.new_group(list(members), timeout=timeout)
                    if self.rank in members:
                        self.groups[axis] = group

    def close(self) -> None:
        """Destroy the groups."""
        for group in self.groups.values():
            dist.destroy_process_group(group)
        self.groups.clear()

    def size(self, axis: str) -> int:
        """Return the number of ranks in this rank's group along ``axis``."""
        return len(self.members(axis, self.here))

    def index(self, axis: str) -> int:
        """Return this rank's index in its group along ``axis``."""
        return self.members(axis, self.here).index(self.rank)

    # --- collectives without gradient ----------------------------------------------------------

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        """Return the sum over the group, the same bits on every rank.

        Tensors in bfloat16 are summed in float32.
        """
        if axis not in self.groups:
            return x
        dtype = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
        total = x.detach().to(dtype, copy=True).contiguous()
        dist.all_reduce(total, group=self.groups[axis])
        return total.to(x.dtype)

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        """Concatenate each rank's ``[n, …]`` to ``[ranks · n, …]``."""
        if axis not in self.groups:
            return x
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for _ in range(self.size(axis))
        ]
        dist.all_gather(parts, x.contiguous(), group=self.groups[axis])
        return torch.cat(parts)

    def own_part(self, x: Tensor, axis: str) -> Tensor:
        """Return this rank's ``[n, …]`` of ``[ranks · n, …]``."""
        return x.chunk(self.size(axis))[self.index(axis)]

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        """Sum ``[ranks · n, …]`` over the group and return this rank's ``[n, …]``."""
        return self.own_part(self.all_reduce(x, axis), axis)

    def largest(self, count: int, axis: str, device: torch.device) -> int:
        """Return the largest ``count`` of the group."""
        return int(self.all_gather(torch.tensor([count], device=device), axis).max())

    def send(self, x: Tensor, step: int) -> None:
        """Send to the stage ``step`` further."""
        dist.send(
            x.contiguous(),
            dst=self._stage_rank(self.here.stage + step),
            group=self.groups["stages"],
        )

    def receive(self, like: Tensor, step: int) -> Tensor:
        """Receive from the stage ``step`` further, in the shape and dtype of ``like``."""
        buffer = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(buffer, src=self._stage_rank(self.here.stage + step), group=self.groups["stages"])
        return buffer

    def broadcast_from_last(self, x: Tensor) -> Tensor:
        """Return the last stage's ``x`` on all stages."""
        x = x.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(x, src=self._stage_rank(self.stages - 1), group=self.groups["stages"])
        return x

    def _stage_rank(self, stage: int) -> int:
        return self.members("stages", self.here)[stage]


# --- collectives with gradient: each is named by its forward, its backward is below it ------------


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, axis: str) -> Tensor:
        ctx.layout = layout
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.layout.all_reduce(grads[0], ctx.axis), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, axis: str) -> Tensor:
        del ctx
        return layout.all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        del ctx
        return grads[0], None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, axis: str) -> Tensor:
        ctx.layout = layout
        ctx.axis = axis
        return layout.all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.layout.reduce_scatter(grads[0], ctx.axis), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, axis: str) -> Tensor:
        ctx.layout = layout
        ctx.axis = axis
        return layout.reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.layout.all_gather(grads[0], ctx.axis), None, None


class _GatherOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, axis: str) -> Tensor:
        ctx.layout = layout
        ctx.axis = axis
        return layout.all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.layout.own_part(grads[0], ctx.axis).contiguous(), None, None


class Collectives:
    """Collectives that a model calls, each of which is the identity in a group of one."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def copy_to_tensor(self, x: Tensor) -> Tensor:
        """Pass ``x`` into the split part of a layer.

        Its gradient is a sum over the ranks (Megatron-LM's f, arXiv:1909.08053).
        """
        return self._apply(_Copy, x, "tensor")

    def reduce_from_tensor(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks of a split part (Megatron-LM's g).

        Each rank goes on with the whole, and so has the whole gradient.
        """
        return self._apply(_Reduce, x, "tensor")

    def gather_sequence(self, x: Tensor) -> Tensor:
        """Gather keys or values of all tokens, ``[n, …] → [T, …]``.

        Each rank's queries add to the gradient.
        """
        return self._apply(_Gather, x, "sequence")

    def gather_experts(self, x: Tensor) -> Tensor:
        """Gather the tokens of all ranks with different experts."""
        return self._apply(_Gather, x, "expert")

    def scatter_experts(self, x: Tensor) -> Tensor:
        """Sum the experts' outputs and return those of this rank's tokens."""
        return self._apply(_Scatter, x, "expert")

    def gather_outputs(self, x: Tensor) -> Tensor:
        """Gather the outputs of all tokens.

        Every rank computes the same loss of them, so the gradient is its own slice.
        """
        return self._apply(_GatherOutputs, x, "sequence")

    def even(self, x: Tensor) -> Tensor:
        """Append zero rows, up to the largest number of rows among ranks with different experts."""
        return pad(x, (0, 0, 0, _most_rows(x, self.layout) - x.shape[0]))

    def _apply(self, function: Any, x: Tensor, axis: str) -> Tensor:
        return _communicate(function, x, self.layout, axis) if axis in self.layout.groups else x


def _with_gradient(function: Any, x: Tensor, layout: Layout, axis: str) -> Tensor:
    result: Tensor = function.apply(x, layout, axis)
    return result


def _largest_rows(x: Tensor, layout: Layout) -> int:
    return layout.largest(x.shape[0], "expert", x.device)


# A compiled block is interrupted where ranks communicate. (The decorator's own types are wrong.)
_communicate: Any = torch.compiler.disable(_with_gradient)
_most_rows: Any = torch.compiler.disable(_largest_rows)

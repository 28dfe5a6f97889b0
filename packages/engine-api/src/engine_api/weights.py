"""Weights by name: shards, the position of each shard in the whole tensor, and new values."""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from engine_api.codec import register

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@register
@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSpec:
    """The box of a whole tensor that one rank's shard covers.

    ``shard == whole[offset[0]:offset[0]+shape[0], …]``. A rank that holds nothing of a tensor
    has a shape with a zero in it. Ranks with the same box hold copies; ``replica`` numbers them
    from 0, so that the shards with ``replica == 0`` make up the whole exactly once.
    """

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    replica: int = 0

    def __post_init__(self) -> None:
        assert len(self.global_shape) == len(self.offset) == len(self.shape), (
            f"ranks differ in {self}"
        )
        for size, start, length in zip(self.global_shape, self.offset, self.shape, strict=True):
            assert 0 <= start <= start + length <= size, f"the box leaves the tensor in {self}"

    @property
    def is_empty(self) -> bool:
        """True if this rank holds nothing of the tensor."""
        return 0 in self.shape and 0 not in self.global_shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as slices into the whole tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))

    @staticmethod
    def whole(shape: Iterable[int], replica: int = 0) -> ShardSpec:
        """Return the box that covers all of a tensor of ``shape``."""
        shape = tuple(int(s) for s in shape)
        return ShardSpec(global_shape=shape, offset=(0,) * len(shape), shape=shape, replica=replica)

    @staticmethod
    def nothing(shape: Iterable[int]) -> ShardSpec:
        """Return the empty box of a tensor of ``shape`` (size 0 in the first dimension)."""
        shape = tuple(int(s) for s in shape)
        return ShardSpec(global_shape=shape, offset=(0,) * len(shape), shape=(0, *shape[1:]))


WeightExport = Iterator[tuple[str, "torch.Tensor"]]
ShardExport = Iterator[tuple[str, "torch.Tensor", ShardSpec]]


def buckets(
    items: Iterable[T],
    limit: int,
    *,
    size_of: Callable[[T], int],
    kind_of: Callable[[T], object] = lambda _: None,
) -> Iterator[list[T]]:
    """Yield lists of successive items of one kind, of at most ``limit`` bytes or of one item."""
    bucket: list[T] = []
    size = 0
    for item in items:
        need = size_of(item)
        if bucket and (size + need > limit or kind_of(item) != kind_of(bucket[0])):
            yield bucket
            bucket = []
            size = 0
        bucket.append(item)
        size += need
    if bucket:
        yield bucket


def assemble(shards: Iterable[tuple[torch.Tensor, ShardSpec]]) -> torch.Tensor:
    """Return the whole tensor made of the shards of all ranks.

    Raises ``ValueError`` when the boxes of replica 0 do not cover the whole exactly once.
    """
    import torch

    parts = list(shards)
    shape = parts[0][1].global_shape
    whole = torch.empty(shape, dtype=parts[0][0].dtype, device=parts[0][0].device)
    seen = torch.zeros(shape, dtype=torch.uint8, device=whole.device)
    for tensor, spec in parts:
        if spec.replica == 0 and not spec.is_empty:
            whole[spec.slices] = tensor
            seen[spec.slices] += 1
    if not bool((seen == 1).all()):
        raise ValueError(f"shards do not cover {shape} exactly once: {[spec for _, spec in parts]}")
    return whole


def random_weight(name: str, box: ShardSpec, *, seed: int, std: float) -> torch.Tensor:
    """Return a box of a new weight, whose values are the same in every layout.

    They are normal with the standard deviation ``std``, ones for a norm, and zeros for a bias.
    """
    import torch

    if name.endswith("norm.weight"):
        return torch.ones(box.shape)
    if name.endswith((".bias", "_bias")):
        return torch.zeros(box.shape)
    generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    return (torch.randn(box.global_shape, generator=generator) * std)[box.slices]

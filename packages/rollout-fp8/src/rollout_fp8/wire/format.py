"""What travels from an engine to a rollout: named boxes of tensors, in buckets.

A *wire tensor* is what a server's checkpoint would hold: a weight in the served dtype, or the FP8 weight and the scales
of one that is quantized. A *piece* is a box of it, as one rank of the engine holds it. A *bucket* is a contiguous buffer
full of pieces. All of it is fixed at the first sync (``WirePlan``); later syncs only fill the same buffers again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from engine_api.codec import register
from engine_api.weights import ShardSpec

BLOCK = 128  # rows and columns of a block with one scale
SCALE_SUFFIX = "_scale_inv"  # what both servers call the scales of ``X.weight``
ALIGNMENT = 512  # bytes; where pieces begin in a bucket: full width of a memory transaction, and any dtype's view


@register
@dataclass(frozen=True, kw_only=True, slots=True)
class WireTensor:
    """One tensor as it is served."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


@register
@dataclass(frozen=True, kw_only=True, slots=True)
class WireSlice:
    """A box of a wire tensor, and the bytes of a bucket's buffer that hold it (row-major)."""

    tensor: WireTensor
    box: ShardSpec
    start: int  # byte in the buffer

    @property
    def num_bytes(self) -> int:
        """Of the box."""
        return prod(self.box.shape) * self.tensor.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """The box as a tensor of its own shape and dtype, in a bucket's uint8 buffer."""
        flat = buffer[self.start : self.start + self.num_bytes]
        return flat.view(self.tensor.dtype).view(self.box.shape)


@register
@dataclass(frozen=True, kw_only=True, slots=True)
class BucketPlan:
    """What one bucket holds; ``slot`` says which of the plan's buffers it is filled into."""

    pieces: tuple[WireSlice, ...]
    num_bytes: int
    slot: int


@register
@dataclass(frozen=True, kw_only=True, slots=True)
class WirePlan:
    """Everything about a sync that does not change from one to the next.

    ``tensors`` in the order of the export, by name. The pieces of all buckets cover every tensor exactly once.
    """

    tensors: Mapping[str, WireTensor]
    buckets: tuple[BucketPlan, ...]
    slots: tuple[int, ...]  # bytes of each buffer
    notes: Mapping[str, str]  # tensors that are not handled the fast way, and why

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


class WireStream(Protocol):
    """One sync's weights. Iterated either way, once, to the end."""

    plan: WirePlan
    device: torch.device
    audit: bool  # whether ``checksums`` are made, and what is served is to be compared with them

    def buckets(self) -> Iterator[tuple[BucketPlan, Tensor]]:
        """(plan, uint8 buffer); a buffer is valid until the next bucket of its slot is asked for.

        On CUDA the buffer is ready for the stream that is current when it is yielded, and whatever reads it must be
        queued on that stream before the next bucket is asked for.
        """
        ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(wire name, whole tensor), each as it is complete; a tensor is valid until the next one is asked for."""
        ...

    def checksums(self) -> Mapping[str, int]:
        """Of every wire tensor as the engine has it, by ``rollout_fp8.wire.checksum``; after the last bucket."""
        ...

    def seconds(self) -> Mapping[str, float]:
        """``gather`` and ``quantize``; after the last bucket."""
        ...


def intersection(a: ShardSpec, b: ShardSpec) -> ShardSpec | None:
    """The box that two boxes of one tensor share."""
    low = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    high = tuple(
        min(x + s, y + t) for x, s, y, t in zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    )
    if any(h <= o for o, h in zip(low, high, strict=True)):
        return None
    return ShardSpec(
        global_shape=a.global_shape,
        offset=low,
        shape=tuple(h - o for o, h in zip(low, high, strict=True)),
    )


def covers(shape: tuple[int, ...], boxes: Sequence[ShardSpec]) -> bool:
    """Whether the boxes hold every element of a tensor exactly once."""
    disjoint = all(intersection(a, b) is None for i, a in enumerate(boxes) for b in boxes[:i])
    return disjoint and sum(prod(box.shape) for box in boxes) == prod(shape)

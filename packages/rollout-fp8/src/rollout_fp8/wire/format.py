"""Format of the weights that travel from an engine to a rollout: boxes of tensors, in buckets.

A *wire tensor* is a tensor as a server's checkpoint would hold it: a weight in the served dtype, or
the FP8 weight and the scales of a quantized one. A *wire slice* is a box of it, as one rank of the
engine holds it. A *bucket* is a contiguous buffer full of slices. All of it is fixed at the first
sync (``WirePlan``); later syncs only fill the same buffers again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from engine_api.codec import register
from engine_api.weights import ShardSpec

# Rows and columns of a block that has one scale.
BLOCK = 128
# The name that both servers give the scales of ``X.weight``.
SCALE_SUFFIX = "_scale_inv"
# Bytes. Slices begin at multiples in a bucket: full width of a memory transaction, and any dtype's
# view.
ALIGNMENT = 512


@register
@dataclass(frozen=True, kw_only=True, slots=True)
class WireTensor:
    """Tensor as it is served."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


@register
@dataclass(frozen=True, kw_only=True, slots=True)
class WireSlice:
    """Box of a wire tensor, and the bytes of a bucket's buffer that hold it (row-major)."""

    tensor: WireTensor
    box: ShardSpec
    start: int
    """First byte of the box in the buffer."""

    @property
    def num_bytes(self) -> int:
        """The bytes of the box."""
        return prod(self.box.shape) * self.tensor.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """Return the box as a tensor of its own shape and dtype in a bucket's uint8 buffer."""
        flat = buffer[self.start : self.start + self.num_bytes]
        return flat.view(self.tensor.dtype).view(self.box.shape)


@register
@dataclass(frozen=True, kw_only=True, slots=True)
class BucketPlan:
    """Content of one bucket.

    ``slot`` is the index of the plan's buffer that it is filled into.
    """

    slices: tuple[WireSlice, ...]
    num_bytes: int
    slot: int


@register
@dataclass(frozen=True, kw_only=True, slots=True)
class WirePlan:
    """Parts of a sync that are the same at every sync.

    ``tensors`` are in the order of the export, by name. The slices of all buckets cover every
    tensor exactly once.
    """

    tensors: Mapping[str, WireTensor]
    buckets: tuple[BucketPlan, ...]
    slots: tuple[int, ...]
    """Bytes of each buffer."""

    notes: Mapping[str, str]
    """Reasons by tensor, for the tensors that are not handled the fast way."""

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


class WireStream(Protocol):
    """Weights of one sync, iterated once, to the end, as buckets or as tensors."""

    plan: WirePlan
    device: torch.device
    audit: bool
    """True where ``checksums`` are made, and the served weights are to be compared with them."""

    def buckets(self) -> Iterator[tuple[BucketPlan, Tensor]]:
        """Yield (plan, uint8 buffer).

        A buffer is valid until its slot's next bucket is requested.

        On CUDA the buffer is ready for the stream that is current when it is yielded. Whatever
        reads it must be queued on that stream before the next bucket is requested.
        """
        ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (wire name, whole tensor), each as it is complete.

        A tensor is valid until the next one is requested.
        """
        ...

    def checksums(self) -> Mapping[str, int]:
        """Return the checksum of every wire tensor as the engine has it, after the last bucket.

        ``rollout_fp8.wire.checksum`` says how they are computed.
        """
        ...

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of ``gather`` and ``quantize``, after the last bucket."""
        ...


class Places(Protocol):
    """Memory from which weights are served."""

    def find(self, wire_slice: WireSlice) -> Tensor | None:
        """Return the memory that serves a whole slice, or None if no one tensor does.

        It is the same whenever weights are written.
        """
        ...


@runtime_checkable
class PlacingStream(WireStream, Protocol):
    """Stream of the process that serves the weights, which may write them where they are served."""

    def place(self, places: Places) -> None:
        """Write slices to their places, and leave them out of the buckets.

        To be called before ``buckets``. Slices that have no place or that the stream cannot write
        there stay in the buckets, and so do all whose checksums would be read from the memory that
        they were written to. The stream and its exporter do not keep the places alive after the
        sync.
        """
        ...


def intersection(a: ShardSpec, b: ShardSpec) -> ShardSpec | None:
    """Return the box that two boxes of one tensor share, or None."""
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
    """Return whether the boxes hold every element of a tensor exactly once."""
    disjoint = all(intersection(a, b) is None for i, a in enumerate(boxes) for b in boxes[:i])
    return disjoint and sum(prod(box.shape) for box in boxes) == prod(shape)

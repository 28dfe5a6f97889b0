"""Tables by which one launch reaches many tensors: fixed layouts, refreshed addresses, tiles.

A plan is made once for a list of layouts (shape, strides, dtype). Everything that follows from them
is on the device already when the plan runs. A run copies the addresses of that call there, from
pinned memory and without waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Bytes that one thread loads at once where everything is aligned to them.
VECTOR = 16
TILE_ROWS = 32
TILE_COLUMNS = 256

# Shape, strides in elements, dtype and device.
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


class Count(NamedTuple):
    """Place in a whole tensor of what a launch writes, whose checksum the launch adds up.

    Words are of four bytes (``rollout_fp8.wire.checksum.count_of`` makes it).
    """

    first: int
    """Index of the first word."""

    step: int
    """Words from a row to the next."""

    group: int
    """Element of the sums that the checksum is added to."""


def has_kernels(device: torch.device) -> bool:
    """Return whether tensors of this device go through Triton instead of plain torch."""
    return device.type == "cuda"


def layouts(tensors: Sequence[Tensor]) -> tuple[Layout, ...]:
    """Return the layout of each tensor, for which a plan is made."""
    return tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)


def misfit(tensors: Sequence[Tensor], planned: Sequence[Layout]) -> int | None:
    """Return the first index that is not laid out as planned, or None.

    It makes no objects, because there may be thousands of tensors.
    """
    for i, (t, (shape, strides, dtype, device)) in enumerate(zip(tensors, planned, strict=True)):
        if t.shape != shape or t.stride() != strides or t.dtype != dtype or t.device != device:
            return i
    return None


def check_layouts(what: str, tensors: Sequence[Tensor], planned: tuple[Layout, ...]) -> None:
    """Raise ``ValueError`` when the tensors are not laid out as those the plan was made for."""
    if len(tensors) != len(planned):
        raise ValueError(f"{what}: {len(tensors)} tensors, the plan is for {len(planned)}")
    if (i := misfit(tensors, planned)) is not None:
        (found,) = layouts(tensors[i : i + 1])
        raise ValueError(
            f"{what}[{i}] is {describe(found)}, the plan is for {describe(planned[i])}"
        )


def describe(layout: Layout) -> str:
    """Return a layout as text, for messages."""
    shape, strides, dtype, device = layout
    return f"{dtype} {tuple(shape)} with strides {tuple(strides)} on {device}"


def check_counts(
    counts: Sequence[Count | None] | None, outs: Sequence[Layout], device: torch.device
) -> dict[int, Count]:
    """Return the counts by the index of their output.

    Raises:
        ValueError: there is no kernel that adds checksums up.
    """
    if counts is None:
        return {}
    found = {
        i: count for i, (count, _) in enumerate(zip(counts, outs, strict=True)) if count is not None
    }
    if found and not has_kernels(device):
        raise ValueError(
            f"expected no checksums to add up in launches on {device}, which has no kernels, "
            f"got {len(found)}"
        )
    return found


def one_device(found: Sequence[Layout]) -> torch.device:
    """Return the device of all layouts, or raise ``ValueError`` when there are several or none."""
    devices = {layout[3] for layout in found}
    if len(devices) != 1:
        raise ValueError(
            f"expected tensors on one device, got tensors on {sorted(map(str, devices))}"
        )
    return devices.pop()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Tensor as rows of its last dimension, in elements.

    A tensor of one dimension is one row, a scalar one word.
    """

    rows: int
    columns: int
    stride: int
    """Elements from a row to the next."""

    @property
    def is_dense(self) -> bool:
        """True if the rows follow each other without a gap."""
        return self.rows <= 1 or self.stride == self.columns


def rows_of(layout: Layout) -> Rows:
    """Return the rows of a layout.

    Raises:
        ValueError: the last dimension is not contiguous, or the leading ones do not make one row
            stride.
    """
    shape, strides = layout[:2]
    dims = [
        (size, stride) for size, stride in zip(shape[:-1], strides[:-1], strict=True) if size != 1
    ]
    columns = shape[-1] if shape else 1
    flat = all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(dims))
    if prod(shape) and not (flat and (columns == 1 or strides[-1] == 1)):
        raise ValueError(
            f"expected rows at one distance, got {describe(layout)}; call contiguous()"
        )
    return Rows(rows=prod(shape[:-1]), columns=columns, stride=dims[-1][1] if dims else columns)


def has_rows(layout: Layout) -> bool:
    """Return whether the rows of a layout are at one distance (see ``rows_of``)."""
    try:
        rows_of(layout)
    except ValueError:
        return False
    return True


def tiles(
    item: int, size: Rows, start: tuple[int, ...], step: tuple[int, ...], group: int = 0
) -> NDArray[np.int64]:
    """Return records of the tiles that cover rows × columns at several places at once.

    The places are source and output of a copy, and that of the output in its whole tensor if its
    checksum is added up; or the memory of a part, and its words' indices in the whole. ``start``:
    of the first row at each; ``step``: from a row to the next. A record, of int64, is (item,
    starts, steps, rows and columns from the tile's corner to the end, group).
    """
    # Where all are dense, tiles are full at any width.
    if size.rows > 1 and set(step) == {size.columns}:
        count = size.rows * size.columns
        full = count // TILE_COLUMNS * TILE_COLUMNS
        body = _grid(
            item,
            count // TILE_COLUMNS,
            TILE_COLUMNS,
            start,
            (TILE_COLUMNS,) * len(start),
            group,
        )
        tail = _grid(
            item, 1, count - full, tuple(s + full for s in start), (0,) * len(start), group
        )
        return np.concatenate([body, tail])
    return _grid(item, size.rows, size.columns, start, step, group)


def _grid(
    item: int, rows: int, columns: int, start: tuple[int, ...], step: tuple[int, ...], group: int
) -> NDArray[np.int64]:
    row = np.arange(0, rows, TILE_ROWS, dtype=np.int64)[:, None]
    column = np.arange(0, columns, TILE_COLUMNS, dtype=np.int64)[None, :]
    fields = [
        np.int64(item),
        *(first + row * each + column for first, each in zip(start, step, strict=True)),
        *map(np.int64, step),
        rows - row,
        columns - column,
        np.int64(group),
    ]
    return np.stack([np.broadcast_to(f, (row.size, column.size)).ravel() for f in fields], axis=1)


def addresses(lists: Iterable[Sequence[Tensor]]) -> NDArray[np.int64]:
    """Return the addresses of the first element of every tensor, [tensors, lists]."""
    return np.array([[t.data_ptr() for t in tensors] for tensors in lists], dtype=np.int64).T


class AddressTable:
    """Addresses of tensors that may move from run to run, beside those of others that stay.

    The table goes to the device again only when an address has changed: an engine's weights stay
    where they are.

    Args:
        staying: lists of tensors, each as long as the list of those that may move.

    Attributes:
        host: the addresses, int64 [tensors, lists], those that may move first in a row.
        on_device: the same on the device, without rows before the first update.
    """

    def __init__(self, *staying: Sequence[Tensor]) -> None:
        self.host = np.zeros((len(staying[0]), 1 + len(staying)), dtype=np.int64)
        self.host[:, 1:] = addresses(staying)
        self.on_device = torch.empty((0, 1 + len(staying)), dtype=torch.int64)

    def update(self, moving: Sequence[Tensor]) -> bool:
        """Look where the tensors are, and return whether any has moved since the last time."""
        found = np.fromiter(map(Tensor.data_ptr, moving), dtype=np.int64, count=len(moving))
        if len(self.on_device) and np.array_equal(found, self.host[:, 0]):
            return False
        host = self.host.copy()
        host[:, 0] = found
        # Where it fails, the next update must not take the old table for this one.
        self.on_device = to_device(host, moving[0].device)
        self.host = host
        return True


def is_aligned(*byte_counts: NDArray[np.int64] | int) -> bool:
    """Return whether every address, stride and length is a multiple of ``VECTOR`` bytes."""
    return all(not np.bitwise_or.reduce(np.ravel(b), initial=0) % VECTOR for b in byte_counts)


def to_device(table: NDArray[np.int64], device: torch.device) -> Tensor:
    """Return an int64 table on ``device`` for work that is queued next on the current stream.

    On CUDA it goes through pinned memory without waiting: the allocator keeps the pinned block
    until the copy is done.
    """
    pinned = device.type == "cuda"
    host = torch.empty(table.shape, dtype=torch.int64, pin_memory=pinned)
    host.numpy()[...] = table
    return host.to(device, non_blocking=pinned)

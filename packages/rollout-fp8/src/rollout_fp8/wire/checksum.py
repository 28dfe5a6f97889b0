"""Checksum of a tensor's bytes that adds up over the boxes that the tensor is cut into.

A tensor is a sequence of 32-bit words, row by row (a row is the last dimension; a tensor of one
dimension is one row). Where a row is not a whole number of words, each element (1 or 2 bytes) is a
word, and so it is in a tensor of one dimension, which ranks cut anywhere (biases, norms). This
depends only on the whole tensor's shape and dtype. Word i of value w_i, both unsigned, counts with
a coefficient of its own::

    checksum = sum_i w_i · (fmix32(i mod 2^32) + 1)  mod 2^64, as a signed 64-bit integer

fmix32 is the finalizer of MurmurHash3, a bijection of 32 bits (Appleby, public domain). So
coefficients are in [1, 2^32], and distinct for words less than 2^32 apart. A change of one word
always changes the checksum, and so does the exchange of two different words: their difference times
the coefficients' difference is not zero and smaller than 2^64. (With 32 bits, exchanging x and -x
would pass.) Other errors pass with a chance of about 2^-64.

The checksums of boxes that cover a tensor once add up to the tensor's, for any owners and any
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_api.weights import ShardSpec
from rollout_fp8.kernels.table import (
    VECTOR,
    Count,
    Layout,
    Rows,
    addresses,
    check_layouts,
    has_kernels,
    is_aligned,
    layouts,
    one_device,
    rows_of,
    tiles,
    to_device,
)

# Words that the plain path takes at once: its temporaries stay in the cache.
_CHUNK = 1 << 15
_VIEWS = {4: (torch.int32, np.uint32), 2: (torch.int16, np.uint16), 1: (torch.uint8, np.uint8)}


def checksum(part: Tensor, box: ShardSpec) -> int:
    """Return the checksum of ``part``, which is this box of a tensor, as signed 64 bits.

    Raises:
        ValueError: as ``ChecksumPlan``.
    """
    out = torch.zeros(1, dtype=torch.int64, device=part.device)
    checksum_many([part], [box], out, [0])
    return int(out)


def checksum_many(
    parts: Sequence[Tensor], boxes: Sequence[ShardSpec], out: Tensor, groups: Sequence[int]
) -> None:
    """Add the checksum of every part to ``out[group]``. To repeat it, keep a ``ChecksumPlan``."""
    ChecksumPlan(layouts(parts), boxes, groups).run(parts, out)


class ChecksumPlan:
    """Prepared checksums of parts of given layouts: a run costs their addresses and a launch.

    Args:
        parts: layouts of the parts; rows may lie apart, columns not.
        boxes: where each lies in its whole tensor.
        groups: the element of ``out`` that each adds to.

    Raises:
        ValueError: a part does not have the shape of its box, columns are not contiguous, or a box
            or a row stride cuts a 32-bit word.
    """

    def __init__(
        self, parts: Sequence[Layout], boxes: Sequence[ShardSpec], groups: Sequence[int]
    ) -> None:
        self._layouts = tuple(parts)
        self._groups = tuple(groups)
        self._regions = [list(_regions(*pair)) for pair in zip(parts, boxes, strict=True)]
        device = one_device(parts)
        self._launches = self._prepare(device) if has_kernels(device) else None

    def run(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Add to ``out`` (int64, on the parts' device), queued on the current stream.

        Raises:
            ValueError: the plan was not made for these parts, or memory is not aligned to words.
        """
        self.bind(parts).run(out)

    def bind(self, parts: Sequence[Tensor]) -> BoundChecksum:
        """Prepare ``run`` for the same memory again and again: it takes addresses only once.

        Raises:
            ValueError: as ``run``.
        """
        check_layouts("parts", parts, self._layouts)
        if self._launches is None:
            return BoundChecksum(self, parts, None, [])
        table = addresses((parts,))
        for work in self._launches:
            if np.bitwise_or.reduce(table[work.parts], axis=None) % work.word:
                raise ValueError(
                    "expected a part that begins at a whole word of memory; call clone()"
                )
        launches = [
            (work, work.aligned and is_aligned(table[work.parts])) for work in self._launches
        ]
        return BoundChecksum(self, parts, to_device(table, parts[0].device), launches)

    def _prepare(self, device: torch.device) -> list[_Launch]:
        kinds: dict[tuple[int, bool], dict[int, list[NDArray[np.int64]]]] = {}
        for i, regions in enumerate(self._regions):
            for region in regions:
                kind = kinds.setdefault((region.word, region.is_aligned), {})
                kind.setdefault(i, []).append(region.tiles(i, self._groups[i]))
        launches = []
        for (word, aligned), parts in kinds.items():
            records = np.concatenate([t for of_part in parts.values() for t in of_part])
            launches.append(
                _Launch(
                    word=word,
                    aligned=aligned,
                    parts=list(parts),
                    records=to_device(records, device),
                )
            )
        return launches

    def add_plain(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Do ``run`` without kernels."""
        for part, layout, regions, group in zip(
            parts, self._layouts, self._regions, self._groups, strict=True
        ):
            total = sum(_sum(_words(part, layout, region.word), region) for region in regions)
            out[group] += int(np.uint64(total % 2**64).astype(np.int64))


class BoundChecksum(NamedTuple):
    """``ChecksumPlan`` and the parts that it is run on, which it keeps."""

    plan: ChecksumPlan
    parts: Sequence[Tensor]
    table: Tensor | None
    """Addresses of the parts.

    None disables kernels.
    """
    launches: list[tuple[_Launch, bool]]
    """Each launch, and whether everything in it is aligned."""

    def run(self, out: Tensor) -> None:
        """See ``ChecksumPlan.run``."""
        if (
            out.dtype != torch.int64
            or out.device != self.parts[0].device
            or not out.is_contiguous()
        ):
            raise ValueError(
                f"out is {out.dtype} on {out.device}; "
                f"expected int64, contiguous, on {self.parts[0].device}"
            )
        if self.table is None:
            self.plan.add_plain(self.parts, out)
            return
        from rollout_fp8.kernels.checksum import launch

        for work, aligned in self.launches:
            launch(self.table, work.records, out, word=work.word, aligned=aligned)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Region:
    """Rows of a part that are one run of rows of the whole, in words of ``word`` bytes."""

    word: int
    size: Rows
    """Size of the region, with its stride in the part."""

    row: int
    """Row of the part at which the region begins."""

    first: int
    """Index in the whole of the region's first word."""

    step: int
    """Words from a row to the next in the whole."""

    @property
    def is_aligned(self) -> bool:
        """True if loads of ``VECTOR`` bytes begin and end with rows, when the part does."""
        lengths = (
            [self.size.columns * self.size.rows]
            if self.is_dense
            else [self.size.columns, self.size.stride]
        )
        return not any(n * self.word % VECTOR for n in (self.row * self.size.stride, *lengths))

    @property
    def is_dense(self) -> bool:
        """True if the region is one run of words in the part and in the whole."""
        return self.size.is_dense and (self.size.rows <= 1 or self.step == self.size.columns)

    def tiles(self, part: int, group: int) -> NDArray[np.int64]:
        """Return the kernel's records of the region."""
        return tiles(
            part,
            self.size,
            (self.row * self.size.stride, self.first),
            (self.size.stride, self.step),
            group,
        )


def count_of(part: Layout, box: ShardSpec, group: int) -> Count | None:
    """Return how a launch that writes a part adds its checksum to an element of the sums.

    None: the part has more than one region, or its words are not of four bytes.

    Raises:
        ValueError: as ``ChecksumPlan``.
    """
    found = list(_regions(part, box))
    if len(found) != 1 or found[0].word != 4:
        return None
    return Count(found[0].first, found[0].step, group)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launch:
    """Launch for parts whose words are equally long, all aligned or all not."""

    word: int
    aligned: bool
    parts: list[int]
    records: Tensor


def _regions(part: Layout, box: ShardSpec) -> Iterator[_Region]:
    """Yield the regions of a part: one, or one for each leading index of three or more axes."""
    if tuple(part[0]) != tuple(box.shape):
        raise ValueError(f"a part of shape {tuple(part[0])} is not the box {box}")
    if 0 in box.shape:
        return
    rows = rows_of(part)
    itemsize = part[2].itemsize
    ones = (1,) * (2 - len(box.shape))
    whole = ones + box.global_shape
    shape = ones + box.shape
    offset = (0,) * len(ones) + box.offset
    word = 4 if len(box.global_shape) > 1 and whole[-1] * itemsize % 4 == 0 else min(4, itemsize)
    counts = {"first column": offset[-1], "columns": shape[-1]}
    if rows.rows > 1:
        counts["row stride"] = rows.stride
    for what, count in counts.items():
        if count * itemsize % word:
            raise ValueError(
                f"{what} {count} of {part[2]} is not a whole number of {word}-byte words, in {box}"
            )

    def words(count: int) -> int:
        return count * itemsize // word

    size = Rows(rows=shape[-2], columns=words(shape[-1]), stride=words(rows.stride))
    step = words(whole[-1])
    for i, index in enumerate(np.ndindex(shape[:-2])):
        # Row of the whole, the leading dimensions flattened.
        row = 0
        for length, start, at in zip(whole[:-1], offset[:-1], (*index, 0), strict=True):
            row = row * length + start + at
        first = row * step + words(offset[-1])
        yield _Region(word=word, size=size, row=i * size.rows, first=first, step=step)


def _words(part: Tensor, layout: Layout, word: int) -> NDArray[np.unsignedinteger]:
    """Return a part in host memory as [rows, words], not copied."""
    rows = rows_of(layout)
    as_torch, as_numpy = _VIEWS[word]
    if part.data_ptr() % word:
        raise ValueError("expected a part that begins at a whole word of memory; call clone()")
    stride = rows.stride if rows.rows > 1 else rows.columns
    return (
        part.detach()
        .as_strided((rows.rows, rows.columns), (stride, 1))
        .view(as_torch)
        .numpy()
        .view(as_numpy)
    )


def _sum(words: NDArray[np.unsignedinteger], region: _Region) -> int:
    """Return the sum of the region's words times their coefficients, modulo 2^64."""
    words = words[region.row : region.row + region.size.rows]
    step = region.step
    columns = region.size.columns
    if region.is_dense:
        words = words.reshape(1, -1)
        step = 0
        columns = words.size
    height = max(1, _CHUNK // columns)
    width = min(_CHUNK, columns)
    total = 0
    for row in range(0, words.shape[0], height):
        for column in range(0, columns, width):
            chunk = words[row : row + height, column : column + width]
            start = region.first + row * step + column
            index = np.add.outer(
                np.arange(chunk.shape[0]) * step + start, np.arange(chunk.shape[1])
            )
            total += int(np.dot(chunk.astype(np.uint64).ravel(), coefficients(index).ravel()))
    return total


def coefficients(index: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the coefficients by which the words at these indices of a tensor are multiplied."""
    h = index.astype(np.uint32)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return (h ^ (h >> np.uint32(16))).astype(np.uint64) + np.uint64(1)

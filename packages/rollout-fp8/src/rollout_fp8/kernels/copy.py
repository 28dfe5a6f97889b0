"""Copies, casts included, of many tensors in one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_fp8.kernels.checksum import add_block, widen
from rollout_fp8.kernels.table import TILE_COLUMNS, TILE_ROWS

FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
RAW = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
WARPS = 8


@triton.jit
def _copy(
    addresses: tl.tensor,
    records: tl.tensor,
    broken: tl.tensor,
    sums: tl.tensor,
    dtype: tl.constexpr,
    to: tl.constexpr,
    vector: tl.constexpr,
    watch: tl.constexpr,
    count: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Copy one tile, in one program.

    ``vector``: elements of a 16-byte load, or 0 where something is not aligned. ``count``: add the
    checksum of the copy, of 16-bit elements, to ``sums``.
    """
    # A record of a copy that is counted has a third place: that of the copy in its whole tensor.
    places: tl.constexpr = 3 if count else 2
    record = records + tl.program_id(0) * (2 * places + 4)
    item = tl.load(record)
    source = tl.load(addresses + item * 2).to(tl.pointer_type(dtype))
    out = tl.load(addresses + item * 2 + 1).to(tl.pointer_type(to))
    start = tl.load(record + 1)
    out_start = tl.load(record + 2)
    step = tl.load(record + places + 1)
    out_step = tl.load(record + places + 2)
    rows = tl.load(record + 2 * places + 1)
    columns = tl.load(record + 2 * places + 2)
    if vector > 0:
        source = tl.multiple_of(source, 16)
        out = tl.multiple_of(out, 16)
        start = tl.multiple_of(start, vector)
        out_start = tl.multiple_of(out_start, vector)
        step = tl.multiple_of(step, vector)
        out_step = tl.multiple_of(out_step, vector)
        columns = tl.multiple_of(columns, vector)
    r = tl.arange(0, height)[:, None]
    c = tl.arange(0, width)[None, :]
    inside = (r < rows) & (c < columns)
    value = tl.load(source + start + r * step + c, mask=inside, other=0).to(to)
    tl.store(out + out_start + r * out_step + c, value, mask=inside)
    if count:
        # Elements beyond the edge are zeros, which add nothing.
        index = tl.load(record + 3) // 2
        index_step = tl.load(record + places + 3) // 2
        group = tl.load(record + 2 * places + 3)
        bits = widen(value.to(tl.uint16, bitcast=True), 2)
        add_block(sums, group, bits, index, index_step, height, width, 2)
    if watch:
        bits = value.to(tl.float32).to(tl.int32, bitcast=True)
        is_broken = tl.max(((bits & 0x7F800000) == 0x7F800000).to(tl.int32)) > 0
        tl.store(broken + item, 1, mask=is_broken)


def launch(
    addresses: Tensor,
    records: Tensor,
    broken: Tensor | None,
    sums: Tensor | None,
    *,
    source: torch.dtype,
    out: torch.dtype,
    aligned: bool,
) -> None:
    """Copy each source into its out, in the out's dtype, rounded to nearest even.

    ``addresses`` [n, 2] and ``records`` are made by ``table.addresses`` and ``table.tiles``. In
    ``broken`` int32 [n], 1 is stored for an item whose out, of a floating dtype, has a NaN or an
    infinity. To ``sums`` int64 the checksums of outs of 16 bits are added
    (``rollout_fp8.wire.checksum``); records then have a third place, in elements of the whole out.
    """
    watch = broken is not None
    count = sums is not None
    types = (FLOATS[source], FLOATS[out]) if watch or source != out else (RAW[source.itemsize],) * 2
    vector = 16 // max(source.itemsize, out.itemsize) if aligned else 0
    kernel: Any = _copy
    # Triton launches on the current device.
    with torch.cuda.device(addresses.device):
        kernel[(records.shape[0],)](
            addresses,
            records,
            broken if watch else addresses,
            sums if count else addresses,
            *types,
            vector,
            watch,
            count,
            TILE_ROWS,
            TILE_COLUMNS,
            num_warps=WARPS,
        )

"""Checksums of many boxes in one launch.

``rollout_fp8.wire.checksum`` defines them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_fp8.kernels.table import TILE_COLUMNS, TILE_ROWS

WORDS = {4: tl.uint32, 2: tl.uint16, 1: tl.uint8}
WARPS = 8
# The interpreter has no assembly.
_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def mixed(index: tl.tensor) -> tl.tensor:
    """Return the coefficients (uint64) of the words at these indices (uint32)."""
    h = (index ^ (index >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return (h ^ (h >> 16)).to(tl.uint64) + 1


@triton.jit
def widen(bits: tl.tensor, parts: tl.constexpr) -> tl.tensor:
    """Return unsigned integers, of which ``parts`` (4 or 2) fill 32 bits, as uint32.

    LLVM would take them from halves of 32 bits of which it leaves the other half unwritten, and
    mask that. On such programs ptxas of Triton 3.6.0 merges the unwritten half into the elements
    that are stored, too. So LLVM does not see where these come from.
    """
    tl.static_assert(parts == 4 or parts == 2)  # noqa: PLR1714 - Triton has no sets
    if not _IS_COMPILED:
        return bits.to(tl.uint32)
    if parts == 4:
        code: tl.constexpr = (
            "and.b32 $0, $4, 255; bfe.u32 $1, $4, 8, 8; bfe.u32 $2, $4, 16, 8; shr.u32 $3, $4, 24;"
        )
        return tl.inline_asm_elementwise(
            code, "=&r,=&r,=&r,=&r,r", [bits], dtype=tl.uint32, is_pure=True, pack=4
        )
    return tl.inline_asm_elementwise(
        "and.b32 $0, $2, 65535; shr.u32 $1, $2, 16;",
        "=&r,=&r,r",
        [bits],
        dtype=tl.uint32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def add_block(
    sums: tl.tensor,
    group: tl.tensor,
    bits: tl.tensor,
    index: tl.tensor,
    index_step: tl.tensor,
    height: tl.constexpr,
    width: tl.constexpr,
    parts: tl.constexpr,
) -> None:
    """Add the checksum of a block of elements to ``sums[group]``; a negative group is none.

    ``bits``: elements as ``widen`` returns them; ``parts`` neighbours, 4 or 2, are a word of 32
    bits.
    ``index``: of the first word; ``index_step``: from a row to the next.
    """
    # ptxas of Triton 3.6.0 ends with a segmentation fault on a sum over an axis of parts.
    even, odd = tl.split(tl.reshape(bits, (height, width // 2, 2)))
    words = even | (odd << (32 // parts))
    if parts == 4:
        even, odd = tl.split(tl.reshape(words, (height, width // 4, 2)))
        words = even | (odd << 16)
    r = tl.arange(0, height)[:, None].to(tl.uint32)
    c = tl.arange(0, width // parts)[None, :].to(tl.uint32)
    h = mixed(index.to(tl.uint32) + r * index_step.to(tl.uint32) + c)
    total = tl.sum(words.to(tl.uint64) * h)
    tl.atomic_add(sums + group, total.to(tl.int64), mask=group >= 0, sem="relaxed")


@triton.jit
def _checksum(
    addresses: tl.tensor,
    records: tl.tensor,
    out: tl.tensor,
    dtype: tl.constexpr,
    vector: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Add the checksum of one tile, in one program.

    ``vector``: words of a 16-byte load, or 0 where something is not aligned.
    """
    record = records + tl.program_id(0) * 8
    words = tl.load(addresses + tl.load(record)).to(tl.pointer_type(dtype))
    start = tl.load(record + 1)
    first = tl.load(record + 2)
    step = tl.load(record + 3)
    index_step = tl.load(record + 4).to(tl.uint32)
    rows = tl.load(record + 5)
    columns = tl.load(record + 6)
    group = tl.load(record + 7)
    if vector > 0:
        words = tl.multiple_of(words, 16)
        start = tl.multiple_of(start, vector)
        step = tl.multiple_of(step, vector)
        columns = tl.multiple_of(columns, vector)

    r = tl.arange(0, height)[:, None]
    c = tl.arange(0, width)[None, :]
    word = tl.load(words + start + r * step + c, mask=(r < rows) & (c < columns), other=0)
    index = first.to(tl.uint32) + r.to(tl.uint32) * index_step + c.to(tl.uint32)
    total = tl.sum(word.to(tl.uint64) * mixed(index))
    tl.atomic_add(out + group, total.to(tl.int64), sem="relaxed")


def launch(addresses: Tensor, records: Tensor, out: Tensor, *, word: int, aligned: bool) -> None:
    """Add every tile's sum into ``out`` (int64).

    ``records`` [n, 8] are made by ``table.tiles``; ``word`` is the bytes of one word.
    """
    vector = 16 // word if aligned else 0
    kernel: Any = _checksum
    # Triton launches on the current device.
    with torch.cuda.device(addresses.device):
        kernel[(records.shape[0],)](
            addresses, records, out, WORDS[word], vector, TILE_ROWS, TILE_COLUMNS, num_warps=WARPS
        )

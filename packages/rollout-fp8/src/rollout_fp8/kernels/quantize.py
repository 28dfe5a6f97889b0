"""Blockwise e4m3 quantization in one launch.

``rollout_fp8.fp8.quantize`` defines it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_fp8.kernels.checksum import add_block, widen

SOURCES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
WARPS = 8
# A thread holds 64 elements of 4 or 2 bytes, so that 2 or 3 programs fit a multiprocessor.
REGISTERS = {4: 128, 2: 80}


@triton.jit
def _quantize(
    addresses: tl.tensor,
    sizes: tl.tensor,
    blocks: tl.tensor,
    broken: tl.tensor,
    sums: tl.tensor,
    dtype: tl.constexpr,
    bits: tl.constexpr,
    vector: tl.constexpr,
    watch: tl.constexpr,
    count: tl.constexpr,
    pow2: tl.constexpr,
) -> None:
    """Quantize one 128 × 128 block, in one program.

    ``bits``: the integer as wide as ``dtype``. ``vector``: elements of a 16-byte load, or 0 where
    something is not aligned. ``count``: add the checksum of the FP8 weights to ``sums``, only where
    everything is aligned (see ``rollout_fp8.fp8.quantize.can_count``).
    """
    block = tl.load(blocks + tl.program_id(0))
    tensor = block >> 40
    row = (block >> 20) & 0xFFFFF
    column = block & 0xFFFFF
    source = tl.load(addresses + tensor * 3).to(tl.pointer_type(dtype))
    out = tl.load(addresses + tensor * 3 + 1).to(tl.pointer_type(tl.float8e4nv))
    scale_out = tl.load(addresses + tensor * 3 + 2).to(tl.pointer_type(tl.float32))
    rows = tl.load(sizes + tensor * 8)
    columns = tl.load(sizes + tensor * 8 + 1)
    step = tl.load(sizes + tensor * 8 + 2)
    out_step = tl.load(sizes + tensor * 8 + 3)
    scale_out += row * tl.load(sizes + tensor * 8 + 4) + column
    row = row * 128
    column = column * 128
    rows = (rows - row).to(tl.int32)
    columns = (columns - column).to(tl.int32)
    if vector > 0:
        # The output is hinted only as wide as a load is: a wider store would make a thread's loads
        # lie apart.
        source = tl.multiple_of(source, 16)
        out = tl.multiple_of(out, vector)
        step = tl.multiple_of(step, 16)
        out_step = tl.multiple_of(out_step, 16)
        columns = tl.multiple_of(columns, 16)

    r = tl.arange(0, 128)[:, None]
    c = tl.arange(0, 128)[None, :]
    inside = (r < rows) & (c < columns)
    x = tl.load(source + (row * step + column) + r * step + c, mask=inside, other=0.0)

    # Bits of absolute values order as the values do, infinity above all numbers and NaN above
    # infinity.
    top = tl.max(x.to(bits, bitcast=True) & (0x7FFFFFFF if bits == tl.int32 else 0x7FFF))
    top = top.to(bits).to(dtype, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    if pow2:  # 448 = 1.75 · 2^8: one more where the mantissa is above 1.75
        exponent = (top >> 23) - 8 + ((top & 0x7FFFFF) > 0x600000).to(tl.int32)
        scale = (tl.maximum(exponent, 1) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.maximum(
            tl.div_rn(top.to(tl.float32, bitcast=True), 448.0), 1.1754943508222875e-38
        )
    scale = tl.where(top == 0, 1.0, scale)
    inverse = tl.div_rn(1.0, scale)
    is_finite = top < 0x7F800000
    inverse = tl.where(is_finite, inverse, float("nan"))
    scale = tl.where(is_finite, scale, tl.where(top == 0x7F800000, float("inf"), float("nan")))

    q = (x.to(tl.float32) * inverse).to(tl.float8e4nv)
    tl.store(out + (row * out_step + column) + r * out_step + c, q, mask=inside)
    tl.store(scale_out, scale)
    if count:
        # Beyond the weight's edge there are no zeros where a block has a NaN.
        byte = tl.where(inside, widen(q.to(tl.uint8, bitcast=True), 4), 0)
        index_step = tl.load(sizes + tensor * 8 + 6)
        index = tl.load(sizes + tensor * 8 + 5) + row * index_step + column // 4
        group = tl.load(sizes + tensor * 8 + 7)
        add_block(sums, group, byte, index, index_step, 128, 128, 4)
    if watch:
        tl.store(broken + tensor, 1, mask=is_finite == 0)


def launch(
    addresses: Tensor,
    sizes: Tensor,
    blocks: Tensor,
    broken: Tensor | None,
    sums: Tensor | None,
    *,
    source: torch.dtype,
    aligned: bool,
    pow2: bool,
) -> None:
    """Quantize every block of ``blocks`` (int64: tensor, row and column in 24, 20 and 20 bits).

    ``addresses`` [n, 3]: weight, output, scales. ``sizes`` [n, 8]: rows, columns, row strides of
    the three; index of the output's first word in the whole weight, words from a row to the next,
    and the element of ``sums`` (-1: none). ``broken`` int32 [n]: 1 is stored for a weight with a
    NaN or an infinity. ``sums`` int64: outputs' checksums are added (see
    ``rollout_fp8.wire.checksum``), which takes aligned memory.
    """
    watch = broken is not None
    count = sums is not None
    assert aligned or not count, "ptxas assembles that variant wrongly"
    kernel: Any = _quantize
    size = source.itemsize
    bits = tl.int32 if size == 4 else tl.int16
    vector, registers = (16 // size, REGISTERS[size]) if aligned else (0, None)
    # Triton launches on the current device.
    with torch.cuda.device(addresses.device):
        kernel[(blocks.numel(),)](
            addresses,
            sizes,
            blocks,
            broken if watch else blocks,
            sums if count else blocks,
            SOURCES[source],
            bits,
            vector,
            watch,
            count,
            pow2,
            num_warps=WARPS,
            maxnreg=registers,
        )

"""Blockwise FP8 as vLLM and SGLang serve it: e4m3 weights, one fp32 scale a block of 128 × 128.

For a block with the largest magnitude ``amax``, in fp32 arithmetic::

    scales="fp32"   s = max(amax / 448, 2^-126)
    scales="pow2"   s = max(2^k, 2^-126), the smallest k with amax <= 448 · 2^k, exactly
    q = e4m3(w · (1 / s)), rounded to nearest, ties to even; 448 is e4m3's largest number

- 1 / s is rounded once a block and is never subnormal, so every w · (1/s) is within 2^-22 of w / s
  and rounds to a number of at most 448: nothing has to be clamped, and nothing overflows to e4m3's
  NaN.
- |w - q · s| <= max(2^-4 · |w|, 2^-10 · s) · (1 + 2^-19): half a step of 3 mantissa bits, or half a
  subnormal step. (With |w| near 2^128, the end of fp32, q · s may lie beyond it.)
- A block of zeros has scale 1. A block at the edge covers what exists of it, so a shard whose rows
  and columns begin at multiples of 128 is quantized as the whole is.
- A NaN or an infinity in a block makes its scale NaN or infinite and its weights NaN. A plan's
  ``broken`` flags say which weights had one without waiting for the device.

On CUDA the same arithmetic runs in one Triton launch for many tensors, equal bit for bit. Format:
Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (arXiv:2209.05433); blocks and scales as
in DeepSeek-V3 (arXiv:2412.19437, 3.3.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rollout_fp8.kernels.table import (
    VECTOR,
    AddressTable,
    Count,
    Layout,
    addresses,
    check_counts,
    check_layouts,
    describe,
    has_kernels,
    is_aligned,
    layouts,
    one_device,
    rows_of,
    to_device,
)
from rollout_fp8.wire.format import BLOCK

ScalePolicy = Literal["fp32", "pow2"]
E4M3_MAX = 448.0
# The smallest normal fp32 number: its reciprocal is exact, and no device flushes it to zero.
SMALLEST_SCALE = 2.0**-126
SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Rows that the plain path takes at once: its temporaries stay small.
_PANEL = 8 * BLOCK
# The kernel leaves out a negative group.
_NOT_COUNTED = Count(0, 0, -1)


class Quantized(NamedTuple):
    """Weight float8_e4m3fn [N, K] and its scales float32 [ceil(N/128), ceil(K/128)]."""

    weight: Tensor
    scales: Tensor


def scales_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of the scales of a weight [N, K]."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def empty_like(weight: Tensor) -> Quantized:
    """Return uninitialized tensors for a quantized weight [N, K] and its scales, on its device."""
    scales = weight.new_empty(scales_shape(weight.shape), dtype=torch.float32)
    return Quantized(
        torch.empty_like(weight, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format),
        scales,
    )


def quantize(weight: Tensor, *, scales: ScalePolicy) -> Quantized:
    """Quantize one weight [N, K] in fp32, bf16 or fp16, its last dimension contiguous.

    Raises:
        ValueError: the weight has another layout or dtype.
    """
    result = empty_like(weight)
    quantize_into([weight], [result.weight], [result.scales], scales=scales)
    return result


def quantize_into(
    weights: Sequence[Tensor],
    out: Sequence[Tensor],
    scales_out: Sequence[Tensor],
    *,
    scales: ScalePolicy,
) -> None:
    """Quantize many weights into given tensors as a ``QuantizePlan`` does.

    The plans are kept.
    """
    if weights:
        _plan(layouts(weights), layouts(out), layouts(scales_out), scales).fill(
            weights, out, scales_out
        )


def can_count(weight: Tensor, out: Tensor) -> bool:
    """Return whether a launch that quantizes a weight into ``out`` can add up its checksum.

    Both have to be aligned. Of the variants for tensors that are not, ptxas of Triton 3.6.0
    assembles the one for float32 wrongly: where a pair of FP8 weights is both stored and counted,
    it stores a register that the pair was never written to.
    """
    return _is_aligned(*layouts([weight, out])) and is_aligned(addresses([[weight], [out]]))


class QuantizePlan:
    """Prepared quantization of tensors of given layouts.

    A run costs the tensors' addresses and one launch for each dtype.

    Args:
        weights: fp32, bf16 or fp16 [N, K] each. Rows may lie apart, columns may not.
        out: float8_e4m3fn [N, K] each, laid out likewise.
        scales_out: float32 [ceil(N/128), ceil(K/128)] each, laid out likewise.
        scales: fp32, or powers of two.
        counts: for each output, how its checksum is added up, or None; None stands for None for
            all. It is for devices with kernels, and for tensors of which ``can_count`` is true.

    Raises:
        ValueError: tensors have other shapes, layouts or dtypes, or are counted and not aligned.

    Tensors that are not aligned to 16 bytes, or whose columns and row strides are not multiples of
    16, are quantized correctly too, but go through slower launches of their own.
    """

    def __init__(
        self,
        weights: Sequence[Layout],
        out: Sequence[Layout],
        scales_out: Sequence[Layout],
        *,
        scales: ScalePolicy,
        counts: Sequence[Count | None] | None = None,
    ) -> None:
        if not len(weights) == len(out) == len(scales_out):
            raise ValueError(
                f"{len(weights)} weights, {len(out)} outputs and {len(scales_out)} scales"
            )
        for i, (weight, q, s) in enumerate(zip(weights, out, scales_out, strict=True)):
            _check(f"weights[{i}]", weight, weight[0], SOURCE_DTYPES)
            _check(f"out[{i}]", q, weight[0], (torch.float8_e4m3fn,))
            _check(f"scales_out[{i}]", s, scales_shape(weight[0]), (torch.float32,))
        self._layouts = (tuple(weights), tuple(out), tuple(scales_out))
        self._pow2 = scales == "pow2"
        device = one_device([*weights, *out, *scales_out])
        counted = check_counts(counts, out, device)
        for i in counted:
            if not _is_aligned(weights[i], out[i]):
                raise ValueError(
                    f"out[{i}] cannot be counted: expected columns and row strides in multiples "
                    f"of {VECTOR}, got {describe(out[i])}, and {describe(weights[i])}"
                )
        self._launches = None
        if has_kernels(device):
            self._launches = _launches(*self._layouts, counted, device)

    def run(
        self,
        weights: Sequence[Tensor],
        out: Sequence[Tensor],
        scales_out: Sequence[Tensor],
        broken: Tensor | None = None,
    ) -> None:
        """Queue the quantization on the current stream.

        ``broken`` int32 [n] is set to 1 for each weight with a NaN or an infinity.

        Raises:
            ValueError: the plan was not made for these tensors.
        """
        check_layouts("weights", weights, self._layouts[0])
        check_layouts("out", out, self._layouts[1])
        check_layouts("scales_out", scales_out, self._layouts[2])
        self.fill(weights, out, scales_out, broken)

    def fill(
        self,
        weights: Sequence[Tensor],
        out: Sequence[Tensor],
        scales_out: Sequence[Tensor],
        broken: Tensor | None = None,
    ) -> None:
        """Do ``run`` for a caller that has compared the layouts itself."""
        self.bind(out, scales_out).run(weights, broken)

    def bind(self, out: Sequence[Tensor], scales_out: Sequence[Tensor]) -> BoundQuantize:
        """Return the quantization into these tensors, whose addresses are then read only once.

        Raises:
            ValueError: an output is counted and does not begin at an aligned address.
        """
        return BoundQuantize(out, scales_out, self._launches, pow2=self._pow2)


class BoundQuantize:
    """``QuantizePlan`` and the tensors that it quantizes into, which it keeps.

    The weights may be others at each run.
    """

    def __init__(
        self,
        out: Sequence[Tensor],
        scales_out: Sequence[Tensor],
        launches: list[_Launch] | None,
        *,
        pow2: bool,
    ) -> None:
        self._out = out
        self._scales_out = scales_out
        self._launches = launches
        self._pow2 = pow2
        self._table = None if launches is None else AddressTable(out, scales_out)
        # Of each launch: whether everything in it is aligned.
        self._aligned: list[bool] = []
        # Weights that a launch counts.
        self._counted = [i for work in launches or () if work.counted for i in work.tensors]
        if self._counted and not is_aligned(addresses([[out[i] for i in self._counted]])):
            raise ValueError(
                f"expected counted outputs at addresses that are multiples of {VECTOR}"
            )

    def run(
        self,
        weights: Sequence[Tensor],
        broken: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> None:
        """Queue the quantization of weights whose layouts the caller has compared.

        ``sums`` int64: checksums of the outputs that are counted are added, of what is computed and
        not of what is read back. A counted weight that is no longer at an aligned address is copied
        first.
        """
        if self._table is None or self._launches is None:
            for i, (weight, q, s) in enumerate(
                zip(weights, self._out, self._scales_out, strict=True)
            ):
                _quantize_plain(weight, q, s, pow2=self._pow2)
                if broken is not None:
                    broken[i] |= ~s.isfinite().all()
            return
        from rollout_fp8.kernels.quantize import launch

        if self._table.update(weights):
            if not is_aligned(self._table.host[self._counted, 0]):
                weights = self._align(weights)
                self._table.update(weights)
            self._aligned = [
                work.aligned and is_aligned(self._table.host[work.tensors, :2])
                for work in self._launches
            ]
        for work, aligned in zip(self._launches, self._aligned, strict=True):
            launch(
                self._table.on_device,
                work.sizes,
                work.blocks,
                broken,
                sums if work.counted else None,
                source=work.dtype,
                aligned=aligned,
                pow2=self._pow2,
            )

    def _align(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the weights, copies of counted ones that are not at an aligned address among them.

        The copies have the same strides.
        """
        aligned = list(weights)
        for i in self._counted:
            weight = weights[i]
            if weight.data_ptr() % VECTOR:
                copy = torch.empty_strided(
                    weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device
                )
                aligned[i] = copy.copy_(weight)
        return aligned


@lru_cache(maxsize=128)
def _plan(
    weights: tuple[Layout, ...],
    out: tuple[Layout, ...],
    scales_out: tuple[Layout, ...],
    scales: ScalePolicy,
) -> QuantizePlan:
    return QuantizePlan(weights, out, scales_out, scales=scales)


def _check(
    what: str, layout: Layout, shape: Sequence[int], dtypes: tuple[torch.dtype, ...]
) -> None:
    if len(layout[0]) != 2 or tuple(layout[0]) != tuple(shape) or layout[2] not in dtypes:
        wanted = " or ".join(map(str, dtypes))
        raise ValueError(
            f"{what} is {describe(layout)}; expected {wanted} {tuple(shape)} of two dimensions"
        )
    rows_of(layout)


def _is_aligned(weight: Layout, out: Layout) -> bool:
    """Return whether the kernel's ``VECTOR``-byte accesses fit, if both tensors are aligned."""
    rows = rows_of(weight)
    return not any(n % VECTOR for n in (rows.columns, rows.stride, rows_of(out).stride))


class _Launch(NamedTuple):
    """Launch for tensors of one dtype, all aligned or all not, and all counted or none."""

    dtype: torch.dtype
    aligned: bool
    counted: bool
    tensors: list[int]
    sizes: Tensor
    """int64 [all tensors, 8] on the device."""
    blocks: Tensor
    """int64 [blocks of these tensors] on the device."""


def _launches(
    weights: Sequence[Layout],
    out: Sequence[Layout],
    scales_out: Sequence[Layout],
    counts: Mapping[int, Count],
    device: torch.device,
) -> list[_Launch]:
    steps = [
        [rows_of(layout).stride for layout in three]
        for three in zip(weights, out, scales_out, strict=True)
    ]
    sizes = np.array(
        [
            [*weight[0], *step, *counts.get(i, _NOT_COUNTED)]
            for i, (weight, step) in enumerate(zip(weights, steps, strict=True))
        ],
        dtype=np.int64,
    )
    sizes_on_device = to_device(sizes, device)
    kinds: dict[tuple[torch.dtype, bool, bool], list[int]] = {}
    for i, weight in enumerate(weights):
        kind = weight[2], _is_aligned(weight, out[i]), i in counts
        kinds.setdefault(kind, []).append(i)
    works = []
    for kind, tensors in kinds.items():
        blocks = np.concatenate([_blocks(i, scales_out[i][0]) for i in tensors])
        if blocks.size:
            works.append(_Launch(*kind, tensors, sizes_on_device, to_device(blocks, device)))
    return works


def _blocks(tensor: int, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return tensor, row and column of every block in 24, 20 and 20 bits of an int64.

    One load tells a program its place.
    """
    row, column = np.indices(shape, dtype=np.int64).reshape(2, -1)
    return (tensor << 40) | (row << 20) | column


@torch.no_grad()
def _quantize_plain(weight: Tensor, out: Tensor, scales_out: Tensor, *, pow2: bool) -> None:
    for row in range(0, weight.shape[0], _PANEL):
        panel = weight[row : row + _PANEL]
        end = row + _PANEL
        rows, columns = panel.shape
        padded = F.pad(panel.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
        # [row block, row, column block, column]
        blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scale = _scale(blocks.abs().amax(dim=(1, 3)), pow2=pow2)
        poisoned = ~scale.isfinite()[:, None, :, None]
        scaled = (blocks * (1.0 / scale)[:, None, :, None]).masked_fill(poisoned, torch.nan)
        out[row:end] = scaled.to(torch.float8_e4m3fn).reshape(padded.shape)[:rows, :columns]
        scales_out[row // BLOCK : -(-end // BLOCK)] = scale


def _scale(amax: Tensor, *, pow2: bool) -> Tensor:
    """Return the fp32 scales of blocks by largest magnitude.

    They are NaN or infinite where ``amax`` is.
    """
    if pow2:
        # amax = mantissa · 2^exponent, mantissa in [0.5, 1); 448 = 0.875 · 2^9
        mantissa, exponent = torch.frexp(amax)
        power = (exponent - 9 + (mantissa > 0.875)).clamp(min=-126)
        scale = torch.ldexp(torch.ones_like(amax), power)
    else:
        scale = (amax / E4M3_MAX).clamp(min=SMALLEST_SCALE)
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(amax.isfinite(), scale, torch.where(amax.isnan(), torch.nan, torch.inf))


def dequantize(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply ``weight`` float8_e4m3fn [N, K] by its fp32 ``scales``, and round to ``dtype``."""
    rows, columns = weight.shape
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (weight.float() * spread).to(dtype)

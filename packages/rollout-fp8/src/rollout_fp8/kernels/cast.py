"""Casts and copies of many tensors at once: one launch on CUDA, plain copies on other devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_fp8.kernels.table import (
    VECTOR,
    AddressTable,
    Count,
    Layout,
    Rows,
    check_counts,
    check_layouts,
    describe,
    has_kernels,
    is_aligned,
    layouts,
    one_device,
    rows_of,
    tiles,
    to_device,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def cast_into(sources: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Copy each source into its out as a ``CastPlan`` does.

    The plans are kept.
    """
    if sources:
        _plan(layouts(sources), layouts(outs)).fill(sources, outs)


class CastPlan:
    """Prepared copies of tensors of given layouts.

    A run costs the tensors' addresses and one launch for each pair of dtypes.

    Args:
        sources: any dtype when the out has the same, else fp32, bf16 or fp16. Rows may lie apart,
            columns may not.
        outs: the same shapes. Casts round to nearest even; too large values become infinite, a NaN
            stays NaN.
        counts: for each out of two bytes an element, how its checksum is added up, or None; None
            stands for None for all. It is for devices with kernels.

    Raises:
        ValueError: tensors have other shapes, layouts or dtypes.

    Source and out must not overlap.
    """

    def __init__(
        self,
        sources: Sequence[Layout],
        outs: Sequence[Layout],
        counts: Sequence[Count | None] | None = None,
    ) -> None:
        if len(sources) != len(outs):
            raise ValueError(f"{len(sources)} sources and {len(outs)} outs")
        for i, (source, out) in enumerate(zip(sources, outs, strict=True)):
            is_cast = source[2] in FLOATS and out[2] in FLOATS
            if source[0] != out[0] or not (source[2] == out[2] or is_cast):
                raise ValueError(
                    f"no cast of sources[{i}], {describe(source)}, into {describe(out)}"
                )
            rows_of(source)
            # Without a GPU other layouts would do, but a plan means the same everywhere.
            rows_of(out)
        self._layouts = (tuple(sources), tuple(outs))
        device = one_device([*sources, *outs])
        counted = check_counts(counts, outs, device)
        self._launches = None
        if has_kernels(device):
            self._launches = _launches(sources, outs, counted, device)

    def run(
        self, sources: Sequence[Tensor], outs: Sequence[Tensor], broken: Tensor | None = None
    ) -> None:
        """Queue the copies on the current stream.

        ``broken`` int32 [n] is set to 1 for each out that then holds a NaN or an infinity.

        Raises:
            ValueError: the plan was not made for these tensors.
        """
        check_layouts("sources", sources, self._layouts[0])
        check_layouts("outs", outs, self._layouts[1])
        self.fill(sources, outs, broken)

    def fill(
        self, sources: Sequence[Tensor], outs: Sequence[Tensor], broken: Tensor | None = None
    ) -> None:
        """Do ``run`` for a caller that has compared the layouts itself."""
        self.bind(outs).run(sources, broken)

    def bind(self, outs: Sequence[Tensor]) -> BoundCast:
        """Return the casts into these tensors, whose addresses are then read only once."""
        return BoundCast(outs, self._launches)


class BoundCast:
    """``CastPlan`` and the tensors that it casts into, which it keeps.

    The sources may be others at each run.
    """

    def __init__(self, outs: Sequence[Tensor], launches: list[_Launch] | None) -> None:
        self._outs = outs
        self._launches = launches
        self._table = None if launches is None else AddressTable(outs)
        # Of each launch: whether everything in it is aligned.
        self._aligned: list[bool] = []

    def run(
        self,
        sources: Sequence[Tensor],
        broken: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> None:
        """Queue the copies of sources whose layouts the caller has compared.

        ``sums`` int64: checksums of the outs that are counted are added, of what is computed and
        not of what is read back.
        """
        if self._table is None or self._launches is None:
            with torch.no_grad():
                for i, (source, out) in enumerate(zip(sources, self._outs, strict=True)):
                    out.copy_(source)
                    if broken is not None:
                        broken[i] |= ~out.isfinite().all()
            return
        from rollout_fp8.kernels.copy import launch

        if self._table.update(sources):
            self._aligned = [
                work.aligned and is_aligned(self._table.host[work.items]) for work in self._launches
            ]
        for work, aligned in zip(self._launches, self._aligned, strict=True):
            launch(
                self._table.on_device,
                work.records,
                broken,
                sums if work.counted else None,
                source=work.dtypes[0],
                out=work.dtypes[1],
                aligned=aligned,
            )


@lru_cache(maxsize=128)
def _plan(sources: tuple[Layout, ...], outs: tuple[Layout, ...]) -> CastPlan:
    return CastPlan(sources, outs)


class _Launch(NamedTuple):
    """Launch for copies from one dtype to one dtype, all aligned or all not."""

    dtypes: tuple[torch.dtype, torch.dtype]
    aligned: bool
    counted: bool
    items: list[int]
    records: Tensor
    """int64 [tiles, 8] on the device, and [tiles, 10] where checksums are added."""


def _launches(
    sources: Sequence[Layout],
    outs: Sequence[Layout],
    counts: Mapping[int, Count],
    device: torch.device,
) -> list[_Launch]:
    kinds: dict[
        tuple[tuple[torch.dtype, torch.dtype], bool, bool], dict[int, NDArray[np.int64]]
    ] = {}
    for i, (source, out) in enumerate(zip(sources, outs, strict=True)):
        a = rows_of(source)
        b = rows_of(out)
        dtypes = source[2], out[2]
        if 0 in source[0]:
            continue
        start: tuple[int, ...] = (0, 0)
        step: tuple[int, ...] = (a.stride, b.stride)
        group = 0
        if (count := counts.get(i)) is not None:
            assert out[2].itemsize == 2, "the kernel adds up words of two elements"
            start = (*start, 2 * count.first)
            step = (*step, 2 * count.step)
            group = count.group
        kind = dtypes, _is_aligned(a, step, dtypes), count is not None
        kinds.setdefault(kind, {})[i] = tiles(i, a, start, step, group)
    return [
        _Launch(*kind, list(items), to_device(np.concatenate(list(items.values())), device))
        for kind, items in kinds.items()
    ]


def _is_aligned(size: Rows, step: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> bool:
    """Return whether the kernel's ``VECTOR``-byte accesses fit the tiles, if tensors are aligned.

    ``step``: from a row to the next at each of the places that ``tiles`` gets; source and out come
    first, and memory is accessed only there.
    """
    elements = VECTOR // min(d.itemsize for d in dtypes)
    # As in ``tiles``.
    is_dense = size.rows <= 1 or set(step) == {size.columns}
    lengths = [size.rows * size.columns] if is_dense else [size.columns, *step[:2]]
    return not any(n % elements for n in lengths)

"""Every variant of every kernel compiles for a GPU, which does not have to be there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rollout_fp8.kernels import checksum, copy, quantize
from rollout_fp8.kernels.table import TILE_COLUMNS, TILE_ROWS, VECTOR

BOTH = (True, False)
# Hopper and Blackwell.
CAPABILITIES = (90, 100)


def compile_kernel(
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    **options: Any,
) -> str:
    """Return the assembly of a kernel, and assemble it."""
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        pointers | dict.fromkeys(constants, "constexpr"),
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in pointers},
    )
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=options)
    assert compiled.asm["cubin"]
    return compiled.asm["ptx"]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("is_watched", "is_counted"), [*itertools.product(BOTH, repeat=2)])
@pytest.mark.parametrize("is_aligned", BOTH)
@pytest.mark.parametrize("source", quantize.SOURCES, ids=str)
def test_quantization_compiles(
    source: torch.dtype, is_aligned: bool, is_watched: bool, is_counted: bool, capability: int
) -> None:
    size = source.itemsize
    pointers = dict.fromkeys(("addresses", "sizes", "blocks", "sums"), "*i64")
    pointers["broken"] = "*i32" if is_watched else "*i64"
    options = {"maxnreg": quantize.REGISTERS[size]} if is_aligned else {}
    for pow2 in BOTH:
        text = compile_kernel(
            quantize._quantize,
            pointers,
            {
                "dtype": quantize.SOURCES[source],
                "bits": tl.int32 if size == 4 else tl.int16,
                "vector": VECTOR // size if is_aligned else 0,
                "watch": is_watched,
                "count": is_counted,
                "pow2": pow2,
            },
            capability,
            num_warps=quantize.WARPS,
            **options,
        )
        assert ("atom.global" in text) == is_counted


class Copies(NamedTuple):
    """Copies from one type to another."""

    source: Any
    out: Any
    widest: int
    """Bytes of an element of the wider type."""

    is_watched: bool
    is_counted: bool

    def __str__(self) -> str:
        watched = " watched" if self.is_watched else ""
        return f"{self.source}-{self.out}{watched}{' counted' if self.is_counted else ''}"


def list_copies() -> Iterator[Copies]:
    """Yield every kind of copy: numbers are watched or cast, and bits are moved as they are.

    Checksums are added up for outs of two bytes.
    """
    for (source, ours), (out, theirs) in itertools.product(copy.FLOATS.items(), repeat=2):
        for is_watched in BOTH if source != out else (True,):
            for is_counted in BOTH if out.itemsize == 2 else (False,):
                widest = max(source.itemsize, out.itemsize)
                yield Copies(ours, theirs, widest, is_watched, is_counted)
    for size, raw in copy.RAW.items():
        for is_counted in BOTH if size == 2 else (False,):
            yield Copies(raw, raw, size, False, is_counted)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("is_aligned", BOTH)
@pytest.mark.parametrize("copies", [*list_copies()], ids=str)
def test_copies_compile(copies: Copies, is_aligned: bool, capability: int) -> None:
    text = compile_kernel(
        copy._copy,
        dict.fromkeys(("addresses", "records", "sums"), "*i64")
        | {"broken": "*i32" if copies.is_watched else "*i64"},
        {
            "dtype": copies.source,
            "to": copies.out,
            "vector": VECTOR // copies.widest if is_aligned else 0,
            "watch": copies.is_watched,
            "count": copies.is_counted,
            "height": TILE_ROWS,
            "width": TILE_COLUMNS,
        },
        capability,
        num_warps=copy.WARPS,
    )
    assert ("atom.global" in text) == copies.is_counted


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("is_aligned", BOTH)
@pytest.mark.parametrize("word", checksum.WORDS)
def test_checksums_compile(word: int, is_aligned: bool, capability: int) -> None:
    compile_kernel(
        checksum._checksum,
        dict.fromkeys(("addresses", "records", "out"), "*i64"),
        {
            "dtype": checksum.WORDS[word],
            "vector": VECTOR // word if is_aligned else 0,
            "height": TILE_ROWS,
            "width": TILE_COLUMNS,
        },
        capability,
        num_warps=checksum.WARPS,
    )

"""Every variant of every kernel compiles for a GPU, which does not have to be there."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from rollout_fp8.kernels import checksum, copy, quantize  # noqa: E402
from rollout_fp8.kernels.table import TILE_COLUMNS, TILE_ROWS  # noqa: E402

BOTH = list(itertools.product((True, False), repeat=2))
# Hopper and Blackwell.
CAPABILITIES = (90, 100)
WIDTHS = {tl.float32: 4, tl.bfloat16: 2, tl.float16: 2, tl.uint8: 1, tl.uint16: 2, tl.uint32: 4}


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
    compiled = triton.compile(source, target=target, options={"num_warps": 8} | options)
    assert compiled.asm["cubin"]
    return compiled.asm["ptx"]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("is_watched", "is_counted"), BOTH)
@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("dtype", [tl.float32, tl.bfloat16, tl.float16], ids=str)
def test_quantization_compiles(
    dtype: Any, is_aligned: bool, is_watched: bool, is_counted: bool, capability: int
) -> None:
    size = WIDTHS[dtype]
    pointers = dict.fromkeys(("addresses", "sizes", "blocks", "sums"), "*i64")
    pointers["broken"] = "*i32" if is_watched else "*i64"
    options = {"maxnreg": quantize.REGISTERS[size]} if is_aligned else {}
    for pow2 in (True, False):
        text = compile_kernel(
            quantize._quantize,
            pointers,
            {
                "dtype": dtype,
                "bits": tl.int32 if size == 4 else tl.int16,
                "vector": 16 // size if is_aligned else 0,
                "watch": is_watched,
                "count": is_counted,
                "pow2": pow2,
            },
            capability,
            **options,
        )
        assert ("atom.global" in text) == is_counted


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("is_aligned", "is_watched"), BOTH)
@pytest.mark.parametrize(
    ("source", "out"),
    [
        (tl.float32, tl.float32),
        (tl.float32, tl.bfloat16),
        (tl.bfloat16, tl.float32),
        (tl.bfloat16, tl.bfloat16),
        (tl.uint8, tl.uint8),
        (tl.uint16, tl.uint16),
    ],
    ids=str,
)
def test_copies_compile(
    source: Any, out: Any, is_aligned: bool, is_watched: bool, capability: int
) -> None:
    for is_counted in (False, True) if WIDTHS[out] == 2 else (False,):
        compile_kernel(
            copy._copy,
            dict.fromkeys(("addresses", "records", "sums"), "*i64")
            | {"broken": "*i32" if is_watched else "*i64"},
            {
                "dtype": source,
                "to": out,
                "vector": 16 // max(WIDTHS[source], WIDTHS[out]) if is_aligned else 0,
                "watch": is_watched,
                "count": is_counted,
                "height": TILE_ROWS,
                "width": TILE_COLUMNS,
            },
            capability,
        )


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("word", checksum.WORDS)
def test_checksums_compile(word: int, is_aligned: bool, capability: int) -> None:
    compile_kernel(
        checksum._checksum,
        dict.fromkeys(("addresses", "records", "out"), "*i64"),
        {
            "dtype": checksum.WORDS[word],
            "vector": 16 // word if is_aligned else 0,
            "height": TILE_ROWS,
            "width": TILE_COLUMNS,
        },
        capability,
    )

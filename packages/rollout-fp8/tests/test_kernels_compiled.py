"""Every variant of every kernel compiles for a GPU, which does not have to be there."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
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
# Registers of programs, except those of the hardware, which have no number.
REGISTER = re.compile(r"%[a-z]+\d+\b")
# Instruction, after its condition if it has one: what it writes first, and what it reads.
INSTRUCTION = re.compile(r"(?:@!?(%p\d+)\s+)?([a-z][\w.:]*)\s+(\{[^}]*\}|[^,]*)(.*)")
# Instructions that write no register.
READERS = ("st.", "red.", "bar.", "bra", "call", "ret")
# Instruction of the hardware, after its address and its condition: its name and its operands.
HARDWARE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s+(.*?)\s*;")
# Registers of a result or a stored value, by a part of the name; otherwise it is one.
REGISTERS = {"64": 2, "WIDE": 2, "128": 4}
# Instructions that move registers or take parts of them, and those whose first operand is read.
MOVES = ("PRMT", "SHF", "MOV", "IMAD", "LOP3", "SEL")
WITHOUT_RESULT = ("ST", "STS", "STL", "RED", "BRA")


def compile_kernel(
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    **options: Any,
) -> Any:
    """Compile a kernel. Its assembly reads nothing that it has not written."""
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
    assert not find_unwritten(compiled.asm["ptx"])
    return compiled


def find_unwritten(text: str) -> set[str]:
    """Return the registers that a program reads and never writes.

    ptxas of Triton 3.6.0 assembled such programs wrongly, although they masked what they had read:
    half of each word of stored FP8 weights came from a register that had to do with something else.
    """
    written = set[str]()
    read = set[str]()
    for line in re.split(r"[;\n]", re.sub("//.*", "", text)):
        found = INSTRUCTION.match(line.strip(" \t{"))
        if found is None:
            continue
        condition, name, first, rest = found.groups()
        read.update(REGISTER.findall(f"{condition} {rest}"))
        (read if name.startswith(READERS) else written).update(REGISTER.findall(first))
    return read - written


def test_registers_that_no_instruction_writes_are_found() -> None:
    text = """
        .reg .b16 %rs<3>;
        ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];
        mov.b32 {_, %r3}, %rd1; // %r9
        @%p1 st.global.b32 [ %rd2 + 0 ], { %r1 };
        mov.u32 %r4, %tid.x; mov.u32 %r6, %r7;
        mov.b32 %r5, {%rs1, %rs2};
    """
    assert find_unwritten(text) == {"%rd1", "%p1", "%rd2", "%r7", "%rs1", "%rs2"}


def disassemble(cubin: bytes, folder: Path) -> str:
    """Return what the hardware runs, in the words of Triton's own disassembler."""
    file = folder / "cubin"
    file.write_bytes(cubin)
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(file)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Stores(NamedTuple):
    """Instructions of a program of the hardware."""

    converted: int
    """Stores of nothing but conversions to FP8, or parts of them."""

    other: int
    """Stores of anything else."""

    foreign: int
    """Conversions that are merged with something that is no conversion."""


def find_stores(program: str) -> Stores:
    """Count stores by where their registers come from, in the order in which they are written.

    ptxas of Triton 3.6.0 made a variant that stored registers to which nothing had been written,
    the stack's pointer among them, and others that merged them with what they stored.
    """
    converted = set[str]()
    counts = {"converted": 0, "other": 0, "foreign": 0}
    for name, text in HARDWARE.findall(program):
        kind, *details = name.split(".")
        operands = [operand.replace(".reuse", "").strip() for operand in text.split(",")]
        width = max([1, *(REGISTERS[one] for one in details if one in REGISTERS)])
        target = operands[-1] if kind == "STG" else operands[0]
        if not re.fullmatch(r"R\d+", target) or kind in WITHOUT_RESULT:
            counts["other"] += kind == "STG"
            continue
        registers = {f"R{int(target[1:]) + i}" for i in range(width)}
        if kind == "STG":
            counts["converted" if registers <= converted else "other"] += 1
        elif kind == "F2FP" and "E4M3" in details:
            counts["foreign"] += operands[3] != "RZ" and operands[3] not in converted
            converted |= registers
        else:
            read = set(re.findall(r"\bR\d+\b", " ".join(operands[1:])))
            is_part = kind in MOVES and bool(read) and read <= converted
            converted = converted | registers if is_part else converted - registers
    return Stores(**counts)


def test_stores_are_counted_by_where_their_registers_come_from() -> None:
    merge = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"
    program = f"""
        /*0000*/ LDC R1, c[0x0][0x28] ; /* 0x00 */
        /*0010*/ {merge} R2, R4, R5, RZ ;
        /*0020*/ {merge} R3, R6, R7, R2.reuse ;
        /*0030*/ @P0 STG.E.64 desc[UR4][R8.64], R2 ;
        /*0040*/ PRMT R4, R3, 0x7771, RZ ;
        /*0050*/ @!P1 STG.E.U8 desc[UR4][R8.64+0x4], R4 ;
        /*0060*/ @P1 STG.E.U8 desc[UR4][R8.64], R1 ;
        /*0070*/ IMAD.WIDE.U32 R2, R4, UR5, R8 ;
        /*0080*/ STG.E.U8 desc[UR4][R8.64], R3 ;
        /*0090*/ STG.E desc[UR4][R8.64], RZ ;
        /*00a0*/ {merge} R5, R6, R7, R2 ;
        /*00b0*/ EXIT ;
    """
    assert find_stores(program) == Stores(converted=2, other=3, foreign=1)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("is_watched", BOTH)
@pytest.mark.parametrize(
    ("is_aligned", "is_counted"), [(True, True), (True, False), (False, False)]
)
@pytest.mark.parametrize("source", quantize.SOURCES, ids=str)
def test_quantization_compiles(
    source: torch.dtype,
    is_aligned: bool,
    is_watched: bool,
    is_counted: bool,
    capability: int,
    tmp_path: Path,
) -> None:
    """Weights are counted only where they are aligned."""
    size = source.itemsize
    pointers = dict.fromkeys(("addresses", "sizes", "blocks", "sums"), "*i64")
    pointers["broken"] = "*i32" if is_watched else "*i64"
    options = {"maxnreg": quantize.REGISTERS[size]} if is_aligned else {}
    for pow2 in BOTH:
        compiled = compile_kernel(
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
        text = compiled.asm["ptx"]
        assert ("atom.global" in text) == is_counted
        # The scale is stored, too, and the flag.
        found = find_stores(disassemble(compiled.asm["cubin"], tmp_path))
        assert found == Stores(text.count("st.global") - 1 - is_watched, 1 + is_watched, 0)


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
    compiled = compile_kernel(
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
    assert ("atom.global" in compiled.asm["ptx"]) == copies.is_counted


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

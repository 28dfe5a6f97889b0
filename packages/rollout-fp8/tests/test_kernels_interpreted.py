"""Checksums that kernels add up, in Triton's interpreter: they are those of plain torch.

The interpreter is chosen when Triton is imported, by ``TRITON_INTERPRET=1``. It rounds in another
way than a GPU does, so that bits are compared on GPUs alone (``test_kernels_cuda.py``).
"""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from sync_parts import stream_of
from torch import Tensor

from engine_api.weights import ShardSpec
from rollout_fp8.export import fill
from rollout_fp8.fp8 import quantize as fp8_quantize
from rollout_fp8.fp8.quantize import QuantizePlan, empty_like, quantize
from rollout_fp8.wire import checksum as wire_checksum
from rollout_fp8.wire.audit import MODULUS
from rollout_fp8.wire.checksum import checksum, count_of

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from rollout_fp8.kernels import cast, copy, table
from rollout_fp8.kernels import quantize as quantization
from rollout_fp8.kernels.table import Rows, layouts, tiles

SHAPES = [(128, 128), (200, 272), (5, 16), (129, 400)]


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a launch take place without a device to change to."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Let plans on the CPU launch kernels; whether a quantization is aligned, and is counted."""
    for module in (table, cast, fp8_quantize, wire_checksum, fill):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)
    noted: list[tuple[bool, bool]] = []
    launch = quantization.launch

    def note(*tables: Any, aligned: bool, **given: Any) -> None:
        noted.append((aligned, tables[-1] is not None))
        launch(*tables, aligned=aligned, **given)

    monkeypatch.setattr(quantization, "launch", note)
    return noted


def unaligned(weight: Tensor) -> Tensor:
    """Return a copy of a weight that begins 4 bytes behind an aligned address."""
    found = torch.zeros(weight.numel() + 1)[1:].view(weight.shape).copy_(weight)
    assert found.data_ptr() % 16 == 4
    return found


def draw_weight(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)


def whole_checksum(tensor: Tensor) -> int:
    return checksum(tensor, ShardSpec.whole(tensor.shape))


def quantize_by_kernel(
    weight: Tensor,
    out: Tensor,
    sums: Tensor | None,
    *,
    first: int = 0,
    step: int | None = None,
    group: int = 1,
    pow2: bool = False,
) -> tuple[Tensor, bool]:
    """Quantize a weight into ``out``, and return the scales and whether the weight is broken.

    Without ``sums`` the launch is that of weights that are not aligned.
    ``first`` is the index of the first word of ``out`` in its whole, and ``step`` are the words
    from a row to the next, by default as many as a row has.
    """
    rows, columns = weight.shape
    down, right = -(-rows // 128), -(-columns // 128)
    scales = torch.zeros(down, right)
    broken = torch.zeros(1, dtype=torch.int32)
    step = columns // 4 if step is None else step
    quantization.launch(
        torch.tensor([[weight.data_ptr(), out.data_ptr(), scales.data_ptr()]]),
        torch.tensor([[rows, columns, columns, out.stride(0), right, first, step, group]]),
        torch.tensor([row << 20 | column for row in range(down) for column in range(right)]),
        broken,
        sums,
        source=weight.dtype,
        aligned=sums is not None,
        pow2=pow2,
    )
    return scales, bool(broken.any())


def copy_by_kernel(
    weight: Tensor,
    out: Tensor,
    sums: Tensor,
    *,
    first: int = 0,
    step: int | None = None,
    group: int = 1,
    is_aligned: bool = False,
) -> None:
    """Copy a weight into ``out``, with its place in its whole in elements."""
    rows, columns = weight.shape
    size = Rows(rows=rows, columns=columns, stride=columns)
    steps = (columns, out.stride(0), columns if step is None else step)
    copy.launch(
        torch.tensor([[weight.data_ptr(), out.data_ptr()]]),
        torch.from_numpy(tiles(0, size, (0, 0, first), steps, group)),
        None,
        sums,
        source=weight.dtype,
        out=out.dtype,
        aligned=is_aligned,
    )


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_quantization_adds_up_the_checksum_of_what_it_stores(
    rows: int, columns: int, dtype: torch.dtype, is_counted: bool, pow2: bool
) -> None:
    weight = draw_weight(rows, columns, dtype)
    wanted = quantize(weight, scales="pow2" if pow2 else "fp32")
    out, sums = torch.zeros_like(wanted.weight), torch.tensor([7, 0])
    scales, is_broken = quantize_by_kernel(weight, out, sums if is_counted else None, pow2=pow2)
    assert sums.tolist() == [7, whole_checksum(out) if is_counted else 0]
    assert torch.equal(scales, wanted.scales)
    assert torch.equal(out.float() == 0, wanted.weight.float() == 0)
    assert not is_broken


@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_copy_adds_up_the_checksum_of_what_it_stores(
    rows: int, columns: int, dtype: torch.dtype, is_aligned: bool
) -> None:
    weight = draw_weight(rows, columns, dtype)
    out = torch.zeros(rows, columns, dtype=torch.bfloat16)
    sums = torch.tensor([7, 0])
    copy_by_kernel(weight, out, sums, is_aligned=is_aligned)
    assert sums.tolist() == [7, whole_checksum(out)]
    torch.testing.assert_close(out.float(), weight.float(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_a_region_counts_by_its_place_in_the_whole(dtype: torch.dtype, top: int) -> None:
    """The first word of the region is the twelfth of a row."""
    rows, columns = 200, 272
    a_word = 4 // dtype.itemsize
    left = 12 * a_word
    whole = torch.zeros(rows + 5, columns + 96, dtype=dtype)
    box = ShardSpec(global_shape=tuple(whole.shape), offset=(top, left), shape=(rows, columns))
    out = whole[box.slices]
    first, step = top * whole.shape[1] + left, whole.shape[1]
    sums = torch.tensor([7, 0])
    if dtype == torch.bfloat16:
        copy_by_kernel(draw_weight(rows, columns), out, sums, first=first, step=step)
    else:
        place = {"first": first // a_word, "step": step // a_word}
        quantize_by_kernel(draw_weight(rows, columns), out, sums, **place)
    assert sums.tolist() == [7, checksum(out, box)]
    # The rest of the whole holds zeros, which add nothing.
    assert sums[1] == whole_checksum(whole)


def test_a_launch_without_a_group_adds_nothing() -> None:
    """One launch serves weights whose checksums are added up and others."""
    weight = draw_weight(200, 272)
    sums = torch.tensor([7, 5])
    stored = torch.zeros(200, 272, dtype=torch.float8_e4m3fn)
    quantize_by_kernel(weight, stored, sums, group=-1)
    copied = torch.zeros(200, 272, dtype=torch.bfloat16)
    copy_by_kernel(weight, copied, sums, group=-1)
    assert sums.tolist() == [7, 5]
    assert stored.float().any()
    assert copied.any()


def test_a_nan_at_the_edge_adds_nothing_beyond_it() -> None:
    """Every element of a block with a NaN is one, those beyond the weight's edge too."""
    weight = draw_weight(200, 272)
    weight[-1, -1] = math.nan
    out = torch.zeros(200, 272, dtype=torch.float8_e4m3fn)
    sums = torch.tensor([7, 0])
    scales, is_broken = quantize_by_kernel(weight, out, sums)
    assert is_broken
    assert scales.isnan().tolist() == [[False, False, False], [False, False, True]]
    # Triton's interpreter stores another number than NaN, which is no zero either.
    assert out[128:, 256:].float().all()
    assert sums.tolist() == [7, whole_checksum(out)]


def test_weights_that_are_not_aligned_are_counted_by_a_launch_of_their_own(
    launches: list[tuple[bool, bool]],
) -> None:
    attention = "model.layers.0.self_attn"
    weights = {
        f"{attention}.q_proj.weight": draw_weight(128, 144),
        f"{attention}.k_proj.weight": draw_weight(128, 100),
        f"{attention}.v_proj.weight": draw_weight(128, 144),
        "model.norm.weight": torch.ones(144),
    }
    stream = stream_of(weights, fp8=True)
    export = stream._export
    stream._export = lambda: (
        (name, unaligned(tensor) if "v_proj" in name else tensor, box)
        for name, tensor, box in export()
    )
    found = {name: tensor.clone() for name, tensor in stream}
    assert launches == [(True, True), (False, False), (False, False)]
    assert stream.checksums() == {
        name: whole_checksum(tensor) % MODULUS for name, tensor in found.items()
    }


def test_an_audited_weight_is_written_where_it_is_served_if_its_launch_counts_it(
    launches: list[tuple[bool, bool]],
) -> None:
    name = "model.layers.0.self_attn.{}_proj.weight"
    weights = {name.format(part): draw_weight(128, 144) for part in "qk"}
    room = torch.zeros(128, 160, dtype=torch.float8_e4m3fn)
    places = {name.format("q"): room[:, :144], name.format("k"): room[:, 4:148]}

    class Server:
        def find(self, wire_slice: Any) -> Tensor | None:
            return places.get(wire_slice.tensor.name)

    server = Server()
    stream = stream_of(weights, fp8=True)
    stream.place(server)
    left = [part.tensor.name for bucket, _ in stream.buckets() for part in bucket.slices]
    assert name.format("q") not in left
    assert name.format("k") in left
    assert launches == [(True, True)]
    assert stream.checksums()[name.format("q")] == whole_checksum(room[:, :144]) % MODULUS


def test_a_counted_weight_that_is_no_longer_aligned_is_copied(
    launches: list[tuple[bool, bool]],
) -> None:
    weights = [draw_weight(128, 144), draw_weight(5, 16)]
    found = [empty_like(weight) for weight in weights]
    outs, scales = [one.weight for one in found], [one.scales for one in found]
    counts = [
        count_of(layout, ShardSpec.whole(layout[0]), i) for i, layout in enumerate(layouts(outs))
    ]
    plan = QuantizePlan(*map(layouts, (weights, outs, scales)), scales="fp32", counts=counts)
    bound = plan.bind(outs, scales)
    sums = torch.zeros(2, dtype=torch.int64)
    bound.run(weights, None, sums)
    wanted = [whole_checksum(out) for out in outs]
    for _ in range(2):
        outs[0].zero_()
        sums.zero_()
        bound.run([unaligned(weights[0]), weights[1]], None, sums)
        assert sums.tolist() == wanted == [whole_checksum(out) for out in outs]
    assert launches == [(True, True)] * 3


@pytest.mark.parametrize(("columns", "start"), [(100, 0), (144, 4)])
def test_counts_of_weights_that_are_not_aligned_are_refused(
    columns: int, start: int, launches: list[tuple[bool, bool]]
) -> None:
    weight = draw_weight(128, columns)
    out = torch.zeros(128, 160, dtype=torch.float8_e4m3fn)[:, start : start + columns]
    scales = [torch.zeros(1, 2)[:, : -(-columns // 128)]]
    (layout,) = layouts([out])
    counts = [count_of(layout, ShardSpec.whole(out.shape), 0)]
    with pytest.raises(ValueError, match="counted"):
        QuantizePlan(*map(layouts, ([weight], [out], scales)), scales="fp32", counts=counts).bind(
            [out], scales
        )
    assert not launches

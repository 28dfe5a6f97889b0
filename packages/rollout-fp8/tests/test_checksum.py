"""Checksum against its definition word by word, over boxes, and against damage."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine_api.weights import ShardSpec
from rollout_fp8.kernels.table import layouts
from rollout_fp8.wire.checksum import ChecksumPlan, checksum, checksum_many, coefficients

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    size = dtype.itemsize
    data = torch.randint(
        0,
        256,
        (*shape[:-1], shape[-1] * size),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    return data.view(dtype) if shape[-1] else data.new_empty(shape).to(dtype)


def fmix32(h: int) -> int:
    """Compute fmix32 in Python's integers, from the published constants."""
    h ^= h >> 16
    h = h * 0x85EBCA6B % 2**32
    h ^= h >> 13
    h = h * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def reference(whole: Tensor) -> int:
    raw, row = (
        whole.contiguous().view(torch.uint8).numpy().tobytes(),
        whole.shape[-1] * whole.element_size(),
    )
    width = 4 if row % 4 == 0 and whole.ndim > 1 else min(4, whole.element_size())
    words = [int.from_bytes(raw[i : i + width], "little") for i in range(0, len(raw), width)]
    total = sum(w * (fmix32(i % 2**32) + 1) for i, w in enumerate(words)) % 2**64
    return total - 2**64 if total >= 2**63 else total


def whole_sum(tensor: Tensor) -> int:
    return checksum(tensor, ShardSpec.whole(tensor.shape))


def test_the_finalizer_is_murmurs() -> None:
    known = {0: 0, 1: 0x514E28B7, 2: 0x30F4C306, 0xDEADBEEF: 0x0DE5C6A9}  # smhasher's fmix32
    assert {i: fmix32(i) for i in known} == known
    index = np.array([0, 1, 2**32 - 1, 2**32, 2**32 + 1, 123456789012], np.int64)
    assert coefficients(index).tolist() == [fmix32(int(i) % 2**32) + 1 for i in index]


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_it_is_the_sum_of_the_definition(shape: list[int], dtype: torch.dtype, seed: int) -> None:
    tensor = random_tensor(tuple(shape), dtype, seed)
    assert whole_sum(tensor) == reference(tensor)


def test_scalars_and_empty_tensors() -> None:
    assert whole_sum(torch.tensor(1.5)) == 0x3FC00000
    assert (
        whole_sum(torch.empty(0, 4)) == 0
        and checksum(torch.empty(0, 4), ShardSpec.nothing((8, 4))) == 0
    )


def test_a_tensor_of_more_words_than_are_taken_at_once() -> None:
    tensor = random_tensor((3, 70_001), torch.float32, 1)
    rows = [
        checksum(
            tensor[i : i + 1], ShardSpec(global_shape=(3, 70_001), offset=(i, 0), shape=(1, 70_001))
        )
        for i in range(3)
    ]
    assert whole_sum(tensor) == reference(tensor)
    assert np.int64(np.array(rows).sum()) == whole_sum(tensor)


def test_a_column_of_more_words_than_are_taken_at_once() -> None:
    tensor = random_tensor((700, 160), torch.float32, 2)
    halves = [(0, 100), (100, 160)]
    sums = [
        checksum(
            tensor[:, a:b], ShardSpec(global_shape=(700, 160), offset=(0, a), shape=(700, b - a))
        )
        for a, b in halves
    ]
    assert np.int64(np.array(sums).sum()) == whole_sum(tensor) == reference(tensor)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[Tensor, list[ShardSpec]]:
    """Draw a tensor of one to three dimensions, and boxes that cover it.

    The boxes are cut along one dimension after another.
    """
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=2)))
    dtype = draw(st.sampled_from(DTYPES))
    shape = (*shape, draw(st.integers(1, 30)) * (4 if draw(st.booleans()) else 1))
    unit = (
        max(4 // dtype.itemsize, 1) if len(shape) > 1 and shape[-1] * dtype.itemsize % 4 == 0 else 1
    )
    boxes = [ShardSpec.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        d = draw(st.integers(0, len(shape) - 1))
        step = unit if d == len(shape) - 1 else 1
        cut = draw(st.integers(0, box.shape[d] // step)) * step
        for start, length in ((0, cut), (cut, box.shape[d] - cut)):
            offset = tuple(o + start * (i == d) for i, o in enumerate(box.offset))
            boxes.append(
                ShardSpec(
                    global_shape=shape,
                    offset=offset,
                    shape=(*box.shape[:d], length, *box.shape[d + 1 :]),
                )
            )
    return random_tensor(shape, dtype, draw(st.integers(0, 2**31))), boxes


@settings(max_examples=200, deadline=None)
@given(partition=partitions(), contiguous=st.booleans())
def test_it_adds_over_boxes(partition: tuple[Tensor, list[ShardSpec]], contiguous: bool) -> None:
    whole, boxes = partition
    wide = torch.cat([whole, whole], dim=-1)  # parts with another row stride than the whole's
    source = whole if contiguous else wide[..., : whole.shape[-1]]
    parts = [source[box.slices] for box in boxes]
    parts = [p.contiguous() if contiguous or p.ndim > 2 else p for p in parts]
    groups = [i % 2 for i in range(len(boxes))]
    out = torch.tensor([5, -7])
    checksum_many(parts, boxes, out, groups)
    assert (out - torch.tensor([5, -7])).sum().item() == whole_sum(whole)


@settings(max_examples=100, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_every_flipped_bit_is_seen(
    shape: tuple[int, int], dtype: torch.dtype, data: st.DataObject
) -> None:
    tensor = random_tensor(shape, dtype, data.draw(st.integers(0, 99)))
    before = whole_sum(tensor)
    raw = tensor.view(torch.uint8).view(-1)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert whole_sum(tensor) != before


@settings(max_examples=100, deadline=None)
@given(data=st.data(), sign=st.booleans())
def test_every_exchange_of_two_different_words_is_seen(data: st.DataObject, sign: bool) -> None:
    """Check the exchange of x and -x too, which differ in the highest bit only."""
    tensor = random_tensor((13, 17), torch.int32, data.draw(st.integers(0, 99))).view(-1)
    i = data.draw(st.integers(0, 220))
    j = data.draw(st.integers(0, 220).filter(lambda j: j != i))
    if sign:
        tensor[j] = tensor[i] ^ -(2**31)
    before, same = whole_sum(tensor.view(13, 17)), bool(tensor[i] == tensor[j])
    tensor[[i, j]] = tensor[[j, i]]
    assert (whole_sum(tensor.view(13, 17)) == before) == same


def test_rows_at_other_places_give_another_sum() -> None:
    part = random_tensor((4, 8), torch.bfloat16, 3)
    sums = {
        checksum(part, ShardSpec(global_shape=(16, 8), offset=(i, 0), shape=(4, 8)))
        for i in range(12)
    }
    assert len(sums) == 12


def test_a_plan_runs_again_and_refuses_other_parts() -> None:
    parts = [random_tensor((6, 8), torch.bfloat16, 1), random_tensor((5,), torch.float32, 2)]
    boxes = [ShardSpec.whole(p.shape) for p in parts]
    plan, out = ChecksumPlan(layouts(parts), boxes, [1, 0]), torch.zeros(2, dtype=torch.int64)
    plan.run(parts, out)
    assert out.tolist() == [whole_sum(parts[1]), whole_sum(parts[0])]
    parts[0][0, 0] = 7.0
    out.zero_()
    plan.run(parts, out)
    assert out[1] == whole_sum(parts[0])
    with pytest.raises(ValueError, match=r"parts\[0\] is"):
        plan.run([parts[0].float(), parts[1]], out)
    with pytest.raises(ValueError, match="expected int64"):
        plan.run(parts, out.int())


def box(offset: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]) -> ShardSpec:
    return ShardSpec(global_shape=whole, offset=offset, shape=shape)


@pytest.mark.parametrize(
    ("part", "spec", "match"),
    [
        (
            torch.zeros(2, 4).bfloat16(),
            box((0, 1), (2, 4), (2, 8)),
            "first column 1 .* whole number of 4-byte words",
        ),
        (torch.zeros(2, 3).bfloat16(), box((0, 0), (2, 3), (2, 8)), "columns 3 "),
        (torch.zeros(2, 9).bfloat16()[:, :8], box((0, 0), (2, 8), (2, 8)), "row stride 9 "),
        (
            torch.zeros(17).bfloat16()[1:].view(1, 16),
            box((0, 0), (1, 16), (1, 16)),
            "begins at a whole word",
        ),
        (torch.zeros(8, 2).T, box((0, 0), (2, 8), (2, 8)), "call contiguous"),
        (torch.zeros(3, 4), box((0, 0), (2, 4), (2, 4)), "is not the box"),
    ],
)
def test_what_cuts_words_is_refused(part: Tensor, spec: ShardSpec, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        checksum(part, spec)


def test_odd_rows_are_summed_by_element_and_may_be_cut_anywhere() -> None:
    whole = random_tensor((4, 7), torch.bfloat16, 5)
    cut = [checksum(whole[:, a:b], box((0, a), (4, b - a), (4, 7))) for a, b in ((0, 3), (3, 7))]
    assert np.int64(np.array(cut).sum()) == whole_sum(whole) == reference(whole)


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 50),
    ranks=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_a_bias_adds_over_the_ranks_that_it_is_cut_on(
    size: int, ranks: int, dtype: torch.dtype, seed: int
) -> None:
    whole, share = random_tensor((size,), dtype, seed), -(-size // ranks)
    cuts = [min(rank * share, size) for rank in range(ranks + 1)]
    sums = [checksum(whole[a:b], box((a,), (b - a,), (size,))) for a, b in pairwise(cuts)]
    assert sum(sums) % 2**64 == whole_sum(whole) % 2**64

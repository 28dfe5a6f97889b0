"""Plan of a sync: places of quantizing, bytes on the wire, and slices that cover tensors once."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_sources import rows, source

from engine_api.errors import RolloutError
from engine_api.weights import ShardSpec
from rollout_fp8.export.plan import Source, make_plan


def coverage(plan, name: str) -> torch.Tensor:
    tensor = plan.wire.tensors[name]
    seen = torch.zeros(tensor.shape, dtype=torch.int32)
    for bucket in plan.wire.buckets:
        for wire_slice in bucket.slices:
            if wire_slice.tensor.name == name:
                seen[wire_slice.box.slices] += 1
    return seen


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 700), st.integers(1, 300), st.booleans()), min_size=1, max_size=6
    ),
    world=st.integers(1, 5),
    bucket=st.integers(1, 300_000),
)
def test_pieces_cover_every_tensor_once_and_never_overlap_in_a_buffer(
    shapes, world, bucket
) -> None:
    sources = [
        source(f"w{i}", rows((n, k), world), quantized=q) for i, (n, k, q) in enumerate(shapes)
    ]
    plan = make_plan(sources, dtype=torch.bfloat16, bucket_bytes=bucket)
    for name in plan.wire.tensors:
        assert bool((coverage(plan, name) == 1).all()), name
    for each in plan.wire.buckets:
        spans = sorted((p.start, p.start + p.num_bytes) for p in each.slices)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert spans[-1][1] <= each.num_bytes <= plan.wire.slots[each.slot]


def test_the_bias_of_a_router_travels_in_float32_among_others_in_16_bits() -> None:
    """Their bytes follow one another without a gap or an overlap, as in the plan's buckets."""
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    sources = [
        Source(
            name=name,
            boxes=(ShardSpec.whole((6,)),),
            stored=torch.float32,
            quantized=False,
        )
        for name in ("model.norm.weight", bias, "model.layers.1.input_layernorm.weight")
    ]
    plan = make_plan(sources, dtype=torch.bfloat16, bucket_bytes=1 << 20)
    dtypes = [tensor.dtype for tensor in plan.wire.tensors.values()]
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]
    (bucket,) = plan.wire.buckets
    spans = sorted((p.start, p.start + p.num_bytes) for p in bucket.slices)
    assert [b - a for a, b in spans] == [12, 24, 12]
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert spans[-1][1] <= bucket.num_bytes


def test_a_quantized_tensor_carries_weight_and_scales() -> None:
    plan = make_plan(
        [source("x.weight", rows((300, 200), 1))], dtype=torch.bfloat16, bucket_bytes=1 << 20
    )
    weight, scales = plan.wire.tensors.values()
    assert (weight.name, weight.shape, weight.dtype) == (
        "x.weight",
        (300, 200),
        torch.float8_e4m3fn,
    )
    assert (scales.name, scales.shape, scales.dtype) == (
        "x.weight_scale_inv",
        (3, 2),
        torch.float32,
    )


@pytest.mark.parametrize(
    ("shape", "world", "aligned"),
    [
        ((512, 64), 2, True),
        ((512, 64), 4, True),
        ((300, 64), 3, False),
        ((256, 64), 4, False),
        ((1024, 64), 3, False),
        ((130, 64), 1, True),
    ],
)
def test_only_shards_on_block_edges_are_quantized_before_the_gather(shape, world, aligned) -> None:
    plan = make_plan([source("w", rows(shape, world))], dtype=torch.bfloat16, bucket_bytes=1 << 20)
    assert plan.buckets[0].gathered is aligned
    assert bool(plan.wire.notes) is not aligned


def test_fp8_sends_about_half_the_bytes() -> None:
    boxes = rows((4096, 4096), 4)
    fp8 = make_plan([source("w", boxes)], dtype=torch.bfloat16, bucket_bytes=1 << 30)
    bf16 = make_plan(
        [source("w", boxes, quantized=False)], dtype=torch.bfloat16, bucket_bytes=1 << 30
    )
    assert fp8.buckets[0].region / bf16.buckets[0].region == pytest.approx(0.5, abs=0.001)


def test_copies_travel_once_and_their_holders_take_turns() -> None:
    boxes = tuple(ShardSpec.whole((256, 128), replica=r) for r in range(3))
    plan = make_plan(
        [source(f"w{i}", boxes) for i in range(4)], dtype=torch.bfloat16, bucket_bytes=1 << 20
    )
    sent = [[part.source for part in parts] for parts in plan.buckets[0].parts]
    assert sent == [[0, 3], [1], [2]]
    assert all(bool((coverage(plan, name) == 1).all()) for name in plan.wire.tensors)


@pytest.mark.parametrize("bucket", [1 << 16, 1 << 30])
def test_experts_that_lie_on_one_rank_each_take_no_more_room_than_rows_that_lie_on_all(
    bucket,
) -> None:
    shape = (256, 256)
    whole, nothing = ShardSpec.whole(shape), ShardSpec.nothing(shape)
    experts = [
        source(f"{e}", tuple(whole if e // 4 == rank else nothing for rank in range(2)))
        for e in range(8)
    ]
    spread = [source(f"{e}", rows(shape, 2)) for e in range(8)]
    sizes = [
        sum(
            b.num_bytes
            for b in make_plan(s, dtype=torch.bfloat16, bucket_bytes=bucket).wire.buckets
        )
        for s in (experts, spread)
    ]
    assert sizes[0] <= sizes[1]
    assert sizes[0] == pytest.approx(8 * 256 * 256, rel=0.02)


def test_what_is_gathered_first_comes_last() -> None:
    sources = [
        source("odd", rows((300, 64), 3)),
        source("even", rows((384, 64), 3)),
        source("odd too", rows((100, 64), 3)),
    ]
    plan = make_plan(sources, dtype=torch.bfloat16, bucket_bytes=1 << 20)
    assert [(b.gathered, [p.source for p in b.of_rank(2)]) for b in plan.buckets] == [
        (True, [1]),
        (False, [0, 2]),
    ]
    # The order of the export stays.
    assert list(plan.wire.tensors)[::2] == [
        "odd",
        "even",
        "odd too",
    ]


def test_shards_that_leave_a_hole_are_refused() -> None:
    boxes = (
        ShardSpec(global_shape=(256, 128), offset=(0, 0), shape=(128, 128)),
        ShardSpec.nothing((256, 128)),
    )
    with pytest.raises(RolloutError, match=r"w do not cover \[256, 128\] exactly once"):
        make_plan([source("w", boxes)], dtype=torch.bfloat16, bucket_bytes=1 << 20)


def test_shards_that_overlap_are_refused() -> None:
    half = ShardSpec(global_shape=(256, 128), offset=(64, 0), shape=(128, 128))
    with pytest.raises(RolloutError, match="exactly once"):
        make_plan([source("w", (half, half))], dtype=torch.bfloat16, bucket_bytes=1 << 20)


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(RolloutError, match=r"cannot send w[^$]*is exported twice"):
        make_plan([source("w", rows((8, 8), 1))] * 2, dtype=torch.bfloat16, bucket_bytes=1 << 20)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn], ids=str)
def test_a_dtype_that_is_not_cast_is_refused(dtype: torch.dtype) -> None:
    wrong = Source(name="w", boxes=rows((8, 8), 1), stored=dtype, quantized=False)
    with pytest.raises(RolloutError, match=rf"cannot send w[^$]*{dtype}"):
        make_plan([wrong], dtype=torch.bfloat16, bucket_bytes=1 << 20)


@pytest.mark.parametrize("copy", [(0, 64), (64, 128), (32, 96)], ids=str)
def test_a_copy_of_what_no_rank_holds_is_refused(copy: tuple[int, int]) -> None:
    """Check it for copies that might be sent in place of a box, or in addition to the others."""
    a, b = copy
    half = ShardSpec(global_shape=(128, 8), offset=(a, 0), shape=(b - a, 8), replica=1)
    boxes = (ShardSpec.whole((128, 8)), half)
    other = source("v", (ShardSpec.whole((512, 8)), ShardSpec.nothing((512, 8))), quantized=False)
    with pytest.raises(RolloutError, match="w do not cover"):
        make_plan(
            [other, source("w", boxes, quantized=False)], dtype=torch.bfloat16, bucket_bytes=1 << 20
        )

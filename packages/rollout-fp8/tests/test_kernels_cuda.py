"""Tables of the kernels, and on a GPU the kernels against plain torch, bit for bit."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine_api.weights import ShardSpec
from rollout_fp8.export.exporter import collect_export
from rollout_fp8.fp8.quantize import QuantizePlan, can_count, empty_like, quantize, quantize_into
from rollout_fp8.kernels import cast
from rollout_fp8.kernels.cast import CastPlan, cast_into
from rollout_fp8.kernels.table import TILE_COLUMNS, TILE_ROWS, VECTOR, Rows, layouts, tiles
from rollout_fp8.wire.audit import MODULUS
from rollout_fp8.wire.checksum import ChecksumPlan, checksum, checksum_many, coefficients, count_of

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POLICIES = ("fp32", "pow2")
SHAPES = (
    (1, 1),
    (1, 16),
    (128, 128),
    (127, 129),
    (129, 127),
    (300, 272),
    (64, 1024),
    (513, 48),
    (5, 3000),
    (384, 640),
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 90),
    columns=st.integers(1, 600),
    gaps=st.tuples(st.integers(0, 300), st.integers(0, 300)),
    start=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_tiles_cover_every_element_once(
    rows: int, columns: int, gaps: tuple[int, int], start: tuple[int, int]
) -> None:
    """Check tiles by walking them as a kernel does; an element has one index at both places."""
    step = columns + gaps[0], columns + gaps[1]
    seen: list[tuple[int, int]] = []
    for item, a, b, a_step, b_step, height, width, group in tiles(
        3, Rows(rows=rows, columns=columns, stride=step[0]), start, step, 7
    ).tolist():
        assert (item, group) == (3, 7)
        r, c = np.indices((min(height, TILE_ROWS), min(width, TILE_COLUMNS))).reshape(2, -1)
        seen += zip((a + r * a_step + c).tolist(), (b + r * b_step + c).tolist(), strict=True)
    r, c = np.indices((rows, columns)).reshape(2, -1)
    wanted = zip(
        (start[0] + r * step[0] + c).tolist(), (start[1] + r * step[1] + c).tolist(), strict=True
    )
    assert sorted(seen) == sorted(wanted)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 70),
    pairs=st.integers(1, 300),
    gap=st.sampled_from([0, 2, 8, 100]),
    around=st.tuples(*[st.sampled_from([0, 4, 16, 300])] * 4),
    source=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_cast_knows_where_each_word_is_in_its_whole_and_which_loads_are_wide(
    rows: int,
    pairs: int,
    gap: int,
    around: tuple[int, int, int, int],
    source: torch.dtype,
) -> None:
    """Check it by walking the records as the kernel does, for a box anywhere in a whole."""
    above, below, left, right = around
    columns = 2 * pairs
    box = ShardSpec(
        global_shape=(above + rows + below, left + columns + right),
        offset=(above, left),
        shape=(rows, columns),
    )
    out = torch.randn(rows, columns + gap).bfloat16()[:, :columns]
    count = count_of(layouts([out])[0], box, 0)
    assert count is not None
    (work,) = cast._launches(
        layouts([out.to(source)]), layouts([out]), {0: count}, torch.device("cpu")
    )
    memory = out.as_strided((out.untyped_storage().nbytes() // 2,), (1,)).view(torch.int16)
    wide = VECTOR // source.itemsize
    total = 0
    seen = 0
    for record in work.records.tolist():
        _, start, to, whole, step, to_step, whole_step, height, width, _ = record
        if work.aligned:
            assert not any(n % wide for n in (start, to, step, to_step, width)), record
        r, c = np.indices((min(height, TILE_ROWS), min(width, TILE_COLUMNS) // 2))
        words = [
            memory.numpy().view(np.uint16)[to + r * to_step + 2 * c + k].astype(np.uint64)
            for k in range(2)
        ]
        index = whole // 2 + r * (whole_step // 2) + c
        total += int(np.sum((words[0] | words[1] << np.uint64(16)) * coefficients(index)))
        seen += 2 * r.size
    assert seen == out.numel()
    assert (total - checksum(out, box)) % 2**64 == 0


def test_checksums_in_launches_are_refused_where_there_are_none() -> None:
    matrix = torch.zeros(4, 8, dtype=torch.bfloat16)
    count = count_of(layouts([matrix])[0], ShardSpec.whole(matrix.shape), 0)
    with pytest.raises(ValueError, match="on cpu, which has no kernels, got 1"):
        CastPlan(layouts([matrix]), layouts([matrix]), [count])
    with pytest.raises(ValueError, match="on cpu, which has no kernels, got 1"):
        QuantizePlan(
            layouts([matrix]), *map(layouts, zip(empty_like(matrix))), scales="fp32", counts=[count]
        )


def test_casts_without_a_gpu_are_copies() -> None:
    sources = [
        torch.nn.Parameter(torch.randn(5, 8))[:, 2:6],
        torch.randn(3).bfloat16(),
        torch.arange(4),
    ]
    outs = [
        torch.zeros(5, 4, dtype=torch.bfloat16),
        torch.zeros(3),
        torch.zeros(4, dtype=torch.int64),
    ]
    cast_into(sources, outs)
    cast_into([], [])
    assert all(torch.equal(o, s.to(o.dtype)) for s, o in zip(sources, outs, strict=True))
    assert not outs[0].requires_grad


@pytest.mark.parametrize(
    ("source", "out", "match"),
    [
        (torch.zeros(3), torch.zeros(4), "no cast of"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float8_e4m3fn), "no cast of"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int32), "no cast of"),
        (torch.zeros(3), torch.zeros(3, device="meta"), "on one device"),
        (torch.zeros(3, 4).T, torch.zeros(4, 3), "call contiguous"),
        (torch.zeros(4, 6, 8)[:, :3], torch.zeros(4, 6, 8)[:, :3, :], "call contiguous"),
    ],
)
def test_what_is_no_cast_is_refused(source: Tensor, out: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        cast_into([source], [out])


def bits(x: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return x.cpu().contiguous().view(kinds[x.element_size()])


def same(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(bits(found), bits(wanted))


def any_bits(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Tensor:
    """Return random bits: all magnitudes, subnormals, infinities, all NaN payloads, both zeros."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).squeeze(-1)


def weights(dtype: torch.dtype) -> list[Tensor]:
    """Yield all shapes at ordinary and extreme magnitudes, and then the special cases."""
    generator = torch.Generator().manual_seed(0)
    sizes = (1.0, 1e-3, 3e4) if dtype == torch.float16 else (1.0, 1e-3, 1e37, 1e-37, 3e-42)
    found = [(torch.randn(s, generator=generator) * m).to(dtype) for s in SHAPES for m in sizes]
    found += [any_bits(s, dtype, 1) for s in SHAPES]
    finite = [any_bits(s, dtype, 2) for s in SHAPES]
    found += [torch.where(x.isfinite(), x, torch.zeros_like(x)) for x in finite]
    for special in (
        0.0,
        -0.0,
        math.nan,
        -math.inf,
        448.0,
        torch.finfo(dtype).max,
        torch.finfo(dtype).smallest_normal / 2,
    ):
        found.append(torch.full((130, 144), special).to(dtype))
        found.append(torch.randn((130, 144), generator=generator).to(dtype))
        found[-1][129, 3] = special
    return found


def ties() -> Tensor:
    """Return weights with scale 1 in every row of blocks.

    They are all e4m3 numbers, their midpoints, and the fp32 numbers next to those.
    """
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (values[1:] + values[:-1]) / 2
    beside = [torch.nextafter(middles, torch.full_like(middles, end)) for end in (0.0, math.inf)]
    x = torch.cat([values, middles, *beside])
    x = torch.cat([x, -x])
    x = torch.cat([x, x.new_full((-len(x) % 127,), 448.0)]).view(-1, 127)
    return torch.cat([x, x.new_full((len(x), 1), 448.0)], dim=1)[:128]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_bits_are_those_of_plain_torch(dtype: torch.dtype, policy: str) -> None:
    on_cpu = weights(dtype)
    on_gpu = [w.cuda() for w in on_cpu]
    found = [empty_like(w) for w in on_gpu]
    quantize_into(on_gpu, [f.weight for f in found], [f.scales for f in found], scales=policy)
    for w, f in zip(on_cpu, found, strict=True):
        wanted = quantize(w, scales=policy)
        assert torch.equal(f.scales.cpu().nan_to_num(-1.0), wanted.scales.nan_to_num(-1.0)), w.shape
        assert same(f.weight, wanted.weight), w.shape


@pytest.mark.gpu
@needs_gpu
def test_ties_go_to_even() -> None:
    x = ties()
    assert same(quantize(x.cuda(), scales="fp32").weight, quantize(x, scales="fp32").weight)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_dtypes_strides_and_alignments_in_one_call(policy: str) -> None:
    """Check rows that lie apart, unaligned addresses, two dtypes and an empty shard in one list."""
    base = torch.randn(300, 640)
    on_cpu = [
        base[:, 16:528],
        base[:, 3:400],
        base.bfloat16()[:, :256],
        base.bfloat16()[7:, 1:],
        base[:0],
        base,
    ]
    wide = base.cuda()
    half = wide.bfloat16()
    on_gpu = [wide[:, 16:528], wide[:, 3:400], half[:, :256], half[7:, 1:], wide[:0], wide]
    out = [
        torch.zeros(w.shape[0], w.shape[1] + 32, dtype=torch.float8_e4m3fn, device="cuda")
        for w in on_cpu
    ]
    views = [o[:, 16 : 16 + w.shape[1]] for o, w in zip(out, on_cpu, strict=True)]
    scales = [
        torch.zeros(-(-w.shape[0] // 128), 9, device="cuda")[:, 1 : 1 - (-w.shape[1] // 128)]
        for w in on_cpu
    ]
    plan = QuantizePlan(layouts(on_gpu), layouts(views), layouts(scales), scales=policy)
    for _ in range(2):
        plan.run(on_gpu, views, scales)
    for w, o, v, s in zip(on_cpu, out, views, scales, strict=True):
        wanted = quantize(w, scales=policy)
        assert same(v, wanted.weight) and same(s, wanted.scales)
        assert not bits(o[:, :16]).any() and not bits(o[:, 16 + w.shape[1] :]).any()


@pytest.mark.gpu
@needs_gpu
def test_addresses_are_those_of_the_call() -> None:
    first, second = torch.randn(256, 256, device="cuda"), torch.randn(256, 256, device="cuda")
    a, b = empty_like(first), empty_like(second)
    plan = QuantizePlan(layouts([first]), layouts([a.weight]), layouts([a.scales]), scales="fp32")
    plan.run([first], [a.weight], [a.scales])
    plan.run([second], [b.weight], [b.scales])
    assert same(a.weight, quantize(first.cpu(), scales="fp32").weight)
    assert same(b.weight, quantize(second.cpu(), scales="fp32").weight)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shift", [4, 16])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quantization_adds_up_the_checksums_of_what_it_writes(
    dtype: torch.dtype, policy: str, shift: int
) -> None:
    """Check boxes anywhere, edges inside a block, unaligned memory, and one that is left out.

    Memory is aligned where it begins behind 16 bytes, and only aligned weights are counted.
    """
    places = [
        ((256, 384), (0, 0), (256, 384)),
        ((200, 144), (0, 0), (200, 144)),
        ((130, 256), (128, 128), (512, 640)),
        ((64, 100), (0, 0), (64, 100)),
        ((3, 64), (2**31, 0), (2**32, 64)),
        ((512, 2048), (1024, 0), (4096, 2048)),
    ]
    sources = [torch.randn(shape, device="cuda").to(dtype) for shape, _, _ in places]
    room = [
        torch.zeros(s[0], s[1] + 32 + shift, dtype=torch.float8_e4m3fn).cuda() for s, _, _ in places
    ]
    outs = [r[:, shift : shift + s.shape[1]] for r, s in zip(room, sources, strict=True)]
    scales = [empty_like(source).scales for source in sources]
    boxes = [ShardSpec(global_shape=w, offset=o, shape=s) for s, o, w in places]
    aligned = [can_count(*pair) for pair in zip(sources, outs, strict=True)]
    assert aligned == [shift == 16 and shape[1] % 16 == 0 for shape, _, _ in places]
    is_counted = [*aligned[:-1], False]
    counts = [
        count_of(*pair, i) if is_counted[i] else None
        for i, pair in enumerate(zip(layouts(outs), boxes, strict=True))
    ]
    plan = QuantizePlan(*map(layouts, (sources, outs, scales)), scales=policy, counts=counts)
    bound = plan.bind(outs, scales)
    wanted = [quantize(source.cpu(), scales=policy) for source in sources]
    for broken in (None, torch.zeros(len(places), dtype=torch.int32, device="cuda")):
        sums = torch.zeros(len(places), dtype=torch.int64, device="cuda")
        for out in outs:
            out.zero_()
        bound.run(sources, broken, sums)
        for out, scale, one in zip(outs, scales, wanted, strict=True):
            assert same(out, one.weight) and same(scale, one.scales), out.shape
        assert sums.tolist() == [
            checksum(one.weight, box) if counted else 0
            for one, box, counted in zip(wanted, boxes, is_counted, strict=True)
        ]
        assert broken is None or not broken.any()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_export_has_the_checksums_of_aligned_weights_and_of_others(
    dtype: torch.dtype, policy: str
) -> None:
    name = "model.layers.0.mlp.{}_proj.weight"
    shapes = {name.format("gate"): (256, 384), name.format("up"): (200, 100)}
    weights = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    stream = collect_export(
        iter(weights.items()),
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        architecture="Qwen3ForCausalLM",
        scales=policy,
        audit=True,
    )
    found = {name: tensor.cpu() for name, tensor in stream}
    for name, weight in weights.items():
        assert same(found[name], quantize(weight, scales=policy).weight), name
    assert stream.checksums() == {
        name: checksum(tensor, ShardSpec.whole(tensor.shape)) % MODULUS
        for name, tensor in found.items()
    }


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cast_adds_up_the_checksums_of_what_it_writes(
    dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    """Check boxes anywhere, dense columns of no whole loads, and one that is left out."""
    places = [
        ((256, 384), (0, 0), (256, 384), 0),
        ((4, 12), (0, 12), (4, 24), 0),
        ((40, 300), (5, 4), (50, 600), 8),
        ((1, 256), (7, 0), (9, 256), 0),
        ((130, 256), (128, 128), (512, 640), 36),
        ((3, 64), (2**31, 0), (2**32, 64), 0),
        ((512, 2048), (1024, 0), (4096, 2048), 0),
    ]
    sources = [torch.randn(shape, device="cuda").to(dtype) for shape, *_ in places]
    room = [torch.zeros(s[0], s[1] + gap, dtype=out_dtype).cuda() for s, _, _, gap in places]
    outs = [r[:, : s.shape[1]] for r, s in zip(room, sources, strict=True)]
    boxes = [ShardSpec(global_shape=w, offset=o, shape=s) for s, o, w, _ in places]
    counts = [count_of(*pair, i) for i, pair in enumerate(zip(layouts(outs), boxes, strict=True))]
    plan = CastPlan(layouts(sources), layouts(outs), [*counts[:-1], None])
    sums = torch.zeros(len(places), dtype=torch.int64, device="cuda")
    broken = torch.zeros(len(places), dtype=torch.int32, device="cuda")
    plan.bind(outs).run(sources, broken, sums)
    assert all(same(o, s.to(out_dtype)) for o, s in zip(outs, sources, strict=True))
    wanted = [checksum(out, box) for out, box in zip(outs, boxes, strict=True)]
    assert sums.tolist() == [*wanted[:-1], 0]
    assert not broken.any()


@pytest.mark.gpu
@needs_gpu
def test_many_runs_without_waiting_do_not_mix_their_addresses() -> None:
    """Check that a run's table outlives its copy to the device and later runs."""
    sources = [torch.full((128, 128), float(i + 1), device="cuda") for i in range(64)]
    found = [empty_like(s) for s in sources]
    torch.cuda._sleep(20_000_000)
    for source, f in zip(sources, found, strict=True):
        quantize_into([source], [f.weight], [f.scales], scales="fp32")
    assert [f.scales.item() for f in found] == [
        quantize(s.cpu(), scales="fp32").scales.item() for s in sources
    ]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_flagged(bad: float) -> None:
    sources = [torch.randn(256, 256, device="cuda") for _ in range(2)]
    sources[1][200, 10] = bad
    found = [empty_like(source) for source in sources]
    outs, scales = [f.weight for f in found], [f.scales for f in found]
    broken = torch.zeros(2, dtype=torch.int32, device="cuda")
    QuantizePlan(*map(layouts, (sources, outs, scales)), scales="pow2").run(
        sources, outs, scales, broken
    )
    assert [tuple(b) for b in scales[1].isfinite().logical_not().nonzero().tolist()] == [(1, 0)]
    assert broken.tolist() == [0, 1]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("source", "out"), list(itertools.product(DTYPES, DTYPES)))
def test_casts_are_those_of_plain_torch(source: torch.dtype, out: torch.dtype) -> None:
    others = (torch.randn(7, 5, 33), torch.randn(1000), torch.tensor(2.5))
    on_cpu = [*weights(source), *(x.to(source) for x in others)]
    on_gpu = [w.cuda() for w in on_cpu]
    found = [torch.zeros(w.shape, dtype=out, device="cuda") for w in on_gpu]
    cast_into(on_gpu, found)
    for w, f in zip(on_cpu, found, strict=True):
        wanted = w.to(out)
        nan = wanted.isnan()
        assert torch.equal(f.cpu().isnan(), nan), w.shape
        assert same(f.cpu().masked_fill(nan, 0), wanted.masked_fill(nan, 0)), w.shape


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.uint8, torch.bfloat16, torch.float32, torch.int64]
)
def test_copies_keep_every_bit_and_touch_nothing_else(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 256, (200, 320 * dtype.itemsize), dtype=torch.uint8, device="cuda")
    whole = raw.view(dtype)
    sources = [whole[:, 16:272], whole[3:, 1:300], whole[5], whole]
    room = [
        torch.zeros(200, 352 * dtype.itemsize, dtype=torch.uint8, device="cuda").view(dtype)
        for _ in sources
    ]
    outs = [room[0][:, 32:288], room[1][3:, 9:308], room[2][5, 1:321], room[3][:, :320]]
    CastPlan(layouts(sources), layouts(outs)).run(sources, outs)
    for s, o, r in zip(sources, outs, room, strict=True):
        wanted = torch.zeros_like(r.cpu().view(torch.uint8))
        mirror = wanted.view(dtype).as_strided(o.shape, o.stride(), o.storage_offset())
        mirror.copy_(s.cpu())
        assert torch.equal(r.cpu().view(torch.uint8), wanted)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_checksums_are_those_of_plain_torch(dtype: torch.dtype) -> None:
    shapes = [(300, 512), (257, 36), (4, 9), (70_000,), (3, 5, 64), (1, 1), (2048, 2048), (0, 64)]
    wholes = [
        torch.randint(0, 256, (*s[:-1], s[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)
        for s in shapes
    ]
    parts, boxes, groups = [], [], []
    for i, whole in enumerate(wholes):
        parts.append(whole)
        boxes.append(ShardSpec.whole(whole.shape))
        groups.append(2 * i)
        half = whole.shape[-1] // 2 if whole.shape[-1] * dtype.itemsize % 8 == 0 else 0
        half += whole.ndim == 1  # one of these may be cut anywhere
        for a, b in ((0, half), (half, whole.shape[-1])):
            spec = ShardSpec(
                global_shape=whole.shape,
                offset=(*(0,) * (whole.ndim - 1), a),
                shape=(*whole.shape[:-1], b - a),
            )
            parts.append(whole[..., a:b])
            boxes.append(spec)
            groups.append(2 * i + 1)
    on_gpu = [p.cuda() for p in wholes]
    views = [on_gpu[g // 2][spec.slices] for spec, g in zip(boxes, groups, strict=True)]
    out = torch.zeros(2 * len(wholes), dtype=torch.int64, device="cuda")
    checksum_many(views, boxes, out, groups)
    wanted = [checksum(w, ShardSpec.whole(w.shape)) for w in wholes]
    assert out[::2].tolist() == wanted and out[1::2].tolist() == wanted
    plan = ChecksumPlan(layouts(views), boxes, groups)
    out.zero_()
    for _ in range(3):
        plan.run(views, out)
    assert [v - 2**64 if (v := 3 * w % 2**64) >= 2**63 else v for w in wanted] == out[::2].tolist()


@pytest.mark.gpu
@needs_gpu
def test_checksums_of_indices_beyond_32_bits() -> None:
    part = torch.arange(64, dtype=torch.int32).view(1, 64)
    for row in (2**26 - 1, 2**26, 2**26 + 1, 2**31):
        spec = ShardSpec(global_shape=(2**32, 64), offset=(row, 0), shape=(1, 64))
        assert checksum(part.cuda(), spec) == checksum(part, spec)

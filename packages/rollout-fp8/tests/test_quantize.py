"""Block quantization against the formats' definitions in numpy, with error bounds and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout_fp8.fp8.quantize import (
    QuantizePlan,
    dequantize,
    empty_like,
    quantize,
    quantize_into,
    scales_shape,
)
from rollout_fp8.kernels.table import layouts

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POLICIES = ("fp32", "pow2")


def e4m3_values() -> np.ndarray:
    """Return the 127 non-negative numbers by code: 4 exponent bits (bias 7), 3 mantissa bits."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    )


VALUES = e4m3_values()


def e4m3(x: np.ndarray) -> np.ndarray:
    """Return the codes of the nearest numbers, ties to the even code.

    ``x`` is float64, at most 448 except for rounding.
    """
    magnitude = np.abs(x)
    upper = np.searchsorted(VALUES, magnitude).clip(max=126)
    lower = (upper - 1).clip(min=0)
    middle = (VALUES[lower] + VALUES[upper]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (upper % 2 == 0))
    return (np.where(up, upper, lower) | (np.signbit(x) * 0x80)).astype(np.uint8)


def reference(weight: Tensor, policy: str) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and scales of one tensor, block by block, each operation in fp32 or exact."""
    w = weight.float().numpy()
    codes, scales = np.empty(w.shape, np.uint8), np.empty(scales_shape(w.shape), np.float32)
    for i, j in np.ndindex(scales.shape):
        at = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        amax = np.abs(w[at]).max()
        scales[i, j] = s = reference_scale(amax, policy)
        inverse = np.float32(1) / s
        codes[at] = e4m3((w[at] * inverse).astype(np.float64)) if np.isfinite(s) else 0x7F
    return codes, scales


def reference_scale(amax: np.float32, policy: str) -> np.float32:
    if not np.isfinite(amax) or amax == 0:
        return np.float32(1 if amax == 0 else amax)
    if policy == "fp32":
        return np.float32(max(amax / np.float32(448), np.float32(2.0**-126)))
    k = -126
    while float(amax) > math.ldexp(448, k):  # exact in float64
        k += 1
    return np.float32(math.ldexp(1, k))


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8 if x.dtype == torch.float8_e4m3fn else torch.int32)


def check(weight: Tensor, policy: str) -> None:
    codes, scales = reference(weight, policy)
    found = quantize(weight, scales=policy)
    np.testing.assert_array_equal(found.scales.numpy(), scales)
    np.testing.assert_array_equal(found.weight.view(torch.uint8).numpy(), codes)


def test_the_reference_knows_the_format() -> None:
    assert (
        VALUES[1] == 2.0**-9
        and VALUES[8] == 2.0**-6
        and VALUES[126] == 448
        and (np.diff(VALUES) > 0).all()
    )
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(every, VALUES)


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Draw tensors of few magnitudes, subnormal to nearly infinite, with zeros and huge values."""
    rows, columns = draw(st.integers(1, 400)), draw(st.integers(1, 400))
    dtype = draw(st.sampled_from(DTYPES))
    largest = 4.5 if dtype == torch.float16 else 38
    powers = draw(
        st.lists(st.floats(-45 if dtype != torch.float16 else -8, largest), min_size=1, max_size=4)
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    which = torch.randint(len(powers), scales_shape(x.shape), generator=generator)
    x *= (
        10.0
        ** torch.tensor(powers, dtype=torch.float64)[which]
        .repeat_interleave(128, 0)[:rows]
        .repeat_interleave(128, 1)[:, :columns]
    )
    x[torch.rand(x.shape, generator=generator) < draw(st.sampled_from((0.0, 0.3, 1.0)))] = 0.0
    if draw(st.booleans()):
        x[rows // 2, columns // 2] *= 1e6
    top = torch.finfo(dtype).max
    return x.clamp(-top, top).to(dtype)


@settings(max_examples=150, deadline=None)
@given(weight=weights(), policy=st.sampled_from(POLICIES))
def test_codes_and_scales_are_the_references(weight: Tensor, policy: str) -> None:
    check(weight, policy)


@settings(max_examples=40, deadline=None)
@given(weight=weights(), policy=st.sampled_from(POLICIES))
def test_the_error_is_half_a_step(weight: Tensor, policy: str) -> None:
    """Check the error of half a step: 2

    -4 of the value, and 2^-10 · s below 2^-6 · s.^e4m3 has 3 bits of mantissa.
    """
    found = quantize(weight, scales=policy)
    s = (
        found.scales.double()
        .repeat_interleave(128, 0)[: weight.shape[0]]
        .repeat_interleave(128, 1)[:, : weight.shape[1]]
    )
    w, exact = weight.double(), found.weight.double() * s
    bound = torch.maximum(2.0**-4 * w.abs(), 2.0**-10 * s) * (1 + 2.0**-19)
    assert bool(((w - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantized_is_the_product_in_fp32_rounded_once(dtype: torch.dtype) -> None:
    found = quantize(torch.randn(200, 130), scales="fp32")
    result = dequantize(found.weight, found.scales, dtype)
    q, s = found.weight.float().numpy(), found.scales.numpy()
    wanted = np.array(
        [[q[i, j] * s[i // 128, j // 128] for j in range(130)] for i in range(200)], np.float32
    )
    assert result.dtype == dtype and torch.equal(result, torch.from_numpy(wanted).to(dtype))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_tie_and_both_its_neighbours(policy: str) -> None:
    """Check ties in blocks that hold 448, so that the scale is 1 and weights are unscaled."""
    middles = np.float32((VALUES[1:] + VALUES[:-1]) / 2)
    around = [
        middles,
        np.nextafter(middles, np.float32(0)),
        np.nextafter(middles, np.float32(np.inf)),
        np.float32(VALUES),
    ]
    x = torch.from_numpy(np.concatenate(around))
    weight = torch.cat([x, -x, torch.tensor([448.0])]).reshape(1, -1)
    for block in weight.split(127, dim=1):
        row = torch.cat([block, torch.tensor([[448.0]])], dim=1)
        assert quantize(row, scales=policy).scales.item() == 1
        check(row, policy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "amax", [2.0**-149, 2.0**-127, 2.0**-126, 448 * 2.0**-126, 449 * 2.0**-126, 3.4028235e38]
)
def test_the_ends_of_fp32(policy: str, amax: float) -> None:
    weight = torch.linspace(-1, 1, 300 * 3).mul(amax).reshape(300, 3)
    check(weight, policy)
    scales = quantize(weight, scales=policy).scales
    assert bool((scales >= 2.0**-126).all()) and bool(scales.isfinite().all())


@given(k=st.integers(-120, 119), step=st.sampled_from((-1, 0, 1)))
@settings(max_examples=150, deadline=None)
def test_powers_of_two_are_the_smallest_that_hold_the_block(k: int, step: int) -> None:
    """Check the scales at 448 · 2

    k, and one fp32 number below and above.
    """
    amax = np.float32(math.ldexp(448, k))
    amax = np.nextafter(amax, np.float32(math.copysign(np.inf, step))) if step else amax
    scale = quantize(torch.tensor([[float(amax)]]), scales="pow2").scales.item()
    assert scale == math.ldexp(1, k + (step > 0))


def test_a_block_of_zeros_has_scale_one_and_keeps_signs() -> None:
    weight = torch.zeros(130, 5)
    weight[3, 2], weight[129, 4] = -0.0, 7.0
    for policy in POLICIES:
        found = quantize(weight, scales=policy)
        assert found.scales[0].item() == 1 and found.weight.view(torch.uint8)[3, 2] == 0x80
        assert not dequantize(found.weight, found.scales, torch.bfloat16)[:128].any()


def test_one_huge_value_costs_only_its_own_block() -> None:
    weight = torch.full((256, 256), 0.01)
    weight[5, 5] = 1e30
    found = quantize(weight, scales="fp32")
    assert found.weight.float()[:128, :128].count_nonzero() == 1
    error = (dequantize(found.weight, found.scales, torch.float32) - weight).abs()
    assert float(error[:, 128:].max()) < 1e-8 and float(error[128:].max()) < 1e-8


@settings(max_examples=30, deadline=None)
@given(weight=weights(), policy=st.sampled_from(POLICIES), data=st.data())
def test_a_shard_of_whole_blocks_is_quantized_as_the_whole_is(
    weight: Tensor, policy: str, data: st.DataObject
) -> None:
    whole = quantize(weight, scales=policy)
    i, j = (data.draw(st.integers(0, n - 1)) for n in whole.scales.shape)
    a, b = (
        data.draw(st.integers(i + 1, whole.scales.shape[0])),
        data.draw(st.integers(j + 1, whole.scales.shape[1])),
    )
    rows, columns = slice(128 * i, 128 * a), slice(128 * j, 128 * b)
    shard = quantize(weight[rows, columns], scales=policy)
    assert torch.equal(bits(shard.weight), bits(whole.weight[rows, columns].contiguous()))
    assert torch.equal(bits(shard.scales), bits(whole.scales[i:a, j:b].contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_poisons_its_block_and_is_flagged(
    dtype: torch.dtype, policy: str, bad: float
) -> None:
    weight, fine = torch.randn(300, 200).to(dtype), torch.ones(3, 3, dtype=dtype)
    weight[130, 199] = bad
    check(weight, policy)
    sources = [fine, weight]
    found = [empty_like(source) for source in sources]
    outs, scales, broken = (
        [f.weight for f in found],
        [f.scales for f in found],
        torch.zeros(2, dtype=torch.int32),
    )
    QuantizePlan(*map(layouts, (sources, outs, scales)), scales=policy).run(
        sources, outs, scales, broken
    )
    assert [tuple(b) for b in found[1].scales.isfinite().logical_not().nonzero().tolist()] == [
        (1, 1)
    ]
    assert broken.tolist() == [0, 1]


def test_rows_may_lie_apart_in_source_and_outputs() -> None:
    wide = torch.randn(260, 400)
    out, scales = torch.zeros(260, 300, dtype=torch.float8_e4m3fn), torch.zeros(3, 5)
    quantize_into([wide[:, 100:330]], [out[:, 7:237]], [scales[:, 1:3]], scales="fp32")
    wanted = quantize(wide[:, 100:330].contiguous(), scales="fp32")
    assert torch.equal(bits(out[:, 7:237].contiguous()), bits(wanted.weight)) and torch.equal(
        scales[:, 1:3], wanted.scales
    )
    assert (
        not out[:, :7].float().any()
        and not out[:, 237:].float().any()
        and not scales[:, [0, 3, 4]].any()
    )


def test_an_empty_shard_and_no_tensors_at_all() -> None:
    found = quantize(torch.empty(0, 256), scales="fp32")
    assert found.weight.shape == (0, 256) and found.scales.shape == (0, 2)
    quantize_into([], [], [], scales="fp32")


def test_the_sources_need_no_gradient_graph() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    assert not quantize(weight, scales="fp32").weight.requires_grad


def test_a_plan_refuses_other_tensors_than_its_own() -> None:
    weight = torch.randn(130, 64)
    q = empty_like(weight)
    plan = QuantizePlan(layouts([weight]), layouts([q.weight]), layouts([q.scales]), scales="fp32")
    plan.run([weight], [q.weight], [q.scales])
    assert torch.equal(bits(q.weight), bits(quantize(weight, scales="fp32").weight))
    for other in (weight.bfloat16(), weight[:64], torch.randn(130, 65)[:, :64]):
        with pytest.raises(ValueError, match=r"weights\[0\] is"):
            plan.run([other], [q.weight], [q.scales])
    with pytest.raises(ValueError, match="2 tensors, the plan is for 1"):
        plan.run([weight, weight], [q.weight], [q.scales])


@pytest.mark.parametrize(
    ("weight", "out", "scales", "match"),
    [
        (torch.zeros(4, 4, dtype=torch.float64), None, None, r"weights\[0\] is torch.float64"),
        (torch.zeros(4), torch.zeros(4), torch.zeros(1), r"weights\[0\]"),
        (torch.zeros(4, 8).T, None, None, "call contiguous"),
        (torch.zeros(4, 4), torch.zeros(4, 4), None, r"out\[0\] is torch.float32"),
        (torch.zeros(4, 4), torch.zeros(4, 5, dtype=torch.float8_e4m3fn), None, r"out\[0\]"),
        (torch.zeros(129, 4), None, torch.zeros(1, 1), r"scales_out\[0\]"),
        (torch.zeros(4, 4), None, torch.zeros(1, 1, dtype=torch.bfloat16), r"scales_out\[0\]"),
        (
            torch.zeros(4, 4, device="meta"),
            torch.zeros(4, 4, dtype=torch.float8_e4m3fn),
            None,
            "on one device",
        ),
    ],
)
def test_wrong_tensors_are_refused(
    weight: Tensor, out: Tensor | None, scales: Tensor | None, match: str
) -> None:
    q = empty_like(weight) if weight.ndim == 2 else None
    out = q.weight if out is None and q else out
    scales = q.scales if scales is None and q else scales
    with pytest.raises(ValueError, match=match):
        quantize_into([weight], [out], [scales], scales="fp32")

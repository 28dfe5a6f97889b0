"""Attention of a tower within images and windows, against one image at a time in float64.

The choice of features by the kind of their tokens is shown here as well.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine_api.errors import UnsupportedCapability
from engine_torch.vision import _take, attend_by_image

HEADS = 2
WIDTH = 8
# Windows of an image whose sides they do not divide: four whole ones, and those at its edges.
LENGTHS = [16, 16, 8, 16, 16, 8, 4, 4, 2]
ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICES = [
    ("cpu", torch.float64, 1e-12),
    ("cpu", torch.float32, 1e-6),
    pytest.param("cuda", torch.float32, 1e-5, marks=ON_CUDA),
    # FlashAttention 2.
    pytest.param("cuda", torch.bfloat16, 2e-2, marks=ON_CUDA),
]


def draw(
    device: str, dtype: torch.dtype, rows: int = 1, tokens: int = sum(LENGTHS)
) -> list[Tensor]:
    """Return queries, keys and values ``[rows, H, tokens, d]`` that need gradients."""
    generator = torch.Generator().manual_seed(0)
    shape = (rows, HEADS, tokens, WIDTH)
    return [
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)
    ]


def attend_one_by_one(parts: list[Tensor], lengths: list[int]) -> Tensor:
    """Return the attention ``[1, T, H, d]`` in float64."""
    windows = zip(*(x.double().split(lengths, dim=2) for x in parts), strict=True)
    out = [((q @ k.transpose(-1, -2)) * WIDTH**-0.5).softmax(-1) @ v for q, k, v in windows]
    return torch.cat(out, dim=2).transpose(1, 2)


def gradients_of(out: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """Return the gradients of a sum with different weights, as float64 on the CPU."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape)
    loss = (out.double() * weights.to(out.device)).sum()
    return [one.double().cpu() for one in torch.autograd.grad(loss, parts)]


@pytest.mark.parametrize(("device", "dtype", "near"), DEVICES)
@pytest.mark.parametrize("lengths", [LENGTHS, [30, 60], [90]], ids=["windows", "images", "one"])
def test_windows_attend_to_themselves_alone(
    device: str, dtype: torch.dtype, near: float, lengths: list[int]
) -> None:
    parts = draw(device, dtype)
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    arguments: dict[str, Any] = {"cu_seq_lens_q": bounds, "max_length_q": max(lengths)}
    out, _ = attend_by_image(nn.Module(), *parts, None, scaling=WIDTH**-0.5, **arguments)
    want = attend_one_by_one(parts, lengths)
    assert out.shape == want.shape
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), want, atol=near, rtol=0)
    pairs = zip(gradients_of(out, parts), gradients_of(want, parts), strict=True)
    for got, exact in pairs:
        torch.testing.assert_close(got, exact, atol=near, rtol=near)


def test_without_bounds_each_row_is_an_image() -> None:
    parts = draw("cpu", torch.float64, rows=3, tokens=5)
    out, _ = attend_by_image(nn.Module(), *parts, None, scaling=None)
    for row in range(3):
        want = attend_one_by_one([x[row : row + 1] for x in parts], [5])
        torch.testing.assert_close(out[row : row + 1], want, atol=1e-12, rtol=0)


def test_windows_of_one_length_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    attend = functional.scaled_dot_product_attention

    def count(query: Tensor, *arguments: Any, **options: Any) -> Tensor:
        shapes.append(tuple(query.shape))
        return attend(query, *arguments, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", count)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    attend_by_image(nn.Module(), *draw("cpu", torch.float32), None, cu_seq_lens_q=bounds)
    assert shapes == [(LENGTHS.count(n), HEADS, n, WIDTH) for n in (2, 4, 8, 16)]


@pytest.mark.parametrize(
    "asked",
    [
        {"attention_mask": torch.ones(1, 1, 90, 90, dtype=torch.bool)},
        {"dropout": 0.1},
        {"is_causal": True},
    ],
    ids=["mask", "dropout", "causal"],
)
def test_what_the_kernels_would_leave_out_is_refused(asked: dict[str, Any]) -> None:
    arguments = {"attention_mask": None, **asked}
    with pytest.raises(UnsupportedCapability, match="a mask or dropout") as caught:
        attend_by_image(nn.Module(), *draw("cpu", torch.float32), **arguments)
    assert caught.value.remedy


@pytest.mark.parametrize("form", ["tokens", "images", "image"])
def test_features_of_one_kind_are_taken_in_every_form_of_transformers(form: str) -> None:
    """transformers 5.17 has the tower's deeper features in another form than its last ones."""
    features = torch.arange(24.0).reshape(12, 2)
    given: Any = {"tokens": features, "images": features.split(4), "image": features.view(3, 4, 2)}
    places = torch.tensor([0, 3, 4])
    found = _take(given[form], slice(2, 9), places)
    whole = _take(given[form], slice(2, 9), None)
    assert torch.equal(found if form == "tokens" else found[0], features[[2, 5, 6]])
    assert torch.equal(whole if form == "tokens" else whole[0], features[2:9])

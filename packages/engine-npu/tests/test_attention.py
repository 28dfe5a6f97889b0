"""The fused attention against a dense one in float64.

The cases are separate documents, grouped heads, windows and many documents. A function written from
its documentation stands in for ``torch_npu.npu_fusion_attention``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_npu import attention
from engine_npu.device import FUSED
from engine_torch.attention import build_packing, packed_attention

CPU = torch.device("cpu")


def documented(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor,
    scale: float,
    actual_seq_qlen: list[int],
    actual_seq_kvlen: list[int],
    sparse_mode: int,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
) -> tuple[Tensor, ...]:
    """Compute the documented result for the layout TND.

    The sequence lengths are the ends of documents, modes 3 and 4 count from the lower right corner,
    and true in the mask excludes a pair.
    """
    assert (input_layout, head_num) == ("TND", query.shape[1])
    assert actual_seq_qlen == actual_seq_kvlen
    assert actual_seq_qlen[-1] == query.shape[0]
    assert len(actual_seq_qlen) <= 1024
    assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    groups = query.shape[1] // key.shape[1]
    begin = 0
    parts = []
    for end in actual_seq_qlen:
        q = query[begin:end]
        k, v = (x[begin:end].repeat_interleave(groups, dim=1) for x in (key, value))
        distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)[None, :]
        before, after = (pre_tockens, next_tockens) if sparse_mode == 4 else (2147483647, 0)
        seen = (distance <= before) & (distance >= -after)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v))
        begin = end
    return torch.cat(parts), query, query


@pytest.fixture(autouse=True)
def _torch_npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ModuleType("torch_npu")
    vars(module)["npu_fusion_attention"] = documented
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    attention.register()
    yield
    attention._mask.cache_clear()


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    window: int | None,
    scale: float | None = None,
) -> Tensor:
    """Compute ``[1, T, H, d]`` from ``[1, H, T, d]`` in float64, by one mask over the pack."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(sum(lengths))
    seen = (document[:, None] == document[None, :]) & (position[:, None] >= position[None, :])
    if window is not None:
        seen &= position[:, None] - position[None, :] < window
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q.double() @ k.double().mT) * scale
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.double()).transpose(1, 2)


def inputs(heads: int, groups: int, total: int) -> list[Tensor]:
    torch.manual_seed(3)
    return [
        torch.randn(1, h, total, 16, dtype=torch.float64).mul_(3).requires_grad_()
        for h in (heads, groups, groups)
    ]


def run(given: list[Tensor], lengths: list[int], window: int | None) -> Tensor:
    packing = build_packing(lengths, FUSED, CPU)
    more: dict[str, Any] = {} if window is None else {"sliding_window": window}
    return packed_attention(torch.nn.Identity(), *given, None, packing=packing, **more)[0]


@pytest.mark.parametrize("lengths", [[7], [5, 1, 9], [4, 4, 4], [1] * 20])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_each_token_sees_its_own_document(
    lengths: list[int], window: int | None, groups: int
) -> None:
    given = inputs(4, groups, sum(lengths))
    want = dense(*given, lengths, window)
    found = run(given, lengths, window)
    assert torch.allclose(found, want, rtol=0, atol=1e-12)
    weight = torch.randn_like(want)
    wanted = torch.autograd.grad((want * weight).sum(), given)
    for grad, other in zip(torch.autograd.grad((found * weight).sum(), given), wanted, strict=True):
        assert torch.allclose(grad, other, rtol=0, atol=1e-11)


def test_a_model_s_own_scale_is_taken() -> None:
    given = inputs(4, 2, 14)
    lengths = [5, 9]
    packing = build_packing(lengths, FUSED, CPU)
    found, _ = packed_attention(torch.nn.Identity(), *given, None, packing=packing, scaling=0.3)
    assert torch.allclose(found, dense(*given, lengths, None, 0.3), rtol=0, atol=1e-12)


def test_more_documents_than_one_call_takes() -> None:
    lengths = [1, 2] * 700
    given = inputs(2, 1, sum(lengths))
    packing = build_packing(lengths, FUSED, CPU)
    found = attention.fused_attention(*given, packing, None, None)
    document = torch.repeat_interleave(torch.arange(1400), torch.tensor(lengths))
    # Documents 1023 and 1024 are on either side of the border of two calls.
    for index in (0, 1, 1023, 1024, 1399):
        own = document == index
        part = dense(*(x[:, :, own] for x in given), [int(own.sum())], None)
        assert torch.allclose(found[:, :, own].transpose(1, 2), part, rtol=0, atol=1e-12)

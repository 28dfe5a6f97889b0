"""Checksums that kernels add up, in Triton's interpreter: they are those of plain torch.

The interpreter is chosen when Triton is imported, by ``TRITON_INTERPRET=1``. It rounds in another
way than a GPU does, so that bits are compared on GPUs alone (``test_kernels_cuda.py``).
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from engine_api.weights import ShardSpec
from rollout_fp8.fp8.quantize import quantize
from rollout_fp8.wire.checksum import checksum

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from rollout_fp8.kernels import copy
from rollout_fp8.kernels import quantize as quantization
from rollout_fp8.kernels.table import Rows, tiles

SHAPES = [(128, 128), (200, 272), (5, 16), (129, 400)]


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a launch take place without a device to change to."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


def whole_checksum(tensor: Tensor) -> int:
    return checksum(tensor, ShardSpec.whole(tensor.shape))


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_quantization_adds_up_the_checksum_of_what_it_stores(
    rows: int, columns: int, dtype: torch.dtype, is_aligned: bool, pow2: bool
) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = quantize(weight, scales="pow2" if pow2 else "fp32")
    out, scales = torch.zeros_like(wanted.weight), torch.zeros_like(wanted.scales)
    sums = torch.tensor([7, 0])
    broken = torch.zeros(1, dtype=torch.int32)
    down, right = scales.shape
    quantization.launch(
        torch.tensor([[weight.data_ptr(), out.data_ptr(), scales.data_ptr()]]),
        torch.tensor([[rows, columns, columns, columns, right, 0, columns // 4, 1]]),
        torch.tensor([row << 20 | column for row in range(down) for column in range(right)]),
        broken,
        sums,
        source=dtype,
        aligned=is_aligned,
        pow2=pow2,
    )
    assert sums.tolist() == [7, whole_checksum(out)]
    assert torch.equal(scales, wanted.scales)
    assert torch.equal(out.float() == 0, wanted.weight.float() == 0)
    assert not broken.any()


@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_copy_adds_up_the_checksum_of_what_it_stores(
    rows: int, columns: int, dtype: torch.dtype, is_aligned: bool
) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = torch.zeros(rows, columns, dtype=torch.bfloat16)
    sums = torch.tensor([7, 0])
    step = (columns,) * 3
    records = tiles(0, Rows(rows=rows, columns=columns, stride=columns), (0, 0, 0), step, 1)
    copy.launch(
        torch.tensor([[weight.data_ptr(), out.data_ptr()]]),
        torch.from_numpy(records),
        None,
        sums,
        source=dtype,
        out=torch.bfloat16,
        aligned=is_aligned,
    )
    assert sums.tolist() == [7, whole_checksum(out)]
    torch.testing.assert_close(out.float(), weight.float(), rtol=2**-7, atol=0)

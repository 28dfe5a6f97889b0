"""Reading of weights that vLLM's CPU build has packed, from stand-ins that only multiply."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine_api.errors import RolloutError
from rollout_fp8.vllm.packed import ROWS, PackedReader


class Method:
    """Method that multiplies with a layer's weight."""

    def apply(self, layer: Any, rows: Tensor, bias: None) -> Tensor:
        assert bias is None
        return rows @ layer.held.t()


class Packed(nn.Module):
    """Linear layer whose weight is gone."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)
        self.quant_method: Method | None = Method()
        self.held, self.input_size = weight, weight.shape[1]


def test_a_packed_weight_is_read_back_as_it_is() -> None:
    weight = torch.randn(5, ROWS + 3)
    assert torch.equal(PackedReader(nn.Sequential(Packed(weight)))("0.weight"), weight)


def test_what_cannot_be_read_back_is_refused_with_a_way_out_that_is_one() -> None:
    """Check the refusal in a sync, which reads weights whether it is audited or not."""
    layer = Packed(torch.randn(5, 4))
    layer.quant_method = None
    with pytest.raises(RolloutError, match=r"cannot read back 0\.weight") as caught:
        PackedReader(nn.Sequential(layer))("0.weight")
    assert caught.value.where == "learning the server's layout"
    assert "audit" not in caught.value.remedy

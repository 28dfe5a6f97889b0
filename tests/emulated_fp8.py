"""FP8 as servers compute it, emulated in models of transformers.

A rollout in FP8 differs from float64 by the rounding of weights and of what they are multiplied
with, and tiny models make much of it. This rounding alone tells what a right server may differ by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine_api.hf_names import pieces_of
from rollout_fp8.fp8.layers import kind
from rollout_fp8.fp8.quantize import E4M3_MAX, dequantize, quantize
from rollout_fp8.wire.format import BLOCK


class EmulatedFp8(TorchFunctionMode):
    """Context in which a model computes in FP8, and whose weights are rounded at once, in place.

    Weights have blocks of 128 × 128, and inputs groups of 128 of each token. ``architecture`` is
    that of config.json, for which the table of layers says what is quantized.
    """

    def __init__(self, model: Any, architecture: str) -> None:
        super().__init__()
        self._storages: set[int] = set()
        parameters = dict(model.named_parameters())
        for name, pieces in pieces_of(model).items():
            kinds = {kind(architecture, piece.name) for piece in pieces}
            if name in parameters and kinds == {"quantized"}:
                parameter = parameters[name]
                self._storages.add(parameter.untyped_storage().data_ptr())
                _round_weight(parameter.data)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.nn.functional.linear:
            inputs, weight, *rest = args
            if weight.untyped_storage().data_ptr() in self._storages:
                args = (round_inputs(inputs), weight, *rest)
        return func(*args, **(kwargs or {}))


def round_inputs(inputs: Tensor) -> Tensor:
    """Return the inputs of a layer as they are after their quantization to e4m3."""
    width = inputs.shape[-1]
    padded = torch.nn.functional.pad(inputs.float(), (0, -width % BLOCK))
    groups = padded.unflatten(-1, (-1, BLOCK))
    scales = (groups.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp(min=1e-10)
    rounded = (groups / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scales
    return rounded.flatten(-2)[..., :width].to(inputs.dtype)


def _round_weight(weight: Tensor) -> None:
    for matrix in weight.flatten(0, -3) if weight.dim() > 2 else [weight]:
        rounded = quantize(matrix.float(), scales="fp32")
        matrix.copy_(dequantize(*rounded, torch.float32))

"""Reader of weights that vLLM's CPU build keeps packed for its matrix kernels.

It multiplies them with the identity.

A product with a row of the identity is a column of the weight, exactly: every other term is zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine_api.errors import RolloutError
from rollout_fp8.install.trace import WHERE

# Rows of the identity at a time.
ROWS = 1024


class PackedReader:
    """Parameters and buffers of a model by name, whether still there or only in a packed copy."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, name: str) -> Tensor:
        """Return the parameter in its checkpoint's layout.

        Raises:
            RolloutError: the parameter cannot be read back.
        """
        prefix, _, leaf = name.rpartition(".")
        layer: Any = self._model.get_submodule(prefix)
        # A parameter or a saved buffer.
        tensor: Tensor = getattr(layer, leaf)
        if tensor.numel():
            return tensor
        method: Any = getattr(layer, "quant_method", None)
        # Widths of tensor-parallel layers, of replicated layers, and of an LM head.
        widths = (
            getattr(layer, name, None)
            for name in ("input_size_per_partition", "input_size", "embedding_dim")
        )
        columns = next((width for width in widths if width is not None), None)
        if leaf != "weight" or columns is None or not hasattr(method, "apply"):
            # Even without an audit: the served weights are compared once, when the layout is
            # learnt.
            raise RolloutError(
                f"cannot read back {name}",
                where=WHERE,
                why=f"{type(layer).__name__} keeps it packed",
                remedy="use rollout.name=local for this model",
            )
        parts = [
            method.apply(layer, rows, None)
            for rows in torch.eye(columns, dtype=tensor.dtype).split(ROWS)
        ]
        return torch.cat(parts).t().contiguous()

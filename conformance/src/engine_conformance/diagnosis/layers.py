"""The comparison of hidden states with the oracle's, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_conformance.diagnosis.readings import Document
from engine_conformance.oracle import OracleModel

__all__ = ["LayerFinding", "compare_layers"]

# Largest relative error of a hidden state, by dtype of the computation: some hundred roundings.
BOUNDS = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}


@dataclass(frozen=True, kw_only=True)
class LayerFinding:
    """The error of the hidden states after each layer."""

    errors: Sequence[float]
    """Norm of the difference over the norm of the oracle's, after the embedding and each layer."""

    bound: float

    @property
    def first(self) -> int | None:
        """Index of the first layer beyond the bound, -1 for the embedding; None if all are right.

        A NaN counts as beyond it.
        """
        wrong = [i - 1 for i, error in enumerate(self.errors) if not error <= self.bound]
        return wrong[0] if wrong else None


@torch.no_grad()
def compare_layers(
    oracle: OracleModel, document: Document, hidden: Sequence[Tensor], dtype: str
) -> LayerFinding:
    """Compare an engine's hidden states of one document with the oracle's.

    Args:
        oracle: the model.
        document: the document.
        hidden: states ``[L, C]`` after the embedding and after each layer.
        dtype: dtype of the engine's computation.

    Raises:
        ValueError: where number or shapes of the states are not the model's.
    """
    want = oracle.layers(document.tokens, document.routed_experts)
    if [tuple(x.shape) for x in hidden] != [tuple(x.shape) for x in want]:
        raise ValueError(
            f"expected {len(want)} states of {tuple(want[0].shape)}, "
            f"got {[tuple(x.shape) for x in hidden]}"
        )
    errors = [
        float((got.double() - right).norm() / right.norm())
        for got, right in zip(hidden, want, strict=True)
    ]
    return LayerFinding(errors=errors, bound=BOUNDS[dtype])

"""The oracle of weights that are in memory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_conformance.oracle import OracleModel, WeightMismatch, expected_shapes, read_config
from engine_conformance.oracle.weights import make_adapter, read_params

__all__ = ["build_oracle", "read_oracle"]


def build_oracle(
    content: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    adapter: Mapping[str, Tensor] | None = None,
    *,
    scaling: float = 1.0,
) -> OracleModel:
    """Return the oracle of a model, without a copy of what is in float64 already.

    Args:
        content: content of the model's ``config.json``.
        tensors: weights by their Hugging Face names.
        adapter: tensors of a LoRA adapter by the names of PEFT; None or empty for no adapter.
        scaling: the adapter's scale, alpha over its rank.

    Raises:
        UnsupportedModel: if the model asks for something that the oracle does not compute.
        WeightMismatch: if names or shapes are not those of ``content``.
    """
    with tempfile.TemporaryDirectory(prefix="oracle-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(content), encoding="utf-8")
        config = read_config(folder)
    expected = expected_shapes(config)
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if off := sorted(set(expected.items()) ^ set(given.items())):
        raise WeightMismatch(f"names or shapes are not those of config.json: {off[:5]}")
    params = {name: tensors[name].to(torch.float64) for name in expected}
    made = make_adapter(adapter, scaling) if adapter else None
    return OracleModel(config=config, params=params, adapter=made)


def read_oracle(content: Mapping[str, Any], folder: Path) -> OracleModel:
    """Return the oracle of a folder's weights with another ``config.json``.

    Raises the errors of ``build_oracle``, and ``FileNotFoundError`` for a folder without weights.
    """
    with tempfile.TemporaryDirectory(prefix="oracle-") as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(content), encoding="utf-8")
        config = read_config(scratch)
    return OracleModel(config=config, params=read_params(folder, config))

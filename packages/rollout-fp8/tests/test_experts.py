"""Experts that a server reports, in the form of completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_api.config import ModelSource
from engine_api.errors import RolloutError, UnsupportedCapability
from engine_conformance.fixtures import TinyModel, write_checkpoint
from rollout_fp8.experts import RoutedLayers, routed_layers

ROUTED = RoutedLayers(layers=2, top_k=1, experts=200)


def reported(tokens: int, **changes: Any) -> Any:
    shape = {"layers": 2, "top_k": 1} | changes
    numbers = np.arange(tokens, dtype=np.int32)[:, None, None]
    return np.broadcast_to(numbers + 150, (tokens, shape["layers"], shape["top_k"]))


@pytest.mark.parametrize("tokens", [4, 5])
def test_the_last_token_is_unknown_whether_it_is_reported_or_not(tokens: int) -> None:
    found = ROUTED.read(reported(tokens), 5, "rollout")
    assert found.dtype == torch.int16
    assert found[:, 1, 0].tolist() == [150, 151, 152, 153, -1]


@pytest.mark.parametrize("given", [None, reported(3), reported(5, layers=3), reported(5, top_k=2)])
def test_a_report_that_is_not_of_every_token_and_layer_is_refused(given: Any) -> None:
    with pytest.raises(RolloutError, match=r"expected experts of the shape \(4, 2, 1\), got"):
        ROUTED.read(given, 5, "rollout")


def test_layers_and_experts_are_those_of_the_configuration(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "moe", TinyModel(family="qwen3_moe"))
    assert routed_layers(ModelSource(path=str(folder))) == RoutedLayers(
        layers=2, top_k=2, experts=4
    )
    dense = write_checkpoint(tmp_path / "dense", TinyModel(family="llama"))
    assert "num_experts" not in json.loads((dense / "config.json").read_text())
    with pytest.raises(UnsupportedCapability, match="names no experts"):
        routed_layers(ModelSource(path=str(dense)))

"""Tests of the suite's own reader of checkpoints.

Portable ones are read bit by bit, an engine's own format not at all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine_conformance.cases._state import assert_same_state, read_state
from engine_conformance.compare import ConformanceFailure


def portable(folder: Path, value: float) -> Path:
    folder.mkdir()
    save_file({"model.a": torch.full((2,), value)}, folder / "0.safetensors")
    shard = {"file": "0.safetensors", "offset": [0], "shape": [2]}
    return manifest(folder, {"model.a": {"dtype": "float32", "shape": [2], "shards": [shard]}})


def own(folder: Path) -> Path:
    folder.mkdir()
    return manifest(
        folder, {"model.flat": {"dtype": "float32", "shape": [2], "shards": []}}, state="megatron"
    )


def manifest(folder: Path, tensors: dict[str, Any], **about: Any) -> Path:
    (folder / "manifest.json").write_text(json.dumps({"tensors": tensors} | about))
    return folder


def test_portable_states_are_compared(tmp_path: Path) -> None:
    first = portable(tmp_path / "a", 1.0)
    same = portable(tmp_path / "b", 1.0)
    other = portable(tmp_path / "c", 2.0)
    assert_same_state(first, same, name="state")
    with pytest.raises(ConformanceFailure, match="state"):
        assert_same_state(first, other, name="state")


def test_an_own_format_is_named_where_a_portable_one_is_read(tmp_path: Path) -> None:
    with pytest.raises(
        ConformanceFailure,
        match=r"own format \(megatron\), not portable.*leave out the engine's --option",
    ):
        read_state(own(tmp_path / "a"))


def test_of_own_formats_nothing_is_asked_and_one_beside_a_portable_one_is_a_failure(
    tmp_path: Path,
) -> None:
    first = own(tmp_path / "a")
    second = own(tmp_path / "b")
    assert_same_state(first, second, name="state")
    with pytest.raises(ConformanceFailure, match="own format"):
        assert_same_state(first, portable(tmp_path / "c", 1.0), name="state")

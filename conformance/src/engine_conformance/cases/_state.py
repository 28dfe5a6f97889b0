"""Independent reader of the portable checkpoint: JSON and safetensors, whole tensors by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from engine_conformance.cases._case import must
from engine_conformance.compare import assert_bitwise, assert_covered_once

__all__ = ["assert_same_state", "read_manifest", "read_rank_files", "read_state"]

_PORTABLE = "portable"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return ``manifest.json``, or raise a failure of the engine if it is missing."""
    must(
        (folder / "manifest.json").is_file(),
        "checkpoint",
        "has no manifest.json",
        where=str(folder),
    )
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return manifest


def read_state(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a portable checkpoint, put together from its boxes.

    The boxes must cover the tensor exactly once.
    """
    problem = (
        f"is in the engine's own format ({_format(folder)}), not portable, "
        "as the case demands of an engine that declares portable-checkpoint"
    )
    remedy = "leave out the engine's --option that asks for its own"
    must(_format(folder) == _PORTABLE, "checkpoint", f"{problem}; {remedy}", where=str(folder))
    return {
        key: _assemble(folder, key, entry)
        for key, entry in read_manifest(folder)["tensors"].items()
    }


def assert_same_state(got: Path, want: Path, *, name: str) -> None:
    """Require that two portable checkpoints hold the same bits.

    An engine's own format, which only that engine reads, is not compared here.
    """
    if _PORTABLE in (_format(got), _format(want)):
        assert_bitwise(read_state(got), read_state(want), name=name)


def _format(folder: Path) -> str:
    return str(read_manifest(folder).get("state", _PORTABLE))


def read_rank_files(folder: Path) -> dict[str, Any]:
    """Return each rank's own file, by name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))}


def _assemble(folder: Path, key: str, entry: dict[str, Any]) -> Tensor:
    whole = torch.zeros(entry["shape"], dtype=getattr(torch, entry["dtype"]))
    seen = torch.zeros(entry["shape"], dtype=torch.uint8)
    boxes = dict[str, Any]()
    for shard in entry["shards"]:
        box = tuple(
            slice(start, start + size)
            for start, size in zip(shard["offset"], shard["shape"], strict=True)
        )
        must(
            (folder / shard["file"]).is_file(),
            "checkpoint",
            f"{shard['file']} is not there",
            where=key,
        )
        with safe_open(folder / shard["file"], framework="pt") as file:
            whole[box] = file.get_tensor(key)
        seen[box] += 1
        boxes[f"{shard['file']} at {shard['offset']}"] = box
    assert_covered_once("checkpoint", seen, boxes, where=key)
    return whole

"""Writer of a portable checkpoint in the format of docs/contract.md, without engine-api.

The checkpoint looks as if three ranks had written it. Boxes are such as no engine
makes: columns, an L and its corner, tensors that one rank holds alone, another cut for
each tensor.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

__all__ = ["RANKS", "write_checkpoint"]

RANKS = 3
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape


def write_checkpoint(folder: Path, state: Mapping[str, Tensor], *, step: int) -> Path:
    """Write ``state`` (canonical key → whole tensor) into ``folder/step-…`` and return ``folder``.

    The folder gets its ``latest``.
    """
    place = folder / f"step-{step:06d}"
    (place / "state").mkdir(parents=True)
    held: list[dict[str, Tensor]] = [{} for _ in range(RANKS)]
    tensors: dict[str, Any] = {}
    for key, tensor in state.items():
        boxes = cut(key, tuple(tensor.shape))
        for rank, (offset, shape) in boxes.items():
            inside = tuple(
                slice(start, start + size) for start, size in zip(offset, shape, strict=True)
            )
            held[rank][key] = tensor[inside].clone(memory_format=_contiguous())
        tensors[key] = _entry(tensor, boxes)
    for rank, part in enumerate(held):
        save_file(part, place / _file(rank))
        (place / f"rank-{rank:05d}.json").write_text("{}")
    manifest = {
        "format": 1,
        "contract": "1.0",
        "engine": "engine-conformance",
        "step": step,
        "world_size": RANKS,
        "topology": {},
        "extra": {},
        "tensors": tensors,
        "files": {path.relative_to(place).as_posix(): _fingerprint(path) for path in _files(place)},
    }
    (place / "manifest.json").write_text(json.dumps(manifest))
    (folder / "latest").write_text(place.name)
    return folder


def cut(key: str, shape: tuple[int, ...]) -> dict[int, Box]:
    """Return each rank's box of a tensor, which together cover it exactly once."""
    alone = {zlib.crc32(key.encode()) % RANKS: ((0,) * len(shape), shape)}
    if not shape or max(shape) < RANKS:
        return alone
    if len(shape) == 1 or shape[0] < RANKS:
        return _columns(shape)
    kind = zlib.crc32(key.encode()) % 4
    return alone if kind == 0 else _columns(shape) if kind == 1 else _corner(shape)


def _columns(shape: tuple[int, ...]) -> dict[int, Box]:
    """Return uneven pieces of the last dimension, in an order other than that of the ranks."""
    size = shape[-1]
    rows = shape[:-1]
    ends = (0, max(1, size // 5), max(2, size // 2), size)
    return {
        (piece + 1) % RANKS: (
            (0,) * len(rows) + (ends[piece],),
            (*rows, ends[piece + 1] - ends[piece]),
        )
        for piece in range(RANKS)
    }


def _corner(shape: tuple[int, ...]) -> dict[int, Box]:
    """Return the first rows, then the parts of the remaining rows on either side of a column."""
    rows = shape[0] // 3
    columns = shape[1] // 4
    rest = shape[0] - rows
    return {
        2: ((0, 0), (rows, shape[1])),
        0: ((rows, 0), (rest, columns)),
        1: ((rows, columns), (rest, shape[1] - columns)),
    }


def _entry(tensor: Tensor, boxes: Mapping[int, Box]) -> dict[str, Any]:
    shards = [
        {"file": _file(rank), "offset": list(o), "shape": list(s)}
        for rank, (o, s) in sorted(boxes.items())
    ]
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "shards": shards,
    }


def _file(rank: int) -> str:
    return f"state/{rank:05d}.safetensors"


def _files(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.is_file())


def _fingerprint(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _contiguous() -> Any:
    import torch

    return torch.contiguous_format

"""Buckets of whole tensors, each a header (names, dtypes, shapes) and one buffer of bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch

from engine_api.weights import WeightExport

BUCKET_BYTES = 256 << 20
"""Bytes of a bucket on each side; one larger tensor makes a larger bucket."""
ALIGNMENT = 16
"""Alignment in bytes of a tensor in a buffer, which allows a view of any dtype."""

Entry = tuple[str, str, list[int], int]
"""Name, dtype, shape and first byte of a tensor in a bucket."""


def pack(export: WeightExport, device: torch.device) -> Iterator[tuple[bytes, torch.Tensor]]:
    """Yield the header and the buffer of each bucket of an export, on ``device``."""
    entries: list[Entry] = []
    parts: list[torch.Tensor] = []
    size = 0
    for name, tensor in export:
        # A copy, because the export may reuse the tensor when the next one is requested.
        flat = tensor.detach().to(device, copy=True).contiguous().reshape(-1).view(torch.uint8)
        if parts and size + len(flat) > BUCKET_BYTES:
            yield json.dumps(entries).encode(), torch.cat(parts)
            entries = []
            parts = []
            size = 0
        entries.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size))
        padding = -len(flat) % ALIGNMENT
        parts += [flat, flat.new_zeros(padding)]
        size += len(flat) + padding
    if parts:
        yield json.dumps(entries).encode(), torch.cat(parts)


def unpack(header: bytes, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a bucket, which are views of its buffer."""
    for name, dtype, shape, start in json.loads(header):
        kind: torch.dtype = getattr(torch, dtype)
        count = kind.itemsize
        for length in shape:
            count *= length
        yield name, buffer[start : start + count].view(kind).view(shape)

"""Weights from the engine's first process to rollouts in processes of their own: broadcasts of packed tensors.

A bucket is a header (names, dtypes, shapes) and one buffer of bytes, so that every dtype travels over every backend: the
device's (NCCL, HCCL) or gloo. The group is made on a store of its own, apart from the default group of the engine's ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented, not re-exported

from engine_api.devices import device_of
from engine_api.errors import RolloutError
from engine_api.weights import WeightExport

BUCKET_BYTES = 256 << 20  # on each side; one larger tensor makes a larger bucket
ALIGNMENT = 16  # bytes; where a tensor begins in a buffer: any dtype's view
END, FAILED = 0, -1  # in the place of a header's length

Entry = tuple[str, str, list[int], int]  # name, dtype, shape, first byte


def serve(host: str, size: int, timeout_s: float) -> Any:
    """The store that the sender's process holds; ``store.port`` tells the others where."""
    return TCPStore(host, 0, size, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def reach(host: str, port: int, size: int, timeout_s: float) -> Any:
    """The same store from a receiver."""
    return TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


class Channel:
    """The sender is rank 0. All construct it together."""

    def __init__(self, store: Any, rank: int, size: int, device: str, timeout_s: float) -> None:
        kind = device_of(device)
        self._device = kind.current()
        self._store = store  # lives as long as the group
        self._group = kind.process_group(store, rank, size, timedelta(seconds=timeout_s))

    def send(self, export: WeightExport) -> int:
        """Broadcast a whole export, which is read to its end; the bytes that were sent.

        Raises what the export raises, after the receivers have been told.
        """
        sent = 0
        buckets = _buckets(export, self._device)
        while True:
            try:
                bucket = next(buckets, None)
            except Exception:  # whatever it is, the receivers must not wait for more; raised again
                self._broadcast(torch.tensor([FAILED, 0]))
                raise
            if bucket is None:
                self._broadcast(torch.tensor([END, 0]))
                return sent
            header, buffer = bucket
            self._broadcast(torch.tensor([len(header), len(buffer)]))
            self._broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8))
            self._broadcast(buffer)
            sent += len(buffer)

    def receive(self) -> WeightExport:
        """(name, tensor) as they come; a tensor is valid until the next one is asked for. Exhaust it.

        Raises ``RolloutError`` when the sender failed.
        """
        while True:
            size, length = self._broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
            if size == END:
                return
            if size == FAILED:
                raise RolloutError("the engine's export failed", where="weight sync", remedy="see the engine's error")
            header = self._broadcast(torch.empty(size, dtype=torch.uint8))
            buffer = self._broadcast(torch.empty(length, dtype=torch.uint8))
            yield from _unpack(bytes(header.cpu().numpy()), buffer)

    def close(self) -> None:
        """End broadcasts that hang, give the group back."""
        self._group.abort()

    def _broadcast(self, buffer: torch.Tensor) -> torch.Tensor:
        moved = buffer.to(self._device)
        self._group.broadcast(moved, 0).wait()
        return moved


def _buckets(export: WeightExport, device: torch.device) -> Iterator[tuple[bytes, torch.Tensor]]:
    entries: list[Entry] = []
    parts: list[torch.Tensor] = []
    size = 0
    for name, tensor in export:
        # A copy: the tensor is the export's own again when the next one is asked for.
        flat = tensor.detach().to(device, copy=True).contiguous().reshape(-1).view(torch.uint8)
        if parts and size + len(flat) > BUCKET_BYTES:
            yield json.dumps(entries).encode(), torch.cat(parts)
            entries, parts, size = [], [], 0
        entries.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size))
        padding = -len(flat) % ALIGNMENT
        parts += [flat, flat.new_zeros(padding)]
        size += len(flat) + padding
    if parts:
        yield json.dumps(entries).encode(), torch.cat(parts)


def _unpack(header: bytes, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for name, dtype, shape, start in json.loads(header):
        kind: torch.dtype = getattr(torch, dtype)
        count = kind.itemsize
        for length in shape:
            count *= length
        yield name, buffer[start : start + count].view(kind).view(shape)

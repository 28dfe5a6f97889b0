"""Transport by CUDA IPC on one host: receivers map the stream's own buffers and read them in place.

A buffer is opened once and kept from sync to sync. Both sides order their work with events that the
other opens too, so that no host waits for a device. The sender keeps its buffers until the
receivers have closed (torch holds memory back that another process still maps; a receiver that was
killed keeps it held until the sender ends).

A receiver on another GPU than the sender's must see that GPU (``CUDA_VISIBLE_DEVICES``); it copies
each bucket over and waits for that copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from engine_api.errors import RolloutError
from rollout_fp8.transports.channel import WHERE, Channel, receive_from_all
from rollout_fp8.wire.format import BucketPlan, WirePlan

# Positions among the arguments of torch's ``rebuild_cuda_tensor``, by which torch's own queues
# share CUDA tensors. Classes do not travel: the receiver knows them.
TENSOR_CLASS = 0
STORAGE_CLASS = 4
STORAGE_DEVICE = 6


class IpcOutgoing:
    """See ``kinds.Outgoing``."""

    lends = True

    def __init__(self, plan: WirePlan, device: torch.device) -> None:
        self._device = _indexed(device)
        self._ready = [_shared_event() for _ in plan.slots]
        # Events by receiver, then by slot.
        self._read: list[list[Any]] = []
        # Address of the buffer that receivers have opened, by slot.
        self._known: dict[int, int] = {}
        self._slot = 0

    def open(self, channels: Sequence[Channel]) -> None:
        """See ``kinds.Outgoing.open``."""
        with torch.cuda.device(self._device):
            handles = [event.ipc_handle() for event in self._ready]
        for channel in channels:
            channel.send("events", _uuid(self._device), handles)
        self._read = [
            [torch.cuda.Event.from_ipc_handle(self._device, handle) for handle in theirs]
            for (theirs,) in receive_from_all(channels, "opened")
        ]

    def put(self, bucket: BucketPlan, buffer: Tensor) -> Sequence[Any]:
        """See ``kinds.Outgoing.put``."""
        self._slot = bucket.slot
        self._ready[self._slot].record(torch.cuda.current_stream(self._device))
        if self._known.get(self._slot) == buffer.data_ptr():
            return [None] * len(self._read)
        self._known[self._slot] = buffer.data_ptr()
        # The whole rest of the storage: a later bucket of this slot may be larger.
        rest = buffer.untyped_storage().nbytes() - buffer.storage_offset()
        whole = buffer.as_strided((rest,), (1,))
        # torch counts users: each receiver takes a handle of its own.
        return [_shared(whole) for _ in self._read]

    def note_taken(self) -> None:
        """See ``kinds.Outgoing.taken``."""
        stream = torch.cuda.current_stream(self._device)
        for events in self._read:
            if events:
                stream.wait_event(events[self._slot])

    def close(self) -> None:
        """Forget the receivers.

        The buffers belong to the stream.
        """
        self._known = {}
        self._read = []


class IpcIncoming:
    """See ``kinds.Incoming``."""

    def __init__(self, plan: WirePlan, device: torch.device) -> None:
        self._plan = plan
        self._device = _indexed(device)
        self._read = [_shared_event() for _ in plan.slots]
        self._ready: list[Any] = []
        # The sender's buffers, by slot.
        self._buffers: dict[int, Tensor] = {}
        # Copies by slot, used when the sender's buffers are on another GPU.
        self._copies: dict[int, Tensor] = {}
        self._source = self._device

    def open(self, channel: Channel) -> None:
        """See ``kinds.Incoming.open``."""
        uuid, handles = channel.receive("events")
        self._source = _visible(uuid)
        self._ready = [torch.cuda.Event.from_ipc_handle(self._source, handle) for handle in handles]
        own_handles = []
        if self._near:
            with torch.cuda.device(self._device):
                own_handles = [event.ipc_handle() for event in self._read]
        channel.send("opened", own_handles)

    def expect(self, index: int) -> None:
        """Do nothing: there is nothing to prepare."""

    def take(self, index: int, notice: tuple[Any, ...] | None) -> Tensor:
        """See ``kinds.Incoming.take``."""
        bucket = self._plan.buckets[index]
        if notice is not None:
            self._buffers[bucket.slot] = self._opened(notice)
        # The stream must be of the event's own GPU: another GPU's ends the process (torch 2.11). A
        # copy waits for both.
        torch.cuda.current_stream(self._source).wait_event(self._ready[bucket.slot])
        buffer = self._buffers[bucket.slot][: bucket.num_bytes]
        return buffer if self._near else self._copied(bucket, buffer)

    def release(self, index: int) -> None:
        """See ``kinds.Incoming.release``."""
        if self._near:
            self._read[self._plan.buckets[index].slot].record(
                torch.cuda.current_stream(self._device)
            )
        else:
            # The sender may not see this GPU's events.
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Unmap the sender's memory once nothing reads it."""
        torch.cuda.synchronize(self._device)
        self._buffers = {}
        self._copies = {}
        self._ready = []

    @property
    def _near(self) -> bool:
        return self._source == self._device

    def _opened(self, notice: tuple[Any, ...]) -> Tensor:
        arguments = list(notice)
        arguments[TENSOR_CLASS] = Tensor
        arguments[STORAGE_CLASS] = torch.storage.TypedStorage
        # The sender may count its GPUs differently. The index is set by position, not by name:
        # SGLang wraps torch's function in one of its own.
        arguments[STORAGE_DEVICE] = self._source.index
        return reductions.rebuild_cuda_tensor(*arguments)

    def _copied(self, bucket: BucketPlan, buffer: Tensor) -> Tensor:
        if bucket.slot not in self._copies:
            self._copies[bucket.slot] = torch.empty(
                self._plan.slots[bucket.slot], dtype=torch.uint8, device=self._device
            )
        return self._copies[bucket.slot][: bucket.num_bytes].copy_(buffer, non_blocking=True)


def _shared(whole: Tensor) -> tuple[Any, ...]:
    """Return the arguments by which another process opens a tensor, without their classes."""
    _, arguments = reductions.reduce_tensor(whole)
    notice = list(arguments)
    assert notice[TENSOR_CLASS] is Tensor, "the buffer is a plain tensor"
    assert notice[STORAGE_CLASS] is torch.storage.TypedStorage, "as torch shares one since 2.0"
    notice[TENSOR_CLASS] = notice[STORAGE_CLASS] = None
    return tuple(notice)


def _shared_event() -> torch.cuda.Event:
    return torch.cuda.Event(interprocess=True)


def _indexed(device: torch.device) -> torch.device:
    return torch.device(
        "cuda", torch.cuda.current_device() if device.index is None else device.index
    )


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _visible(uuid: str) -> torch.device:
    for index in range(torch.cuda.device_count()):
        if _uuid(torch.device("cuda", index)) == uuid:
            return torch.device("cuda", index)
    raise RolloutError(
        f"GPU {uuid} of the sender cannot be seen from here",
        where=WHERE,
        why="CUDA_VISIBLE_DEVICES hides it, or it is another host's",
        remedy="make it visible, or choose transport 'collective'",
    )

"""Transport by shared memory on one host, for weights on the CPU.

The memory has no name: the receivers get it as open files through the channel's socket. So nothing
is left behind, however the processes end, and no limit of ``/dev/shm`` applies.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from rollout_fp8.transports.channel import Channel, receive_from_all
from rollout_fp8.wire.format import BucketPlan, WirePlan


class ShmOutgoing:
    """See ``kinds.Outgoing``.

    One copy into the shared memory frees the stream's own buffer at once.
    """

    lends = False

    def __init__(self, plan: WirePlan) -> None:
        self._sizes = plan.slots
        self._slots: list[Tensor] = []
        self._num_receivers = 0

    def open(self, channels: Sequence[Channel]) -> None:
        """See ``kinds.Outgoing.open``."""
        files = [os.memfd_create("rollout-weights", os.MFD_CLOEXEC) for _ in self._sizes]
        try:
            for file, size in zip(files, self._sizes, strict=True):
                os.ftruncate(file, max(size, 1))
            self._slots = [
                _mapped(file, size) for file, size in zip(files, self._sizes, strict=True)
            ]
            for channel in channels:
                channel.send_files(files)
            receive_from_all(channels, "opened")
        finally:
            for file in files:
                os.close(file)
        self._num_receivers = len(channels)

    def put(self, bucket: BucketPlan, buffer: Tensor) -> Sequence[None]:
        """See ``kinds.Outgoing.put``."""
        self._slots[bucket.slot][: bucket.num_bytes].copy_(buffer)
        return [None] * self._num_receivers

    def note_taken(self) -> None:
        """Do nothing: nothing of the stream's is lent."""

    def close(self) -> None:
        """Unmap the memory, which lives for as long as another process maps it."""
        self._slots = []


class ShmIncoming:
    """See ``kinds.Incoming``."""

    def __init__(self, plan: WirePlan) -> None:
        self._plan = plan
        self._slots: list[Tensor] = []

    def open(self, channel: Channel) -> None:
        """See ``kinds.Incoming.open``."""
        files = channel.receive_files(len(self._plan.slots))
        try:
            self._slots = [
                _mapped(file, size) for file, size in zip(files, self._plan.slots, strict=True)
            ]
        finally:
            for file in files:
                os.close(file)
        channel.send("opened")

    def expect(self, index: int) -> None:
        """Do nothing: there is nothing to prepare."""

    def take(self, index: int, notice: None) -> Tensor:
        """See ``kinds.Incoming.take``."""
        bucket = self._plan.buckets[index]
        return self._slots[bucket.slot][: bucket.num_bytes]

    def release(self, index: int) -> None:
        """Do nothing: on the CPU the bucket has been read."""

    def close(self) -> None:
        """Unmap the memory."""
        self._slots = []


def _mapped(file: int, size: int) -> Tensor:
    return torch.from_file(
        f"/proc/self/fd/{file}", shared=True, size=max(size, 1), dtype=torch.uint8
    )

"""Parts of a kind of transport: an end at the sender and an end at each receiver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from engine_api.errors import RolloutError
from rollout_fp8.transports.channel import WHERE, Channel
from rollout_fp8.wire.format import BucketPlan, WirePlan

Kind = Literal["ipc", "shm", "collective"]


class Outgoing(Protocol):
    """Sender's end, for one plan and one set of receivers."""

    lends: bool
    """True where receivers read the stream's own buffer, which is kept until they have taken it."""

    def open(self, channels: Sequence[Channel]) -> None:
        """Agree with the receivers' ``Incoming.open``. Raises ``PeerError``."""
        ...

    def put(self, bucket: BucketPlan, buffer: Tensor) -> Sequence[Any]:
        """Make a bucket available, and return each receiver's notice of it.

        Raises ``RolloutError``.
        """
        ...

    def note_taken(self) -> None:
        """Note that every receiver has read the last bucket, or has queued it (where ``lends``)."""
        ...

    def close(self) -> None:
        """Free all resources, and end operations that hang."""
        ...


class Incoming(Protocol):
    """Receiver's end."""

    def open(self, channel: Channel) -> None:
        """Agree with ``Outgoing.open``. Raises ``PeerError``."""
        ...

    def expect(self, index: int) -> None:
        """Prepare to take bucket ``index`` next.

        The sender may not have made it.

        Raises ``RolloutError``.
        """
        ...

    def take(self, index: int, notice: Any) -> Tensor:
        """Return bucket ``index``, uint8, ready for the current stream. Raises ``RolloutError``."""
        ...

    def release(self, index: int) -> None:
        """Note that the bucket has been read (on CUDA: that the read is queued on its stream)."""
        ...

    def close(self) -> None:
        """Free all resources, and end operations that hang."""
        ...


def outgoing(
    kind: Kind, plan: WirePlan, device: torch.device, host: str | None, timeout_s: float
) -> Outgoing:
    """Return the sender's end.

    Raises ``RolloutError`` for a kind that does not serve the device.
    """
    _check(kind, device)
    if kind == "ipc":
        from rollout_fp8.transports.ipc import IpcOutgoing

        return IpcOutgoing(plan, device)
    if kind == "shm":
        from rollout_fp8.transports.shm import ShmOutgoing

        return ShmOutgoing(plan)
    from rollout_fp8.transports.collective import CollectiveOutgoing

    return CollectiveOutgoing(device, host or "127.0.0.1", timeout_s)


def incoming(kind: Kind, plan: WirePlan, device: torch.device, timeout_s: float) -> Incoming:
    """Return a receiver's end.

    Raises ``RolloutError`` for a kind that does not serve the device.
    """
    _check(kind, device)
    if kind == "ipc":
        from rollout_fp8.transports.ipc import IpcIncoming

        return IpcIncoming(plan, device)
    if kind == "shm":
        from rollout_fp8.transports.shm import ShmIncoming

        return ShmIncoming(plan)
    from rollout_fp8.transports.collective import CollectiveIncoming

    return CollectiveIncoming(plan, device, timeout_s)


def _check(kind: Kind, device: torch.device) -> None:
    needed = {"ipc": "cuda", "shm": "cpu"}.get(kind, device.type)
    if device.type != needed:
        raise RolloutError(
            f"transport {kind!r} cannot carry weights on {device.type}",
            where=WHERE,
            why=f"it is for {needed}",
            remedy="shm on the CPU, ipc on CUDA, collective on either",
        )

"""The control plane of an engine: small values between ranks, never tensors of the model.

It runs on a gloo group of its own, so that an agreement between ranks costs no device
synchronization, and an error on one rank becomes an error on all: no rank is left waiting in a
collective. Values are encoded by ``engine_api.codec``; nothing is unpickled.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from engine_api import heartbeat
from engine_api.codec import CodecError, decode, encode
from engine_api.errors import RankFailure

T = TypeVar("T")
# Bytes that the first exchange carries; most values need no second one.
_FRAME = 1024
# Bytes of the frame's prefix: the message's length, and a flag for an error's text.
_PREFIX = 9


class Comm(Protocol):
    """The control plane over all ranks of one engine."""

    rank: int
    world_size: int

    def all_gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank, by rank, as equal values of the same types.

        Raises ``CodecError`` for a value that ``engine_api.codec`` cannot encode, and
        ``RankFailure`` on the other ranks.
        """
        ...

    def close(self) -> None:
        """Free the group."""
        ...


class SingleComm:
    """The control plane of a single rank."""

    rank = 0
    world_size = 1

    def all_gather(self, value: Any) -> list[Any]:
        """Return ``[value]``."""
        return [value]

    def close(self) -> None:
        """Do nothing, because there is no group to free."""


class GroupComm:
    """The control plane over a process group that its caller made and destroys.

    None is the default group.
    """

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._group = group
        self._lane = "default group" if group is None else f"group {group.group_name}"
        # Only one thread at a time may use a group. An asynchronous save has a group of its own.
        self._lock = threading.Lock()

    def all_gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank.

        See ``Comm.all_gather``.

        Raises ``RankFailure`` for a rank that is gone, or does not join within the group's timeout.
        """
        failed: CodecError | None = None
        try:
            message = encode(value)
        # The other ranks wait for this one, so they receive the error's text. It is raised below.
        except CodecError as error:
            failed = error
            message = encode(str(error))
        with self._lock, heartbeat.watched("all_gather", self._lane):
            rows = self._exchange(message, failed=failed is not None)
        if failed is not None:
            raise heartbeat.mark_as_agreed(failed)
        values = [decode(row) for row, _ in rows]
        failures = {rank: str(values[rank]) for rank, (_, wrong) in enumerate(rows) if wrong}
        if failures:
            raise heartbeat.mark_as_agreed(RankFailure(failures))
        return values

    def close(self) -> None:
        """Do nothing, because the group belongs to its maker."""

    def _exchange(self, message: bytes, *, failed: bool) -> list[tuple[bytes, bool]]:
        """Return every rank's message, with True for those that are an error's text."""
        head = len(message).to_bytes(_PREFIX - 1, "little") + bytes([failed])
        capacity = _FRAME - _PREFIX
        first = self._gather((head + message[:capacity]).ljust(_FRAME, b"\0"))
        sizes = [int.from_bytes(row[: _PREFIX - 1], "little") for row in first]
        more = max(sizes) - capacity
        rest: Sequence[bytes] = [b""] * len(first)
        if more > 0:
            rest = self._gather(message[capacity:].ljust(more, b"\0"))
        return [
            ((row[_PREFIX:] + tail)[:size], bool(row[_PREFIX - 1]))
            for row, tail, size in zip(first, rest, sizes, strict=True)
        ]

    def _gather(self, frame: bytes) -> list[bytes]:
        """Return every rank's frame, all of the same size."""
        import torch
        import torch.distributed as dist

        device = self._device()
        sent = torch.frombuffer(bytearray(frame), dtype=torch.uint8).to(device)
        received = torch.empty((self.world_size, len(frame)), dtype=torch.uint8, device=device)
        dist.all_gather(list(received.unbind(0)), sent, group=self._group)
        return [row.tobytes() for row in received.cpu().numpy()]

    def _device(self) -> str:
        """Return the CPU if the group has a backend for it, and the accelerator if not.

        All groups that engines make have one for the CPU.
        """
        import torch
        import torch.distributed as dist

        backends = dist.get_backend_config(self._group)
        return "cpu" if "cpu:" in backends else torch.accelerator.current_accelerator().type  # pyright: ignore[reportOptionalMemberAccess] - a group without the CPU has one


class TorchComm(GroupComm):
    """A control plane over a new gloo group of all ranks of the default process group.

    All ranks must construct it together. While one is open, a thread of this process shows the
    other ranks that the process is alive (see ``engine_api.heartbeat``).

    Args:
        timeout: time after which a rank that does not join a collective is a ``RankFailure`` on the
            other ranks; None is 10 minutes. The first group's timeout is also how long a rank may
            be silent.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        import torch.distributed as dist

        limit = timeout or timedelta(seconds=heartbeat.TIMEOUT_S)
        super().__init__(dist.new_group(backend="gloo", timeout=limit))
        self._watch = heartbeat.join(self._group.group_name, self.all_gather, limit.total_seconds())
        self._is_open = True

    def close(self) -> None:
        """Destroy the group.

        A second call does nothing.
        """
        import torch.distributed as dist

        if not self._is_open:
            return
        self._is_open = False
        self._watch.leave()
        if dist.is_initialized():
            dist.destroy_process_group(self._group)


def together(comm: Comm, work: Callable[[], T]) -> list[T]:
    """Run ``work`` on every rank and return the results of all ranks, by rank.

    When it raises on any rank, every rank raises: a rank where it failed its own error, the other
    ranks a ``RankFailure`` with the messages of those that failed.
    """
    mine: Any = None
    error: Exception | None = None
    try:
        mine = work()
    except Exception as caught:  # noqa: BLE001 - no rank may be left waiting; it is raised below
        error = caught
    message = None if error is None else str(error) or type(error).__name__
    rows = comm.all_gather((message, mine))
    if error is not None:
        raise heartbeat.mark_as_agreed(error)
    failures = {rank: message for rank, (message, _) in enumerate(rows) if message is not None}
    if failures:
        raise heartbeat.mark_as_agreed(RankFailure(failures))
    return [value for _, value in rows]

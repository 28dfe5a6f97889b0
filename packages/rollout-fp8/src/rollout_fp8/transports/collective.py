"""Transport by one broadcast for each bucket, for rollouts on other GPUs or hosts.

It uses NCCL on CUDA, HCCL on Ascend and gloo on the CPU.

Buckets are bytes, so FP8 travels over any backend. The group is separate from
``torch.distributed``'s default group, which trainer and rollouts each have for themselves:
``ProcessGroupNCCL`` and its like are made directly on a store (``init_process_group`` makes one
world for each process, and ``new_group`` only splits it). NCCL and gloo trust their network.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine_api.devices import device_of
from engine_api.errors import PeerError
from engine_api.stores import reach_store, serve_store
from rollout_fp8.transports.channel import WHERE, Channel, receive_from_all
from rollout_fp8.wire.format import BucketPlan, WirePlan

WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
LEAVE_POLL_S = 0.05


class BroadcastGroup:
    """Group of the sender (rank 0) and its receivers. All of them construct it together.

    Raises:
        PeerError: a member does not come, or fails in a broadcast.
    """

    def __init__(
        self, store: Any, rank: int, size: int, device: torch.device, timeout_s: float
    ) -> None:
        kind = device_of(device.type)
        self._streams = kind.has_streams
        # Broadcasts over gloo that have not been waited for yet.
        self._begun: list[dist.Work] = []
        # NCCL's and HCCL's own deadline ends the process: the channel's must come first.
        timeout = timedelta(seconds=2 * timeout_s + 60 if kind.has_streams else timeout_s)
        try:
            with _without_watchdog():
                self._group: Any = kind.process_group(store, rank, size, timeout)
        except RuntimeError as error:
            raise _broken(error) from error
        # NCCL connects at the first broadcast, and blocks the host meanwhile.
        self.wait(self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device)))

    def broadcast(self, buffer: Tensor) -> dist.Work:
        """Begin a broadcast.

        On CUDA it follows the work that is queued on the current stream.
        """
        try:
            work = self._group.broadcast(buffer, 0)
        except RuntimeError as error:
            raise _broken(error) from error
        if not self._streams:
            self._begun.append(work)
        return work

    def wait(self, work: dist.Work) -> None:
        """Wait for a broadcast's bytes (on CUDA the current stream waits, not the host)."""
        try:
            work.wait()
        except RuntimeError as error:
            self._forget(work)
            # The error's holder keeps this frame, and gloo's work keeps its connections: the other
            # members would wait for bytes from this process until their timeout, though it has
            # left. (``abort`` frees the group for that reason, too.)
            del work
            raise _broken(error) from error
        self._forget(work)

    def _forget(self, work: dist.Work) -> None:
        self._begun = [begun for begun in self._begun if begun is not work]

    def abort(self) -> None:
        """End broadcasts that hang, and leave the group, even if this object is still held.

        It returns at once.
        """
        group = self._group
        begun = self._begun
        self._group = None
        self._begun = []
        group.abort()
        threading.Thread(
            target=_leave, args=([group], begun), name="leave a group of broadcasts", daemon=True
        ).start()


def _leave(group: list[Any], begun: list[dist.Work]) -> None:
    """Free a group, as its last holder, once the broadcasts that it has begun have ended.

    gloo's group has no abort: where it is freed, it waits for those broadcasts, up to its timeout.
    A process that leaves because of an error must not wait there before the sender hears of it. And
    a thread that waits there, in C++, when the interpreter ends would end the process by SIGABRT.
    So the wait happens here.
    """
    while begun:
        begun[:] = [work for work in begun if not work.is_completed()]
        time.sleep(LEAVE_POLL_S)
    group.clear()


class CollectiveOutgoing:
    """See ``kinds.Outgoing``."""

    lends = False

    def __init__(self, device: torch.device, host: str, timeout_s: float) -> None:
        self._device = device
        self._host = host
        self._timeout_s = timeout_s
        self._group: BroadcastGroup | None = None
        self._num_receivers = 0

    def open(self, channels: Sequence[Channel]) -> None:
        """See ``kinds.Outgoing.open``."""
        size = len(channels) + 1
        store = _store(self._host, 0, size, self._timeout_s)
        for rank, channel in enumerate(channels, start=1):
            channel.send("join", self._host, store.port, rank, size)
        self._group = BroadcastGroup(store, 0, size, self._device, self._timeout_s)
        receive_from_all(channels, "opened")
        self._num_receivers = len(channels)

    def put(self, bucket: BucketPlan, buffer: Tensor) -> Sequence[None]:
        """See ``kinds.Outgoing.put``."""
        assert self._group is not None, "open comes first"
        self._group.wait(self._group.broadcast(buffer))
        return [None] * self._num_receivers

    def note_taken(self) -> None:
        """Do nothing: nothing of the stream's is lent."""

    def close(self) -> None:
        """See ``kinds.Outgoing.close``."""
        if self._group is not None:
            self._group.abort()
            self._group = None


class CollectiveIncoming:
    """See ``kinds.Incoming``. The next bucket is received while one is installed."""

    def __init__(self, plan: WirePlan, device: torch.device, timeout_s: float) -> None:
        self._plan = plan
        self._device = device
        self._timeout_s = timeout_s
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device) for size in plan.slots]
        self._works: dict[int, dist.Work] = {}
        self._group: BroadcastGroup | None = None

    def open(self, channel: Channel) -> None:
        """See ``kinds.Incoming.open``."""
        host, port, rank, size = channel.receive("join")
        store = _store(host, port, size, self._timeout_s)
        self._group = BroadcastGroup(store, rank, size, self._device, self._timeout_s)
        channel.send("opened")

    def expect(self, index: int) -> None:
        """See ``kinds.Incoming.expect``. A broadcast begins when all members have joined it."""
        assert self._group is not None, "open comes first"
        for each in self._soon(index):
            if each not in self._works:
                self._works[each] = self._group.broadcast(self._buffer(each))

    def take(self, index: int, notice: None) -> Tensor:
        """See ``kinds.Incoming.take``."""
        assert self._group is not None, "open comes first"
        self._group.wait(self._works.pop(index))
        return self._buffer(index)

    def release(self, index: int) -> None:
        """Do nothing: a broadcast into the same slot is queued behind the work that reads it."""

    def close(self) -> None:
        """See ``kinds.Incoming.close``."""
        if self._group is not None:
            self._group.abort()
            self._group = None
        self._works = {}
        self._slots = []

    def _soon(self, index: int) -> list[int]:
        """Return this bucket's index, and the next one's if that bucket has its own buffer."""
        buckets = self._plan.buckets
        return [
            i
            for i in (index, index + 1)
            if i < len(buckets) and (i == index or buckets[i].slot != buckets[index].slot)
        ]

    def _buffer(self, index: int) -> Tensor:
        bucket = self._plan.buckets[index]
        return self._slots[bucket.slot][: bucket.num_bytes]


def _store(host: str, port: int, size: int, timeout_s: float) -> Any:
    """Return the store at which a sender and its receivers meet.

    The sender opens it, on any port (``port`` 0), and the receivers join it.

    Raises:
        PeerError: there is no store in time.
    """
    opens = port == 0
    try:
        return (
            serve_store(host, size, timeout_s)
            if opens
            else reach_store(host, port, size, timeout_s)
        )
    except (OSError, RuntimeError) as error:
        # An unusable address or one that is in use; torch's own error, and a deadline.
        if opens:
            what = f"cannot open a store at {host}"
            remedy = "give the sender an address of this host, on which it has a port free"
        else:
            what = f"cannot join the sender's store at {host}:{port}"
            remedy = (
                "check that the sender still runs, and that its host's ports can be reached "
                "from here (firewall, interface)"
            )
        raise PeerError(
            what, where=WHERE, why=str(error).partition("\n")[0], remedy=remedy
        ) from error


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Make a group without NCCL's watchdog.

    The watchdog would end this process when another one dies. The channel notices that instead.
    """
    kept = os.environ.get(WATCHDOG)
    os.environ[WATCHDOG] = "0"
    try:
        yield
    finally:
        del os.environ[WATCHDOG]
        if kept is not None:
            os.environ[WATCHDOG] = kept


def _broken(error: RuntimeError) -> PeerError:
    return PeerError(
        "a broadcast failed",
        where=WHERE,
        why=str(error),
        remedy="see the other processes' messages",
    )

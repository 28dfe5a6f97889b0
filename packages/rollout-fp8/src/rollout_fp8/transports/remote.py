"""Receiver's side of a transport, in a process that serves the weights."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from engine_api.devices import device_of
from engine_api.errors import PeerError, RolloutError
from rollout_fp8.export.exporter import whole_tensors
from rollout_fp8.transports.channel import WHERE, Channel
from rollout_fp8.transports.kinds import Incoming, incoming
from rollout_fp8.transports.listener import connect
from rollout_fp8.wire.format import BucketPlan, WirePlan


class RemoteStream:
    """``WireStream`` of one sync, pulled from a sender.

    ``seconds`` are the sender's, and ``transfer``: the time that this side waited for buckets,
    including the time in which they were made.

    Attributes:
        answer: value that the sender gets at the end, set by the consumer; see
            ``engine_api.codec``.
    """

    def __init__(
        self,
        channel: Channel,
        plan: WirePlan,
        transport: Incoming,
        device: torch.device,
        *,
        audit: bool,
    ) -> None:
        self.plan = plan
        self.device = device
        self.audit = audit
        self.answer: Any = None
        self._channel = channel
        self._transport = transport
        self._left: Iterator[tuple[BucketPlan, Tensor]] | None = None
        self._end: tuple[Mapping[str, int], Mapping[str, float]] | None = None
        self._waited = 0.0

    def buckets(self) -> Iterator[tuple[BucketPlan, Tensor]]:
        """See ``WireStream.buckets``. Raises ``PeerError``."""
        if self._left is None:
            self._left = self._pull()
        return self._left

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """See ``WireStream.__iter__``.

        A stream whose buckets a caller began to take is only run to its end.
        """
        if self._left is None:
            yield from whole_tensors(self.buckets())
            return
        for _ in self._left:
            pass

    def checksums(self) -> Mapping[str, int]:
        """See ``WireStream.checksums``."""
        return self._ending()[0]

    def seconds(self) -> Mapping[str, float]:
        """See ``WireStream.seconds``."""
        return {**self._ending()[1], "transfer": self._waited}

    def _ending(self) -> tuple[Mapping[str, int], Mapping[str, float]]:
        assert self._end is not None, "after the last bucket"
        return self._end

    def _pull(self) -> Iterator[tuple[BucketPlan, Tensor]]:
        for index, bucket in enumerate(self.plan.buckets):
            begin = time.perf_counter()
            self._transport.expect(index)
            (notice,) = self._channel.receive("bucket")
            buffer = self._transport.take(index, notice)
            self._waited += time.perf_counter() - begin
            yield bucket, buffer
            self._transport.release(index)
            self._channel.send("taken")
        checksums, seconds = self._channel.receive("end")
        self._end = (checksums, seconds)

    def finish(self) -> None:
        """Report to the sender that all is installed. Raises ``RolloutError`` when it is not."""
        if self._end is None:
            raise RolloutError(
                "the stream of weights was not read to its end",
                where=WHERE,
                remedy="exhaust the stream",
            )
        if (kind := device_of(self.device.type)).has_streams:
            kind.module.current_stream(self.device).synchronize()
        self._channel.send("done", self.answer)


class _Session:
    """Connection to one sender, with the parts that stay the same from sync to sync."""

    def __init__(
        self,
        address: str,
        count: int,
        rank: int,
        device: torch.device,
        timeout_s: float,
        key: bytes | None,
    ) -> None:
        self.channel = connect(address, timeout_s, key)
        self._device = device
        self._transport: Incoming | None = None
        try:
            self.channel.send("hello", rank, count)
            kind, self._plan = self.channel.receive("plan")
            self._transport = incoming(kind, self._plan, device, timeout_s)
            self.channel.send("learnt")
            self._transport.open(self.channel)
        except BaseException as error:
            # Of an interrupt too: the sender would wait for this process.
            self.close(str(error) or type(error).__name__)
            raise

    def begin(self, count: int) -> RemoteStream:
        """Return the next sync's stream. Raises ``PeerError``."""
        theirs, audit = self.channel.receive("begin")
        if theirs != count:
            raise PeerError(
                f"expected sync {count} from {self.channel.peer}, got sync {theirs}",
                where=WHERE,
                remedy="give each receiver Sender.address again for every sync",
            )
        assert self._transport is not None, "it was opened"
        return RemoteStream(self.channel, self._plan, self._transport, self._device, audit=audit)

    def close(self, why: str) -> None:
        """Report the reason to the sender, and free all resources."""
        self.channel.fail(why)
        if self._transport is not None:
            self._transport.close()


# Sessions by sender and rank.
_SESSIONS: dict[tuple[str, int], _Session] = {}


@contextmanager
def receive_weights(
    address: str,
    *,
    rank: int = 0,
    device: torch.device,
    timeout_s: float = 300.0,
    key: bytes | None = None,
) -> Iterator[RemoteStream]:
    """Take part in one sync, as receiver ``rank`` of the sender at ``address``.

    ``key`` is the key that the sender was made with. Connection and buffers are kept for the next
    sync from the same sender. When the block ends, the sender receives ``answer``; when it raises,
    the sender receives the error.

    Raises:
        PeerError: the sender cannot be reached, failed, or was silent for ``timeout_s``.
    """
    place, _, number = address.rpartition("#")
    _forget_closed()
    try:
        stream = _begin(place, int(number), rank, device, timeout_s, key)
        yield stream
        stream.finish()
    except BaseException as error:
        # Of an interrupt too: the sender would wait for this process.
        failed = _SESSIONS.pop((place, rank), None)
        if failed is not None:
            failed.close(f"{type(error).__name__}: {error}")
        raise


def _begin(
    place: str, count: int, rank: int, device: torch.device, timeout_s: float, key: bytes | None
) -> RemoteStream:
    known = _SESSIONS.get((place, rank))
    if known is not None:
        try:
            return known.begin(count)
        except PeerError:
            # The sender has made its connections again.
            _SESSIONS.pop((place, rank)).close("connections are made again")
    session = _SESSIONS[place, rank] = _Session(place, count, rank, device, timeout_s, key)
    return session.begin(count)


def hang_up(address: str, rank: int) -> None:
    """Free the parts that are kept for the next sync from a sender, if there are any."""
    known = _SESSIONS.pop((address.rpartition("#")[0], rank), None)
    if known is not None:
        known.close("the receiver was closed")


def _forget_closed() -> None:
    """Close the sessions of senders that are gone.

    They hold memory: on CUDA, the sender's own.
    """
    for key, session in list(_SESSIONS.items()):
        if session.channel.closed or session.channel.hung_up():
            _SESSIONS.pop(key).close("the sender has ended")

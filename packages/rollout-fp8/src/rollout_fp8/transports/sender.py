"""Sender's side of a transport, in the process that has the weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine_api.errors import PeerError
from rollout_fp8.transports.channel import (
    GRACE_S,
    WHERE,
    Channel,
    Watch,
    no_watch,
    receive_from_all,
    secret,
)
from rollout_fp8.transports.kinds import Kind, Outgoing, outgoing
from rollout_fp8.transports.listener import Listener
from rollout_fp8.wire.format import WirePlan, WireStream


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """Result of one ``send_weights``.

    Attributes:
        answers: ``RemoteStream.answer`` of each receiver, by rank.
        checksums: the stream's checksums.
        seconds: the stream's seconds.
    """

    answers: list[Any]
    checksums: Mapping[str, int]
    seconds: Mapping[str, float]


class Sender:
    """Sender of streams to ``receivers`` processes, which connect to ``address`` at the first sync.

    Plan, buffers and connections are kept from one sync to the next; after a failure they are made
    again.

    Args:
        kind: kind of transport; see the package.
        receivers: number of receivers; their ranks are 0 and up.
        host: address at which receivers of other hosts reach this host; None: all are on this host.
        timeout_s: deadline of every step of a sync, including the receivers' work on one bucket and
            at the end.
        key: for receivers that do not inherit this run's secret, see ``channel``.
    """

    def __init__(
        self,
        *,
        kind: Kind,
        receivers: int = 1,
        host: str | None = None,
        timeout_s: float = 300.0,
        key: bytes | None = None,
    ) -> None:
        if key is None:
            # Made here if there is none, so that processes started from now on inherit it.
            secret("channel")
        self._kind: Kind = kind
        self._receivers = receivers
        self._host = host
        self.timeout_s = timeout_s
        self._listener = Listener(host, key)
        self._count = 0
        self._session: _Session | None = None

    @property
    def address(self) -> str:
        """The address for the receivers of the next ``send_weights``.

        It changes each time, so that no receiver takes part in a later sync.
        """
        return f"{self._listener.address}#{self._count}"

    def send_weights(self, stream: WireStream, watch: Watch = no_watch) -> Delivery:
        """Carry one stream to all receivers and wait until they have installed it.

        ``watch`` is called while nothing happens, and its error ends the sync (for example because
        a receiver's process is gone).

        Raises:
            RolloutError: the stream's own error, or ``PeerError`` with the message of every
                receiver that failed. All receivers fail then. The stream may be left
                unfinished: the caller runs it to its end.
        """
        try:
            session = self._ready(stream, watch)
            return session.run(stream, self._count, watch)
        except BaseException as error:
            # Of an interrupt too: the receivers would wait for this process.
            self._drop(str(error) or type(error).__name__)
            raise
        finally:
            self._count += 1

    def close(self) -> None:
        """Close connections and listener (idempotent)."""
        self._drop("the sender was closed")
        self._listener.close()

    def _ready(self, stream: WireStream, watch: Watch) -> _Session:
        if self._session is not None and not self._session.fits(stream):
            self._drop("connections are made again")
        if self._session is None:
            channels = self._accept(watch)
            self._session = _Session(channels, stream.plan, stream.device)
            transport = outgoing(self._kind, stream.plan, stream.device, self._host, self.timeout_s)
            self._session.open(self._kind, transport, watch)
        return self._session

    def _accept(self, watch: Watch) -> list[Channel]:
        """Return channels to all receivers, by rank. Late ones of an earlier sync are refused.

        Raises:
            PeerError: not all have come within ``timeout_s``, whatever other peers have.
        """
        found: dict[int, Channel] = {}
        come: list[Channel] = []
        deadline = time.monotonic() + self.timeout_s
        try:
            while len(found) < self._receivers:
                missing = [rank for rank in range(self._receivers) if rank not in found]
                peer = "receiver " + ", ".join(str(rank) for rank in missing)
                channel = self._listener.accept(peer, self.timeout_s, watch, deadline=deadline)
                come.append(channel)
                rank, count = channel.receive("hello", watch)
                if count != self._count or rank not in missing:
                    channel.fail(
                        f"expected a missing receiver of sync {self._count}, got receiver {rank} "
                        f"of sync {count}"
                    )
                    continue
                channel.peer = f"receiver {rank}"
                found[rank] = channel
        except BaseException as error:
            # Of an interrupt too: the receivers would wait for this process.
            for channel in come:
                if not channel.closed:
                    channel.fail(str(error) or type(error).__name__)
            raise
        return [found[rank] for rank in range(self._receivers)]

    def _drop(self, why: str) -> None:
        if self._session is not None:
            self._session.close(why)
            self._session = None


class _Session:
    """Parts of a sender that stay the same from sync to sync."""

    def __init__(self, channels: list[Channel], plan: WirePlan, device: torch.device) -> None:
        self._channels = channels
        self._plan = plan
        self._device = device
        self._transport: Outgoing | None = None

    def open(self, kind: Kind, transport: Outgoing, watch: Watch) -> None:
        """Send the plan to the receivers, and open the transport."""
        self._transport = transport
        for channel in self._channels:
            channel.send("plan", kind, self._plan)
        receive_from_all(self._channels, "learnt", watch)
        transport.open(self._channels)

    def fits(self, stream: WireStream) -> bool:
        """Return whether the session can carry ``stream`` and all receivers are there.

        Between syncs receivers send nothing, so a channel with a message is one that has ended.
        """
        same = self._plan is stream.plan or self._plan == stream.plan
        return (
            same
            and self._device == stream.device
            and not any(channel.has_message() for channel in self._channels)
        )

    def run(self, stream: WireStream, count: int, watch: Watch) -> Delivery:
        """Carry one sync's stream, and return its result."""
        for channel in self._channels:
            channel.send("begin", count, stream.audit)
        self._carry(stream, watch)
        checksums = stream.checksums()
        seconds = stream.seconds()
        for channel in self._channels:
            channel.send("end", checksums, seconds)
        answers = [answer for (answer,) in receive_from_all(self._channels, "done", watch)]
        return Delivery(answers=answers, checksums=checksums, seconds=seconds)

    def close(self, why: str) -> None:
        """Report the reason to the receivers, and free all resources."""
        for channel in self._channels:
            channel.fail(why)
        if self._transport is not None:
            self._transport.close()

    def _carry(self, stream: WireStream, watch: Watch) -> None:
        assert self._transport is not None, "open comes first"
        taken = 0
        # Last bucket of each slot.
        last_in = dict.fromkeys(range(len(self._plan.slots)), -1)

        def wait_for(index: int) -> None:
            nonlocal taken
            while taken <= index:
                receive_from_all(self._channels, "taken", watch)
                taken += 1

        index = -1
        for index, (bucket, buffer) in enumerate(stream.buckets()):
            wait_for(last_in[bucket.slot])
            last_in[bucket.slot] = index
            for channel, notice in zip(self._channels, self._put(bucket, buffer), strict=True):
                channel.send("bucket", notice)
            if self._transport.lends:
                wait_for(index)
                self._transport.note_taken()
        wait_for(index)

    def _put(self, bucket: Any, buffer: torch.Tensor) -> Any:
        assert self._transport is not None, "open comes first"
        try:
            return self._transport.put(bucket, buffer)
        except PeerError as error:
            said = [
                f"{channel.peer}: {words}"
                for channel in self._channels
                if (words := _end_of(channel))
            ]
            why = "\n       ".join([*said, error.why])
            raise PeerError(error.what, where=WHERE, why=why, remedy=error.remedy) from error


def _end_of(channel: Channel) -> str:
    """Return the peer's last message before it closed, or an empty text while it is connected."""
    return channel.read_failure(GRACE_S) or ("it closed the channel" if channel.hung_up() else "")

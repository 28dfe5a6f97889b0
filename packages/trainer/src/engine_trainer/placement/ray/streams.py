"""Whole tensors over a connection to each replica, for runs whose replicas may be lost.

A broadcast needs all of its processes: one that ends before it has joined leaves the others in a
call that nothing interrupts. Here the sender notices each replica by itself, and between two parts
of a message it calls a function of its caller, which may end the sync.

A receiver sends the key of the wire, its rank and the number of the sync. Then it reads buckets
(``buckets``), each behind the lengths of its header and of its buffer. Nothing is encrypted: the
network is the cluster's own.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from engine_api.devices import device_of
from engine_api.errors import PeerError, RolloutError
from engine_api.weights import WeightExport
from engine_trainer.placement.ray.buckets import pack, unpack

WHERE = "weight sync"
POLL_S = 0.1
"""Largest number of seconds between two calls of the watch."""
HELLO_S = 5.0
"""Seconds in which a connection must show the key."""
MAX_UNPROVEN = 64
"""Largest number of connections beyond the receivers' own that have not shown the key yet."""
KEY_BYTES = 32
HELLO = struct.Struct(f">{KEY_BYTES}sqq")
"""Key, rank and number of the sync."""
LENGTHS = struct.Struct(">qq")
"""Lengths of a bucket's header and buffer; a header without bytes is the end."""
END = LENGTHS.pack(0, 0)


def no_watch() -> None:
    """Keep waiting: the watch of a caller that has nothing to check."""


@dataclass(kw_only=True)
class _Unproven:
    """A connection that has not shown the key yet, and its deadline by ``time.monotonic``."""

    connection: socket.socket
    until: float
    received: bytes = b""


class _Watch:
    """A caller's watch, called every ``POLL_S`` at most."""

    def __init__(self, watch: Callable[[], None]) -> None:
        self._watch = watch
        self._next = time.monotonic() + POLL_S

    def look(self) -> None:
        """Call the watch if it is due."""
        if time.monotonic() >= self._next:
            self._watch()
            self._next = time.monotonic() + POLL_S


class StreamWire:
    """A wire of whole tensors through the host's memory (see ``engine_api.rollout.WeightWire``).

    Connections are made for one sync. The sender's end is also its ``WatchedSender``.

    Args:
        device: the device type on which a receiver gives its tensors.
        timeout_s: seconds in which each step of a sync must make progress.
    """

    def __init__(self, device: str, timeout_s: float) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._listener: socket.socket | None = None
        self._key = b""
        self._place = ""
        self._receivers = 0
        self._count = 0

    def serve(self, host: str, receivers: int) -> StreamWire:
        """Listen for receivers (see ``WeightWire.serve``)."""
        self._listener = socket.create_server((host, 0), backlog=receivers + 16)
        self._listener.setblocking(False)
        self._key = secrets.token_bytes(KEY_BYTES)
        self._place = f"{host}:{self._listener.getsockname()[1]}"
        self._receivers = receivers
        return self

    @property
    def address(self) -> str:
        """The address of the next ``send``, with its key."""
        return f"{self._place}:{self._count}:{self._key.hex()}"

    def send(self, export: WeightExport) -> int:
        """Send an export (see ``WeightSender.send``)."""
        return self.send_watched(export, no_watch)

    def send_watched(self, export: WeightExport, watch: Callable[[], None]) -> int:
        """Send an export (see ``WatchedSender.send_watched``)."""
        receivers: dict[int, socket.socket] = {}
        due = _Watch(watch)
        sent = 0
        try:
            self._accept(receivers, due)
            for header, buffer in pack(export, torch.device("cpu")):
                self._write(receivers, LENGTHS.pack(len(header), len(buffer)) + header, due)
                self._write(receivers, buffer.numpy().data, due)
                sent += len(buffer)
            self._write(receivers, END, due)
        finally:
            # Without the end's message a receiver knows that its sync has failed.
            for connection in receivers.values():
                connection.close()
            self._count += 1
        return sent

    @contextmanager
    def receive(self, address: str, rank: int) -> Iterator[WeightExport]:
        """Receive an export (see ``WeightWire.receive``).

        A tensor is valid until the next one is requested.
        """
        place, count, key = address.rsplit(":", 2)
        host, _, port = place.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), timeout=self._timeout_s)
        except OSError as error:
            raise RolloutError(
                f"cannot reach the engine's process at {place}",
                where=WHERE,
                why=str(error),
                remedy="check that it runs, and that its host's ports can be reached from here",
            ) from error
        with connection:
            # Before the caller's own work, so that the sender notices where that fails.
            _put(connection, HELLO.pack(bytes.fromhex(key), rank, int(count)))
            yield self._pull(connection)

    def close(self) -> None:
        """Close the listener (see ``WeightWire.close``)."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # --- the sender's side ------------------------------------------------------------------------

    def _accept(self, found: dict[int, socket.socket], watch: _Watch) -> None:
        """Add a connection of each receiver to ``found``.

        All connections are read at once: a silent one delays no other.
        """
        assert self._listener is not None, "serve comes first"
        deadline = time.monotonic() + self._timeout_s
        # The oldest first.
        unproven: dict[socket.socket, _Unproven] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            try:
                while len(found) < self._receivers:
                    for key, _ in selector.select(POLL_S):
                        if key.fileobj is self._listener:
                            self._welcome(selector, unproven)
                        elif key.data in unproven:
                            self._greet(selector, unproven, key.data, found)
                    watch.look()
                    now = time.monotonic()
                    for peer in [one for one in unproven.values() if one.until < now]:
                        _refuse(selector, unproven, peer.connection)
                    if now > deadline and len(found) < self._receivers:
                        missing = [str(r) for r in range(self._receivers) if r not in found]
                        raise _silent(f"receiver {', '.join(missing)}", self._timeout_s)
            finally:
                for connection in unproven:
                    connection.close()

    def _welcome(
        self, selector: selectors.BaseSelector, unproven: dict[socket.socket, _Unproven]
    ) -> None:
        """Accept a connection, which has yet to show the key."""
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            # The peer has gone again.
            return
        if len(unproven) >= self._receivers + MAX_UNPROVEN:
            _refuse(selector, unproven, next(iter(unproven)))
        connection.setblocking(False)
        unproven[connection] = _Unproven(connection=connection, until=time.monotonic() + HELLO_S)
        selector.register(connection, selectors.EVENT_READ, connection)

    def _greet(
        self,
        selector: selectors.BaseSelector,
        unproven: dict[socket.socket, _Unproven],
        connection: socket.socket,
        found: dict[int, socket.socket],
    ) -> None:
        """Read a connection's hello, and move it to ``found`` or close it once it is whole."""
        peer = unproven[connection]
        try:
            data = connection.recv(HELLO.size - len(peer.received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.received += data
        if data and len(peer.received) < HELLO.size:
            return
        rank = self._rank_of(peer.received)
        if rank is None or rank in found:
            _refuse(selector, unproven, connection)
            return
        selector.unregister(connection)
        del unproven[connection]
        found[rank] = connection

    def _rank_of(self, hello: bytes) -> int | None:
        """Return the rank of a receiver of this sync, None for any other peer."""
        if len(hello) < HELLO.size:
            return None
        key, rank, count = HELLO.unpack(hello)
        known = hmac.compare_digest(key, self._key)
        return rank if known and count == self._count and 0 <= rank < self._receivers else None

    def _write(
        self, receivers: Mapping[int, socket.socket], data: bytes | memoryview, watch: _Watch
    ) -> None:
        """Write the same bytes to all receivers, to each as fast as it reads."""
        left = {rank: memoryview(data) for rank in receivers if len(data)}
        until = dict.fromkeys(left, time.monotonic() + self._timeout_s)
        with selectors.DefaultSelector() as selector:
            for rank in left:
                selector.register(receivers[rank], selectors.EVENT_WRITE, rank)
            while left:
                for key, _ in selector.select(POLL_S):
                    rank: int = key.data
                    count = _send(receivers[rank], left[rank], rank)
                    if not count:
                        continue
                    left[rank] = left[rank][count:]
                    until[rank] = time.monotonic() + self._timeout_s
                    if not len(left[rank]):
                        selector.unregister(receivers[rank])
                        del left[rank]
                watch.look()
                now = time.monotonic()
                if late := [str(rank) for rank in left if now > until[rank]]:
                    raise _silent(f"receiver {', '.join(late)}", self._timeout_s)

    # --- a receiver's side ------------------------------------------------------------------------

    def _pull(self, connection: socket.socket) -> WeightExport:
        device = device_of(self._device).current()
        while True:
            lengths = torch.empty(LENGTHS.size, dtype=torch.uint8)
            self._read(connection, lengths)
            size, length = LENGTHS.unpack(bytes(lengths.numpy()))
            if not size:
                return
            header = torch.empty(size, dtype=torch.uint8)
            self._read(connection, header)
            buffer = torch.empty(length, dtype=torch.uint8)
            self._read(connection, buffer)
            yield from unpack(bytes(header.numpy()), buffer.to(device))

    def _read(self, connection: socket.socket, buffer: torch.Tensor) -> None:
        """Fill a buffer."""
        left: Any = buffer.numpy().data
        while left:
            try:
                count = connection.recv_into(left)
            except TimeoutError as error:
                raise _silent("the engine's process", self._timeout_s) from error
            except OSError as error:
                raise _ended(str(error)) from error
            if not count:
                raise _ended("it closed the connection")
            left = left[count:]


def _refuse(
    selector: selectors.BaseSelector,
    unproven: dict[socket.socket, _Unproven],
    connection: socket.socket,
) -> None:
    """Close a connection that has not shown the key."""
    selector.unregister(connection)
    del unproven[connection]
    connection.close()


def _send(connection: socket.socket, data: memoryview, rank: int) -> int:
    """Return the number of bytes that a receiver's connection has taken."""
    try:
        return connection.send(data)
    except BlockingIOError:
        return 0
    except OSError as error:
        raise PeerError(
            f"receiver {rank} closed the connection",
            where=WHERE,
            why=str(error),
            remedy="see that replica's message",
        ) from error


def _put(connection: socket.socket, message: bytes) -> None:
    try:
        connection.sendall(message)
    except OSError as error:
        raise _ended(str(error)) from error


def _ended(why: str) -> RolloutError:
    return PeerError(
        "the engine's process ended the sync",
        where=WHERE,
        why=why,
        remedy="see the engine's error, and those of the other replicas",
    )


def _silent(peer: str, timeout_s: float) -> RolloutError:
    return PeerError(
        f"{peer} is silent",
        where=WHERE,
        why=f"nothing within {timeout_s:g} s",
        remedy="check whether that process hangs or was stopped",
    )

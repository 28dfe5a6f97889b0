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
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from engine_api.devices import device_of
from engine_api.errors import RolloutError
from engine_api.weights import WeightExport
from engine_trainer.placement.ray.buckets import pack, unpack

WHERE = "weight sync"
POLL_S = 0.1
"""Seconds between two calls of the watch while nothing can be sent or received."""
HELLO_S = 5.0
"""Seconds in which a connection must show the key."""
KEY_BYTES = 32
HELLO = struct.Struct(f">{KEY_BYTES}sqq")
"""Key, rank and number of the sync."""
LENGTHS = struct.Struct(">qq")
"""Lengths of a bucket's header and buffer; a header without bytes is the end."""
END = LENGTHS.pack(0, 0)


def no_watch() -> None:
    """Keep waiting: the watch of a caller that has nothing to check."""


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
        """See ``WeightSender.address``."""
        return f"{self._place}:{self._count}:{self._key.hex()}"

    def send(self, export: WeightExport) -> int:
        """Send an export (see ``WeightSender.send``)."""
        return self.send_watched(export, no_watch)

    def send_watched(self, export: WeightExport, watch: Callable[[], None]) -> int:
        """Send an export (see ``WatchedSender.send_watched``)."""
        receivers: dict[int, socket.socket] = {}
        sent = 0
        try:
            self._accept(receivers, watch)
            for header, buffer in pack(export, torch.device("cpu")):
                self._write(receivers, LENGTHS.pack(len(header), len(buffer)) + header, watch)
                self._write(receivers, buffer.numpy().data, watch)
                sent += len(buffer)
            self._write(receivers, END, watch)
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
            yield self._pull(connection, HELLO.pack(bytes.fromhex(key), rank, int(count)))

    def close(self) -> None:
        """Close the listener (see ``WeightWire.close``)."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # --- the sender's side ------------------------------------------------------------------------

    def _accept(self, found: dict[int, socket.socket], watch: Callable[[], None]) -> None:
        """Add a connection of each receiver to ``found``."""
        assert self._listener is not None, "serve comes first"
        deadline = time.monotonic() + self._timeout_s
        while len(found) < self._receivers:
            if not select.select([self._listener], [], [], POLL_S)[0]:
                watch()
                if time.monotonic() > deadline:
                    missing = [str(r) for r in range(self._receivers) if r not in found]
                    raise _silent(f"receiver {', '.join(missing)}", self._timeout_s)
                continue
            # The peer may have gone again.
            with suppress(OSError):
                connection, _ = self._listener.accept()
                rank = self._greeted(connection)
                if rank is None or rank in found:
                    connection.close()
                    continue
                connection.setblocking(False)
                found[rank] = connection

    def _greeted(self, connection: socket.socket) -> int | None:
        """Return the rank of a receiver of this sync, None for any other peer."""
        connection.settimeout(HELLO_S)
        try:
            message = connection.recv(HELLO.size, socket.MSG_WAITALL)
        except OSError:
            return None
        if len(message) < HELLO.size:
            return None
        key, rank, count = HELLO.unpack(message)
        known = hmac.compare_digest(key, self._key)
        return rank if known and count == self._count and 0 <= rank < self._receivers else None

    def _write(
        self,
        receivers: Mapping[int, socket.socket],
        data: bytes | memoryview,
        watch: Callable[[], None],
    ) -> None:
        """Write the same bytes to all receivers, to each as fast as it reads."""
        left = {rank: memoryview(data) for rank in receivers if len(data)}
        deadline = time.monotonic() + self._timeout_s
        while left:
            by_socket = {receivers[rank]: rank for rank in left}
            writable = select.select([], list(by_socket), [], POLL_S)[1]
            if not writable:
                watch()
                if time.monotonic() > deadline:
                    names = ", ".join(str(rank) for rank in left)
                    raise _silent(f"receiver {names}", self._timeout_s)
                continue
            for connection in writable:
                rank = by_socket[connection]
                try:
                    count = connection.send(left[rank])
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise RolloutError(
                        f"receiver {rank} closed the connection",
                        where=WHERE,
                        why=str(error),
                        remedy="see that replica's message",
                    ) from error
                left[rank] = left[rank][count:]
                deadline = time.monotonic() + self._timeout_s
                if not len(left[rank]):
                    del left[rank]

    # --- a receiver's side ------------------------------------------------------------------------

    def _pull(self, connection: socket.socket, hello: bytes) -> WeightExport:
        device = device_of(self._device).current()
        _put(connection, hello)
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


def _put(connection: socket.socket, message: bytes) -> None:
    try:
        connection.sendall(message)
    except OSError as error:
        raise _ended(str(error)) from error


def _ended(why: str) -> RolloutError:
    return RolloutError(
        "the engine's process ended the sync",
        where=WHERE,
        why=why,
        remedy="see the engine's error, and those of the other replicas",
    )


def _silent(peer: str, timeout_s: float) -> RolloutError:
    return RolloutError(
        f"{peer} is silent",
        where=WHERE,
        why=f"nothing within {timeout_s:g} s",
        remedy="check whether that process hangs or was stopped",
    )

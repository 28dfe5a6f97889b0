"""Listener to which receivers connect, and the proof of both that they belong to the same run."""

from __future__ import annotations

import selectors
import shutil
import socket
import tempfile
import time
import weakref
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from engine_api.errors import PeerError
from rollout_fp8.transports import channel as channels
from rollout_fp8.transports import handshake
from rollout_fp8.transports.channel import KEY, POLL_S, WHERE, Channel, Watch, no_watch

# Seconds for a peer to prove that it knows the secret.
HANDSHAKE_S = 10.0
# Largest number of peers that have not proven it yet; the oldest is closed first.
MAX_UNPROVEN = 64


@dataclass(kw_only=True)
class _UnprovenPeer:
    """Peer that has not proven anything yet."""

    connection: socket.socket
    nonce: bytes
    until: float
    """Deadline by ``time.monotonic()``."""
    received: bytes = field(default=b"")


class Listener:
    """Listener to which receivers connect.

    ``host`` None: on this host only, through a Unix socket in a folder of its own. ``key``: the key
    that both ends must know; None: this run's secret. All peers are read at once: a peer that is
    silent, or sends its bytes one by one, delays no other.
    """

    def __init__(self, host: str | None = None, key: bytes | None = None) -> None:
        self._key = key
        # The oldest first.
        self._unproven: dict[socket.socket, _UnprovenPeer] = {}
        held = ExitStack()
        held.callback(_close_all, self._unproven)
        self._selector = held.enter_context(selectors.DefaultSelector())
        if host is None:
            folder = tempfile.mkdtemp(prefix="rollout-")
            held.callback(shutil.rmtree, folder)
            self._socket = held.enter_context(socket.socket(socket.AF_UNIX))
            self.address = f"unix:{folder}/weights"
            self._socket.bind(self.address.removeprefix("unix:"))
            self._socket.listen()
        else:
            self._socket = held.enter_context(socket.create_server((host, 0)))
            self.address = f"tcp:{host}:{self._socket.getsockname()[1]}"
        self._socket.setblocking(False)
        self._selector.register(self._socket, selectors.EVENT_READ)
        # At the interpreter's end, if ``close`` is never called.
        self._finalize = weakref.finalize(self, held.close)

    def accept(
        self, peer: str, timeout_s: float, watch: Watch = no_watch, *, deadline: float | None = None
    ) -> Channel:
        """Return a channel to the next peer that knows the secret.

        ``timeout_s`` is the channel's deadline, too.

        Raises:
            PeerError: no peer proves the secret within ``timeout_s``, or until ``deadline`` of
                ``time.monotonic()`` where that is given (one for several peers).
            Exception: whatever ``watch`` raises.
        """
        if deadline is None:
            deadline = time.monotonic() + timeout_s
        elif time.monotonic() >= deadline:
            # Even where a peer is there already.
            raise self._missing(peer, timeout_s)
        while True:
            connection = self._next(min(POLL_S, max(0.0, deadline - time.monotonic())))
            if connection is not None:
                return _channel(connection, peer, timeout_s)
            if time.monotonic() >= deadline:
                raise self._missing(peer, timeout_s)
            watch()

    def _missing(self, peer: str, timeout_s: float) -> PeerError:
        return PeerError(
            f"{peer} did not connect to {self.address}",
            where=WHERE,
            why=f"nothing within {timeout_s:g} s",
            remedy="check that the process runs, and that it can reach this address",
        )

    def _next(self, wait_s: float) -> socket.socket | None:
        """Read from peers that send within ``wait_s``, and return the first proven one's socket."""
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._socket:
                self._welcome()
                continue
            peer = self._unproven.get(key.data)
            if peer is not None and self._read_reply(peer):
                return peer.connection
        now = time.monotonic()
        for peer in [one for one in self._unproven.values() if one.until <= now]:
            self._forget(peer).close()
        return None

    def _welcome(self) -> None:
        try:
            connection = self._socket.accept()[0]
        except (BlockingIOError, ConnectionAbortedError):
            # The peer has gone again.
            return
        while len(self._unproven) >= MAX_UNPROVEN:
            self._forget(next(iter(self._unproven.values()))).close()
        connection.setblocking(False)
        peer = _UnprovenPeer(
            connection=connection, nonce=handshake.nonce(), until=time.monotonic() + HANDSHAKE_S
        )
        self._unproven[connection] = peer
        self._selector.register(connection, selectors.EVENT_READ, connection)
        # The peer may have gone again: its end is read next.
        with suppress(OSError):
            connection.sendall(peer.nonce)

    def _read_reply(self, peer: _UnprovenPeer) -> bool:
        """Read the peer's bytes, and return whether it knows the secret.

        A peer that does not is closed.
        """
        try:
            data = peer.connection.recv(handshake.RESPONSE - len(peer.received))
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        peer.received += data
        if data and len(peer.received) < handshake.RESPONSE:
            return False
        connection = self._forget(peer)
        reply = data and handshake.reply(_key(self._key), peer.nonce, peer.received)
        if reply:
            with suppress(OSError):
                connection.sendall(reply)
                return True
        connection.close()
        return False

    def _forget(self, peer: _UnprovenPeer) -> socket.socket:
        self._selector.unregister(peer.connection)
        del self._unproven[peer.connection]
        return peer.connection

    def close(self) -> None:
        """Close the listener (idempotent)."""
        self._finalize()


def connect(address: str, timeout_s: float, key: bytes | None = None) -> Channel:
    """Return a channel to a listener, with its key.

    Raises ``PeerError`` after ``timeout_s`` at most.
    """
    peer = f"the sender at {address}"
    deadline = time.monotonic() + timeout_s
    try:
        connection = _dial(address, timeout_s)
    except OSError as error:
        raise PeerError(
            f"cannot reach {peer}",
            where=WHERE,
            why=str(error),
            remedy="check that it runs on this host, or is reachable from here",
        ) from error
    try:
        proven = handshake.prove(connection, _key(key), deadline)
    except (OSError, EOFError):
        proven = False
    if not proven:
        connection.close()
        raise PeerError(
            f"{peer} does not accept this process",
            where=WHERE,
            why="it closed the connection, is silent, or has another secret",
            remedy=f"give both processes the same {KEY}",
        )
    return _channel(connection, peer, timeout_s)


def _dial(address: str, timeout_s: float) -> socket.socket:
    kind, _, place = address.partition(":")
    if kind == "tcp":
        host, _, port = place.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=timeout_s)
    else:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        try:
            connection.connect(place)
        except OSError:
            connection.close()
            raise
    return connection


def _channel(connection: socket.socket, peer: str, timeout_s: float) -> Channel:
    connection.setblocking(True)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Channel(connection, peer, timeout_s)


def _key(given: bytes | None) -> bytes:
    return given or channels.secret("channel")


def _close_all(peers: dict[socket.socket, _UnprovenPeer]) -> None:
    for connection in peers:
        connection.close()

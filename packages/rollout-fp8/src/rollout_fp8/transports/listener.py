"""Where receivers find the sender, and how both prove that they belong to the same run."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
import weakref
from contextlib import ExitStack
from multiprocessing import AuthenticationError

from rollout_fp8.transports.channel import KEY, POLL_S, WHERE, Channel, PeerError, Watch, nothing

HANDSHAKE_S = 10.0


class Listener:
    """Where receivers connect; ``host`` None: on this host only, through a Unix socket in a folder of its own.

    ``key``: see ``Channel.prove``.
    """

    def __init__(self, host: str | None = None, key: bytes | None = None) -> None:
        self._key = key
        held = ExitStack()
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
        self._socket.settimeout(POLL_S)
        self._give_back = weakref.finalize(self, held.close)  # at the interpreter's end, if nobody calls ``close``

    def accept(self, peer: str, timeout_s: float, watch: Watch = nothing) -> Channel:
        """The next one that knows the secret. Raises ``PeerError`` when none comes in time, and what ``watch`` raises."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                connection = self._socket.accept()[0]
            except TimeoutError:
                watch()
                continue
            channel = _proven(connection, peer, timeout_s, self._key, first=True)
            if channel is not None:
                return channel
        raise PeerError(f"{peer} did not connect to {self.address}", where=WHERE, why=f"nothing within {timeout_s:g} s",
                        remedy="see whether that process runs, and reaches this address")  # fmt: skip

    def close(self) -> None:
        """Idempotent."""
        self._give_back()


def connect(address: str, timeout_s: float, key: bytes | None = None) -> Channel:
    """To a listener, with its key. Raises ``PeerError``."""
    peer = f"the sender at {address}"
    try:
        connection = _dial(address, timeout_s)
    except OSError as error:
        raise PeerError(f"cannot reach {peer}", where=WHERE, why=str(error),
                        remedy="see whether it runs on this host, or is reachable from here") from error  # fmt: skip
    channel = _proven(connection, peer, timeout_s, key, first=False)
    if channel is None:
        raise PeerError(f"{peer} does not take this process in", where=WHERE, why="it closed, or knows another secret",
                        remedy=f"give both processes the same {KEY}")  # fmt: skip
    return channel


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
    connection.settimeout(None)
    return connection


def _proven(
    connection: socket.socket, peer: str, timeout_s: float, key: bytes | None, *, first: bool
) -> Channel | None:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel = Channel(connection, peer, min(timeout_s, HANDSHAKE_S))
    try:
        channel.prove(key, first=first)
    except (AuthenticationError, OSError, EOFError):
        channel.close()
        return None
    channel.limit(timeout_s)
    return channel

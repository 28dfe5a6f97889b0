"""Messages between the process that has the weights and the processes that serve them.

A channel is a ``multiprocessing.connection.Connection``, on a Unix socket (one host) or TCP
(several). Its messages are ``engine_api.codec``'s: nothing is unpickled.

Both ends first prove to each other that they know a key: one that they were given, or the secret
of this run. The secret is in the environment variable ``ROLLOUT_FP8_KEY``. A process makes it when
it has none, and its children inherit it.

On TCP the messages themselves are neither encrypted nor signed: use it inside a
network that you trust.

Every read and write has a deadline; a peer that is closed, dead or silent is a ``PeerError``.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from engine_api.codec import CodecError, decode, encode
from engine_api.errors import PeerError

WHERE = "weight sync"
KEY = "ROLLOUT_FP8_KEY"
# Seconds between two calls of the watch that decides whether to keep waiting.
POLL_S = 0.1
# Seconds for the other receivers to report their errors, once one has failed.
GRACE_S = 1.0

Watch = Callable[[], None]


def secret(purpose: str) -> bytes:
    """Return 32 bytes made of this run's secret for one purpose.

    They reveal no other purpose's.
    """
    key = os.environ.setdefault(KEY, secrets.token_hex(32))
    return hmac.digest(key.encode(), purpose.encode(), hashlib.sha256)


def no_watch() -> None:
    """Keep waiting: the watch of a caller that has nothing to check."""


class Channel:
    """End of a channel.

    Args:
        connection: a connected, blocking socket, which the channel takes over.
        peer: name of the other end in errors.
        timeout_s: deadline of one read or write.
    """

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float) -> None:
        self.peer = peer
        self._connection = Connection(connection.detach())
        self.limit(timeout_s)

    def limit(self, timeout_s: float) -> None:
        """Change the deadlines.

        They are the kernel's: ``Connection`` has none, and a message may come in parts.
        """
        self.timeout_s = timeout_s
        limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        with self._socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, tag: str, *body: Any) -> None:
        """Send a message. Raises ``PeerError``."""
        try:
            self._connection.send_bytes(encode((tag, *body)))
        except BlockingIOError as error:
            raise self._silent() from error
        except OSError as error:
            raise self._closed(self.read_failure() or str(error)) from error

    def receive(self, tag: str, watch: Watch = no_watch) -> tuple[Any, ...]:
        """Return the next message's body. ``watch`` is called now and then, and may raise.

        Raises:
            PeerError: the other end is gone or silent, or the peer reports that it failed.
        """
        deadline = time.monotonic() + self.timeout_s
        while not self.has_message(POLL_S):
            watch()
            if time.monotonic() > deadline:
                raise self._silent()
        found, *body = self._next()
        if found == "failed":
            raise PeerError(
                f"{self.peer} failed", where=WHERE, why=str(body[0]), remedy="see its message"
            )
        if found != tag:
            raise self._not_a_message(f"expected a message {tag!r}, got {found!r}")
        return tuple(body)

    def has_message(self, wait_s: float = 0.0) -> bool:
        """Return whether a message has come, or the other end is closed."""
        try:
            return self._connection.poll(wait_s)
        except OSError:
            return True

    def fail(self, text: str) -> None:
        """Report a failure to the peer, if it still listens, and close."""
        with suppress(OSError):
            self._connection.send_bytes(encode(("failed", text)))
        self.close()

    def hung_up(self) -> bool:
        """Return whether the other end is closed.

        Its earlier messages may still be waiting.
        """
        watched = select.poll()
        watched.register(self._connection.fileno(), select.POLLRDHUP)
        return bool(watched.poll(0))

    def read_failure(self, wait_s: float = 0.0) -> str:
        """Return the peer's failure message, or an empty text.

        Its other messages are lost.
        """
        try:
            while self._connection.poll(wait_s):
                found, *body = _parts(self._connection.recv_bytes())
                if found == "failed":
                    return str(body[0])
        except (OSError, EOFError, CodecError):
            pass
        return ""

    def send_files(self, descriptors: Sequence[int]) -> None:
        """Send open files on a Unix socket. Raises ``PeerError``."""
        with self._socket() as raw:
            try:
                socket.send_fds(raw, [b"f"], list(descriptors))
            except OSError as error:
                raise self._closed(str(error)) from error

    def receive_files(self, count: int) -> list[int]:
        """Return the files that ``send_files`` sent.

        The caller closes them.

        Raises ``PeerError``.
        """
        with self._socket() as raw:
            try:
                _, descriptors, _, _ = socket.recv_fds(raw, 1, count)
            except OSError as error:
                raise self._closed(str(error)) from error
        if len(descriptors) != count:
            raise self._closed("it sent no files")
        return descriptors

    def fileno(self) -> int:
        """Return the descriptor, for ``multiprocessing.connection.wait``."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close this end (idempotent)."""
        self._connection.close()

    @property
    def closed(self) -> bool:
        """True if this end is closed."""
        return self._connection.closed

    def _socket(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self._connection.fileno()))

    def _next(self) -> tuple[Any, ...]:
        try:
            return _parts(self._connection.recv_bytes())
        except BlockingIOError as error:
            raise self._silent() from error
        except CodecError as error:
            raise self._not_a_message(error.why) from error
        except (OSError, EOFError) as error:
            raise self._closed(str(error)) from error

    def _silent(self) -> PeerError:
        return PeerError(
            f"{self.peer} is silent",
            where=WHERE,
            why=f"nothing within {self.timeout_s:g} s",
            remedy="check whether that process hangs or was stopped",
        )

    def _not_a_message(self, why: str) -> PeerError:
        return PeerError(
            f"{self.peer} sent data that is not a message of a weight sync",
            where=WHERE,
            why=why,
            remedy="check which process that is, and that both have the same packages",
        )

    def _closed(self, why: str) -> PeerError:
        return PeerError(
            f"{self.peer} closed the channel",
            where=WHERE,
            why=why or "its process ended, or stopped the sync",
            remedy="see that process's messages",
        )


def _parts(message: bytes) -> tuple[Any, ...]:
    """Return a message's tag and body. Raises ``CodecError``."""
    parts = decode(message)
    if not isinstance(parts, tuple) or not parts or (parts[0] == "failed" and len(parts) < 2):
        raise CodecError(
            "not a message of a channel",
            where=WHERE,
            why=f"expected a tag and a body, got a {type(parts).__name__}",
        )
    return parts


def receive_from_all(
    channels: Sequence[Channel], tag: str, watch: Watch = no_watch
) -> list[tuple[Any, ...]]:
    """Return one message of every channel, in the channels' order.

    Raises:
        PeerError: channels failed; the error has the message of each.
    """
    found: dict[int, tuple[Any, ...]] = {}
    failures: dict[int, PeerError] = {}
    deadline = time.monotonic() + max(channel.timeout_s for channel in channels)
    while len(found) + len(failures) < len(channels) and time.monotonic() < deadline:
        pending = {
            c.fileno(): i for i, c in enumerate(channels) if i not in found and i not in failures
        }
        ready = wait(list(pending), POLL_S)
        if not ready and not failures:
            watch()
        for index in (pending[number] for number in ready if isinstance(number, int)):
            try:
                found[index] = channels[index].receive(tag)
            except PeerError as error:
                failures[index] = error
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures or len(found) < len(channels):
        raise _combine_failures(channels, found, failures)
    return [found[index] for index in range(len(channels))]


def _combine_failures(
    channels: Sequence[Channel], found: dict[int, tuple[Any, ...]], failures: dict[int, PeerError]
) -> PeerError:
    said = [f"{error.what}: {error.why}" for error in failures.values()]
    if not failures:
        said = [
            f"{c.peer} is silent: nothing within {c.timeout_s:g} s"
            for i, c in enumerate(channels)
            if i not in found
        ]
    return PeerError(
        f"{len(said)} of {len(channels)} receivers failed",
        where=WHERE,
        why="\n       ".join(said),
        remedy="see those processes' messages",
    )

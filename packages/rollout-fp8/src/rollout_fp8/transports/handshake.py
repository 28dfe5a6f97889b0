"""Handshake by which a sender and a receiver prove to each other that they know the same key.

It comes before anything else is read.

::

    listener → peer      32 random bytes
    peer → listener      32 random bytes, and an HMAC of both under the key
    listener → peer      another HMAC of both

Every message has a length that both know. So a reader needs no more than that many bytes, and a
peer gains nothing by sending its bytes one by one. The two HMACs differ by a label: a peer cannot
send the listener's own back.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time

# Bytes.
NONCE = 32
DIGEST = 32
RESPONSE = NONCE + DIGEST


def nonce() -> bytes:
    """Return fresh random bytes."""
    return secrets.token_bytes(NONCE)


def respond_to_challenge(key: bytes, theirs: bytes) -> tuple[bytes, bytes]:
    """Return the peer's message, and the HMAC that the listener must then send."""
    ours = nonce()
    return ours + _digest(key, b"receiver", theirs, ours), _digest(key, b"sender", theirs, ours)


def reply(key: bytes, ours: bytes, message: bytes) -> bytes | None:
    """Return the listener's last message, or None to a peer that does not know the key."""
    theirs = message[:NONCE]
    proof = message[NONCE:]
    if not hmac.compare_digest(proof, _digest(key, b"receiver", ours, theirs)):
        return None
    return _digest(key, b"sender", ours, theirs)


def prove(connection: socket.socket, key: bytes, deadline: float) -> bool:
    """Do the handshake as the peer, until ``deadline`` of ``time.monotonic()``.

    Returns:
        True if both know the key.

    Raises:
        OSError: the other end is closed or silent.
        EOFError: the other end is closed.
    """
    message, expected = respond_to_challenge(key, _receive(connection, NONCE, deadline))
    connection.sendall(message)
    return hmac.compare_digest(_receive(connection, DIGEST, deadline), expected)


def _digest(key: bytes, label: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(key, label + first + second, hashlib.sha256)


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    found = b""
    while len(found) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        data = connection.recv(size - len(found))
        if not data:
            raise EOFError
        found += data
    return found

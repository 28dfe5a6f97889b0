"""Messages between a rollout and SGLang's schedulers during one sync, over a Unix socket.

SGLang's own way (``update_weights_from_tensor`` once a bucket) passes each bucket through two more processes, and
answers with one line of text. One such call opens the socket instead, and lasts until the sync is through. Tensors
travel as CUDA IPC handles (shared memory on a CPU).
"""

from __future__ import annotations

import pickle
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.multiprocessing  # noqa: F401 - teaches ForkingPickler to share tensors
from torch import Tensor

from engine_api.errors import EngineError, RolloutError
from rollout_fp8.audit import Boxes
from rollout_fp8.wire import WirePlan

WHERE = "weight sync"
TIMEOUT_S = 600.0  # of one step of a sync; the longest is the first, which may compile kernels
POLL_S = 0.5


class ChannelClosed(Exception):
    """The other side is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Learn:
    """Learn where the tensors of ``plan`` go. Answered by ``Learnt``."""

    plan: WirePlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Learnt:
    """What this worker serves of the plan's tensors."""

    boxes: Boxes


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """Take a whole stream: the ``Filled`` that follow, each answered by None, then ``End``.

    ``plan`` is None where the worker has it from the last sync.
    """

    plan: WirePlan | None
    audit: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Filled:
    """The plan's bucket ``index`` lies in its slot's buffer, which comes along the first time."""

    index: int
    buffer: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """No more buckets. Answered by ``Installed``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """Checksums of what is served, in the order of ``Learnt.boxes`` (none without audit), and seconds by phase."""

    checksums: list[int]
    seconds: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """In place of any answer; the channel ends here."""

    error: EngineError


class Channel:
    """One end. Messages are pickled: both ends belong to one user (the socket's folder is closed to others)."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.settimeout(POLL_S)

    def send(self, message: object) -> None:
        """Raises ``ChannelClosed``."""
        data = bytes(ForkingPickler.dumps(message))
        self._socket.settimeout(TIMEOUT_S)
        try:
            self._socket.sendall(struct.pack("<Q", len(data)) + data)
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        finally:
            self._socket.settimeout(POLL_S)

    def receive(self, check: Callable[[], None] | None = None) -> object:
        """The next message; ``check`` is called now and then, and may raise.

        Raises ``ChannelClosed``, and ``RolloutError`` after ``TIMEOUT_S``.
        """
        (size,) = struct.unpack("<Q", self._read(8, check))
        return pickle.loads(self._read(size, check))  # noqa: S301 - see the class

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def _read(self, size: int, check: Callable[[], None] | None) -> bytes:
        data, deadline = bytearray(), time.monotonic() + TIMEOUT_S
        while len(data) < size:
            try:
                part = self._socket.recv(min(size - len(data), 1 << 20))
            except TimeoutError:
                _wait_on(deadline, check)
                continue
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not part:
                raise ChannelClosed("the other side closed it")
            data += part
        return bytes(data)


class Listener:
    """Where the workers of one sync connect."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rollout-")
        self.address = str(Path(self._folder.name) / "sync")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.address)
        self._socket.listen()
        self._socket.settimeout(POLL_S)

    def accept(self, count: int, check: Callable[[], None]) -> list[Channel]:
        """``count`` workers. Raises ``RolloutError`` after ``TIMEOUT_S``, and what ``check`` raises."""
        channels: list[Channel] = []
        deadline = time.monotonic() + TIMEOUT_S
        while len(channels) < count:
            try:
                channels.append(Channel(self._socket.accept()[0]))
            except TimeoutError:
                _wait_on(deadline, check)
        return channels

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        with suppress(OSError):
            self._folder.cleanup()


def connect(address: str) -> Channel:
    """A worker's end. Raises ``OSError`` when nobody listens."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    return Channel(connection)


def _wait_on(deadline: float, check: Callable[[], None] | None) -> None:
    if check is not None:
        check()
    if time.monotonic() > deadline:
        raise RolloutError(f"no answer for {TIMEOUT_S:.0f} s", where=WHERE, why="a process hangs or was stopped",
                           remedy="close this rollout and create another")  # fmt: skip

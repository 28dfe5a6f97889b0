"""Templates of ranks: processes that have imported torch and the suite, and fork into ranks.

There is one template for each rank, not one for all: as between the ranks of a launcher, the hash
of a string then differs between ranks, so that an engine which depends on a set's order fails.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import IO, Any

from engine_conformance._rank_template import FORK, REAP

__all__ = ["ForkedRank", "Templates"]

_COMMAND = "from engine_conformance._rank_template import main; main({})"
# Time for importing torch from a cold disk.
_START_SECONDS = 180.0
# Variables that are read when they are used, and not by an import: pytest's, which differs for each
# test, and the one that torch itself sets when its compiler is imported.
_LATE = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")


class ForkedRank:
    """The process of a rank that a template has forked, as `subprocess.Popen` has it.

    ``returncode`` is None as long as the rank runs, and stays None if its template was killed.
    """

    # An interrupt may come before a handle is there.
    _handle: int | None = None

    def __init__(self, template: _Template, pid: int) -> None:
        self.pid = pid
        self.returncode: Any = None
        self._template = template
        # The number of a process may be given to another one, this descriptor may not.
        self._handle = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the end and return the exit code, negative for a signal.

        Raises:
            TimeoutExpired: if it has not ended in time.
        """
        if self._handle is not None:
            if not select.select([self._handle], [], [], timeout)[0]:
                raise TimeoutExpired("rank", timeout or 0.0)
            self.returncode = self._template.reap(self.pid)
            self._close()
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""
        if self._handle is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, sig)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self._close()


class _Template:
    """A process that forks into ranks, and this process's end of the socket between the two."""

    def __init__(self, log: IO[bytes], environment: Mapping[str, str]) -> None:
        self.environment = environment
        # Lanes ask at the same time, and each must receive the answer to its own request.
        self._asking = threading.Lock()
        # Messages keep their boundaries.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_START_SECONDS)
        with theirs:
            self.process = Popen(
                [sys.executable, "-P", "-c", _COMMAND.format(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
            )

    def runs(self) -> bool:
        """Return whether it can be asked."""
        return self._socket.fileno() >= 0 and self.process.poll() is None

    def fork(
        self, descriptor: int, log: IO[bytes], environment: Mapping[str, str]
    ) -> ForkedRank | None:
        """Return a new rank, or None if the template has ended."""
        late = {name: environment[name] for name in _LATE if name in environment}
        request = json.dumps({"folder": str(Path.cwd()), "environment": late})
        answer = self._ask(FORK + request.encode(), (descriptor, log.fileno()))
        return ForkedRank(self, int(answer)) if answer else None

    def reap(self, pid: int) -> int | None:
        """Return the exit code of a rank that has ended, or None if the template has ended."""
        answer = self._ask(REAP + str(pid).encode())
        return int(answer) if answer else None

    def _ask(self, request: bytes, descriptors: Sequence[int] = ()) -> bytes:
        """Return the answer to a request, which is empty if the template has ended or hangs."""
        with self._asking:
            return self._ask_alone(request, descriptors)

    def _ask_alone(self, request: bytes, descriptors: Sequence[int]) -> bytes:
        answer = b""
        try:
            socket.send_fds(self._socket, [request], descriptors)
            answer = self._socket.recv(64)
        # Of this kind are a connection that is closed and an answer that does not come.
        except OSError:
            pass
        finally:
            # After an interrupt, too, the next request must not receive this one's answer.
            if not answer:
                self._socket.close()
        return answer

    def close(self) -> None:
        """End the process, which has nothing to finish."""
        self._socket.close()
        self.process.kill()
        self.process.wait()


class Templates:
    """The templates of this process, by rank."""

    def __init__(self) -> None:
        self._running: dict[int, _Template] = {}
        self._starting = threading.Lock()

    def start(self, rank: int, log: IO[bytes], environment: Mapping[str, str]) -> None:
        """Start the template of a rank, unless one of this environment runs already.

        Args:
            rank: the number of the rank.
            log: the file for what the template prints while it imports.
            environment: the environment of the template and its ranks. Libraries read it when they
                are imported, so that another environment needs another template.
        """
        wanted = {name: value for name, value in environment.items() if name not in _LATE}
        with self._starting:
            running = self._running.get(rank)
            if running is not None:
                if running.runs() and running.environment == wanted:
                    return
                running.close()
            self._running[rank] = _Template(log, wanted)

    def fork(
        self, rank: int, descriptor: int, log: IO[bytes], environment: Mapping[str, str]
    ) -> Any:
        """Fork the template of a rank, which was started, and return the rank's process.

        It is the template's own process if that has ended, so that its end is reported as the
        rank's.

        Args:
            rank: the number of the rank.
            descriptor: the rank's end of its pipe.
            log: the file for the rank's output.
            environment: the environment with which the template was started.
        """
        template = self._running[rank]
        return template.fork(descriptor, log, environment) or template.process

    def close(self) -> None:
        """End all templates."""
        while self._running:
            self._running.popitem()[1].close()

"""The processes of a run as this process sees them, and its connections to them.

The module reads Linux's ``/proc``.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine_api.codec import register

# Address and port. The address is hexadecimal, without the prefix of an IPv4 address in IPv6.
Endpoint = tuple[str, int]
_ESTABLISHED = "01"
_MAPPED = "0000000000000000FFFF0000"


@register
@dataclass(frozen=True, slots=True)
class Process:
    """A description of a process, sent to other processes.

    Attributes:
        pid: number of the process.
        started: start of the process by its kernel's clock, because a later process may have the
            same number.
        kernel: kernel and namespace that the number belongs to; "" where that is not known.
        host: name of the host, for people.
        log: destination of the process's errors, for people.
        addresses: addresses through which other hosts reach the process.
    """

    pid: int
    started: str
    kernel: str
    host: str
    log: str
    addresses: tuple[str, ...]

    @staticmethod
    def this() -> Process:
        """Return this process."""
        pid = os.getpid()
        host = socket.gethostname()
        addresses = {local[0] for _, local, _ in _connections()}
        return Process(
            pid=pid,
            started=_stat(pid)[1],
            kernel=_kernel(),
            host=host,
            log=_log(pid, host),
            addresses=tuple(sorted(a for a in addresses if not _is_loopback(a))),
        )

    @property
    def is_here(self) -> bool:
        """True if the process's number is valid in this process's kernel and namespace."""
        return bool(self.kernel) and self.kernel == _kernel()

    def is_gone(self) -> bool:
        """Return whether the process has ended.

        The result is False where that cannot be seen from here.
        """
        if not self.is_here:
            return False
        state, started = _stat(self.pid)
        return state in ("", "Z", "X") or started != self.started

    def is_stopped(self) -> bool:
        """Return whether a signal (SIGSTOP, a debugger) has stopped the process.

        The result is False where that cannot be seen from here.
        """
        return self.is_here and _stat(self.pid)[0] in ("T", "t")


def hang_up(peers: Sequence[Process], spare: set[int]) -> int:
    """Shut down this process's TCP connections to ``peers``, and return their number.

    A call that waits at such a connection gets an error, at both ends. A peer on this host is
    recognized by the other end of the connection, a peer on a different host by its address.

    Args:
        peers: processes to disconnect from.
        spare: ports whose connections are kept.
    """
    sockets = list(_sockets_of(os.getpid()))
    table = _table()
    ends = {pair: inode for inode, pair in table.items()}
    theirs = {inode for peer in peers if peer.is_here for _, inode in _sockets_of(peer.pid)}
    elsewhere = {address for peer in peers if not peer.is_here for address in peer.addresses}
    count = 0
    for descriptor, inode in sockets:
        if inode not in table:
            continue
        local, remote = table[inode]
        if spare & {local[1], remote[1]}:
            continue
        if ends.get((remote, local)) in theirs or remote[0] in elsewhere:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _stat(pid: int) -> tuple[str, str]:
    """Return the state and the start of a process, or ("", "") if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", ""
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]


def _kernel() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _log(pid: int, host: str) -> str:
    with suppress(OSError):
        target = Path("/proc/self/fd/2").readlink()
        if target.is_file():
            return f"{target} on {host}"
    return f"the standard error of process {pid} on {host}"


def _connections() -> Iterator[tuple[int, Endpoint, Endpoint]]:
    table = _table()
    for descriptor, inode in _sockets_of(os.getpid()):
        if inode in table:
            yield descriptor, *table[inode]


def _sockets_of(pid: int) -> Iterator[tuple[int, str]]:
    """Yield a process's sockets as (descriptor, inode).

    It yields nothing for another user's process, or for one that ends.
    """
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found = re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink()))
                if found is not None:
                    yield int(entry.name), found[1]


def _table() -> dict[str, tuple[Endpoint, Endpoint]]:
    """Return the established TCP connections of this network namespace by inode.

    Each is a pair of the local and the remote end.
    """
    found: dict[str, tuple[Endpoint, Endpoint]] = {}
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/self/net/{name}").read_text(encoding="ascii").splitlines()[1:]:
                _, local, remote, state, *rest = line.split()
                if state == _ESTABLISHED:
                    found[rest[5]] = _endpoint(local), _endpoint(remote)
    return found


def _endpoint(text: str) -> Endpoint:
    address, port = text.split(":")
    return address.removeprefix(_MAPPED), int(port, 16)


def _is_loopback(address: str) -> bool:
    # 127.0.0.0/8 and ::1 as the kernel prints them on a little-endian machine.
    if len(address) == len("0100007F"):
        return address.endswith("7F")
    return address == "00000000000000000000000001000000"


def age(at: float) -> str:
    """Return the age of a moment of ``time.time()`` as text for people."""
    return f"{max(0.0, time.time() - at):.0f} s ago"

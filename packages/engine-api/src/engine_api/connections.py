"""The processes of a run as this one sees them, and its connections to them. What is read here is Linux's ``/proc``."""

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

Endpoint = tuple[
    str, int
]  # address, in hexadecimal without the prefix of an IPv4 one in IPv6; port
_ESTABLISHED = "01"
_MAPPED = "0000000000000000FFFF0000"


@register
@dataclass(frozen=True, slots=True)
class Process:
    """A process, told to others.

    Attributes:
        started: of the process, by its kernel's clock: another one may have its number later.
        kernel: which kernel and namespace its number belongs to; "" where that is not known.
        host: its name, for people.
        log: where its errors go, for people.
        addresses: by which other hosts reach it.
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
        return Process(
            pid=pid,
            started=_stat(pid)[1],
            kernel=_kernel(),
            host=host,
            log=_log(pid, host),
            addresses=tuple(
                sorted({local[0] for _, local, _ in _connections() if not _is_loopback(local[0])})
            ),
        )

    @property
    def is_here(self) -> bool:
        """Whether its number means something in this process."""
        return bool(self.kernel) and self.kernel == _kernel()

    def is_gone(self) -> bool:
        """Return whether it has ended; False where that cannot be seen from here."""
        if not self.is_here:
            return False
        state, started = _stat(self.pid)
        return state in ("", "Z", "X") or started != self.started

    def is_stopped(self) -> bool:
        """Return whether a signal stopped it (SIGSTOP, a debugger); False where that cannot be seen from here."""
        return self.is_here and _stat(self.pid)[0] in ("T", "t")


def hang_up(peers: Sequence[Process], spare: set[int]) -> int:
    """Shut down this process's TCP connections to ``peers``; return how many there were.

    Whoever waits at one of them gets an error, here and there. A peer on this host is known by the other end of the
    connection, one elsewhere by its address.

    Args:
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
    """Return a process's state and when it started; ("", "") without one."""
    try:
        fields = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except OSError:
        return "", ""
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
    return f"what process {pid} on {host} wrote to its standard error"


def _connections() -> Iterator[tuple[int, Endpoint, Endpoint]]:
    table = _table()
    for descriptor, inode in _sockets_of(os.getpid()):
        if inode in table:
            yield descriptor, *table[inode]


def _sockets_of(pid: int) -> Iterator[tuple[int, str]]:
    """Yield a process's sockets: descriptor, inode. Another user's process, or one that ends, has none."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found = re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink()))
                if found is not None:
                    yield int(entry.name), found[1]


def _table() -> dict[str, tuple[Endpoint, Endpoint]]:
    """Return the established TCP connections of this network namespace by inode: this end, the other one."""
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
    # As the kernel prints them on a little-endian machine: 127.0.0.0/8, ::1.
    return (
        address.endswith("7F")
        if len(address) == len("0100007F")
        else address == "00000000000000000000000001000000"
    )


def age(at: float) -> str:
    """Return how long ago a moment of ``time.time()`` was, for people."""
    return f"{max(0.0, time.time() - at):.0f} s ago"

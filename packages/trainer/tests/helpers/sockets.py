"""The sockets that a run listens on, as the kernel lists them, for tests of reachability."""

from __future__ import annotations

import ipaddress
import re
import sys
from dataclasses import dataclass
from pathlib import Path

LISTENING = "0A"


@dataclass(frozen=True)
class Listening:
    """One socket of one process."""

    address: str
    port: int
    process: str

    @property
    def is_local(self) -> bool:
        """Whether nobody on another machine reaches it."""
        found = ipaddress.ip_address(self.address)
        mapped = getattr(found, "ipv4_mapped", None)
        return (mapped or found).is_loopback


def listening(pid: int) -> set[Listening]:
    """All of a process and those that it has started, in IPv4 and IPv6."""
    owners = {}
    for process in [pid, *below(pid)]:
        for inode in _sockets(process):
            owners.setdefault(inode, _name(process))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in owners:
                address, _, port = fields[1].partition(":")
                found.add(Listening(_address(address), int(port, 16), owners[fields[9]]))
    return found


def below(pid: int) -> set[int]:
    """The processes that it has started, and theirs."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            )
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, new = {pid}, {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found - {pid}


def _sockets(pid: int) -> set[str]:
    found = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                match = re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink()))
            except (FileNotFoundError, ProcessLookupError):
                continue
            if match:
                found.add(match[1])
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        pass
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()[:200]
    except (FileNotFoundError, ProcessLookupError):
        return "?"


def _address(hexadecimal: str) -> str:
    """Words of 32 bits, each in this machine's order."""
    words = [hexadecimal[i : i + 8] for i in range(0, len(hexadecimal), 8)]
    packed = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    return str(ipaddress.ip_address(packed))

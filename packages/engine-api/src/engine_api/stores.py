"""Stores through which processes find each other, each listening on one given address only."""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any


def serve_store(host: str, processes: int, timeout_s: float) -> Any:
    """Return a ``TCPStore`` for ``processes`` processes that listens on ``host`` only.

    It takes any free port (``store.port``). torch's own store listens on every interface, whatever
    address it is given. A store authenticates no client: values read from it must not be trusted,
    and ``host`` must not be an address that strangers reach.

    Raises ``OSError`` if ``host`` is not an address of this machine.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented, not re-exported

    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family) as server:
        port = int(server.getsockname()[1])
        return TCPStore(
            host,
            port,
            processes,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )


def reach_store(host: str, port: int, processes: int, timeout_s: float) -> Any:
    """Return a client of the store that another process serves.

    Raises ``RuntimeError`` if there is no such store within ``timeout_s`` seconds.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - as above

    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, processes, is_master=False, timeout=timeout, wait_for_workers=False)

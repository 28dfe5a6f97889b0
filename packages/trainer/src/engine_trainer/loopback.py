"""Runs on one machine listen on its loopback interface alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

GLOO = "GLOO_SOCKET_IFNAME"
LOOPBACK = ("lo", "lo0")  # Linux's and macOS's


def of_gloo() -> dict[str, str]:
    """Return the variables that confine gloo, which otherwise takes the interface that the host's name stands for."""
    for _, name in socket.if_nameindex():
        if name in LOOPBACK:
            return {GLOO: name}
    return {}


def stay(environment: Mapping[str, str] = os.environ) -> None:
    """Confine this process's gloo where all ranks are on this machine. What the user has set stays.

    torchrun's own store listens on every interface all the same (docs/security.md).
    """
    world = environment.get("WORLD_SIZE", "1")
    # Without LOCAL_WORLD_SIZE another launcher has started the ranks, and they may be anywhere.
    if world == environment.get("LOCAL_WORLD_SIZE", "1"):
        for name, value in of_gloo().items():
            os.environ.setdefault(name, value)

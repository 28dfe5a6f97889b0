"""Confinement of runs on one machine to its loopback interface."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from engine_trainer.config.sections import RolloutSection

_INTERFACES = ("lo", "lo0")  # Linux's and macOS's
_HOSTS = ("127.0.0.1", "localhost", "::1")


def loopback_variables(rollout: RolloutSection | None = None) -> dict[str, str]:
    """Return the variables that confine gloo and NCCL to the loopback interface.

    Without them both choose an interface that other machines reach. Empty where the rollout's
    server is on another host: gloo or NCCL brings the weights to it.
    """
    if rollout is not None and _is_elsewhere(rollout.options.get("url")):
        return {}
    for _, name in socket.if_nameindex():
        if name in _INTERFACES:
            # NCCL reads a bare name as a prefix, and one after "=" as the whole name.
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {}


def stay(
    environment: Mapping[str, str] = os.environ, rollout: RolloutSection | None = None
) -> None:
    """Confine this process's gloo and NCCL where the whole run is on this machine.

    Variables that the user has set stay. torchrun's own store listens on every interface all the
    same (docs/security.md).
    """
    world = environment.get("WORLD_SIZE", "1")
    # Without LOCAL_WORLD_SIZE another launcher has started the ranks, and they may be anywhere.
    if world == environment.get("LOCAL_WORLD_SIZE", "1"):
        for name, value in loopback_variables(rollout).items():
            os.environ.setdefault(name, value)


def _is_elsewhere(url: object) -> bool:
    if url is None:
        return False
    try:
        return urlsplit(str(url)).hostname not in _HOSTS
    except ValueError:
        # The rollout itself refuses a text that is no address.
        return True

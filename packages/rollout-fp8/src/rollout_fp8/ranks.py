"""Collectives of small values between the engine's ranks, which make a sync together."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from engine_api.comm import GroupComm, SingleComm, together
from engine_api.errors import ConfigError

T = TypeVar("T")

_LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def launcher_variables() -> list[str]:
    """Return the variables that torchrun gives a rank.

    A process that a rank starts would take itself for that rank.
    """
    return [*_LAUNCHER, *(name for name in os.environ if name.startswith("TORCHELASTIC_"))]


def of_all(work: Callable[[], T]) -> list[T]:
    """Return every rank's ``work()``, by rank, as a collective of the default process group.

    Without a process group it is this process's result alone.

    Raises:
        RankFailure: ``work`` failed on another rank; a rank on which it failed raises its own
            error.
    """
    return together(GroupComm() if world_size() > 1 else SingleComm(), work)


def world_size() -> int:
    """Return the number of ranks of the default process group, or 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def require_own_devices(device: str, size: int) -> None:
    """Raise ``ConfigError`` where a replica in its own processes would take other ranks' GPUs."""
    if device != "cpu" and size > 1 and (ranks := world_size()) > 1:
        raise ConfigError(
            "rollout.options.tensor_parallel_size",
            f"{size}, for the replica of each of {ranks} ranks",
            why="it takes its rank's device and the devices after it, "
            "which the next ranks' replicas take too",
            remedy="1; vllm with executor: in_process, by which ranks serve one together; "
            "or launcher: ray with ray.rollouts",
        )

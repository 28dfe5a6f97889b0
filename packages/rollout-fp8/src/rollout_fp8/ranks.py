"""The engine's ranks, which make a sync together: small values between them, never tensors of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from engine_api.comm import GroupComm, SingleComm, together
from engine_api.errors import ConfigError

T = TypeVar("T")


def of_all(work: Callable[[], T]) -> list[T]:
    """Everybody's ``work()``, by rank; a collective of the default process group, or of this process alone.

    Raises where it fails anywhere: its own error there, ``RankFailure`` on the other ranks.
    """
    return together(GroupComm() if world_size() > 1 else SingleComm(), work)


def world_size() -> int:
    """Of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def require_own_devices(device: str, size: int) -> None:
    """Raise ``ConfigError`` where a replica in processes of its own would take ``size`` devices, some of them other ranks'."""
    if device != "cpu" and size > 1 and (ranks := world_size()) > 1:
        raise ConfigError(
            "rollout.options.tensor_parallel_size",
            f"{size}, for the replica of each of {ranks} ranks",
            why="it takes its rank's device and those behind it, which the next ranks' replicas take too",
            remedy="1; vllm with executor: in_process, by which ranks serve one together; or launcher: ray with ray.rollouts",
        )

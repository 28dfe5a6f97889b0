"""Process groups of torch.distributed: the launcher's ranks, and a gather with two names."""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from engine_api.devices import device_of

if TYPE_CHECKING:
    import torch


def _is_launched() -> bool:
    """Return whether a launcher describes the ranks: torchrun, or one that sets its variables."""
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ


def world_and_rank() -> tuple[int, int]:
    """Return the number of ranks and this process's rank, also before a process group is made."""
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    if _is_launched():
        return int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    return 1, 0


def ensure_process_group(device_type: str, timeout: timedelta) -> bool:
    """Join the launcher's default process group, or make one of a single rank.

    The device that the launcher assigned to this process becomes the current one.

    Args:
        device_type: kind of device whose tensors the group carries, in addition to the host's.
        timeout: time after which a rank that does not join a collective is an error.

    Returns:
        True if the group was made here, so that the caller destroys it.

    Raises:
        ConfigError: there are fewer devices than ranks.
    """
    import torch.distributed as dist

    device = device_of(device_type)
    device.adopt_local_rank()
    if dist.is_initialized():
        return False
    if _is_launched():
        dist.init_process_group(device.process_groups, timeout=timeout)
    else:
        # torch documents HashStore, but does not re-export it.
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(
            device.process_groups, timeout=timeout, store=store, rank=0, world_size=1
        )
    return True


def all_gather(received: torch.Tensor, sent: torch.Tensor, group: Any = None) -> None:
    """Gather all ranks' ``sent`` ``[n]`` one after another into ``received`` ``[ranks · n]``.

    ``group`` None is the default group.
    """
    import torch.distributed as dist

    # torch 2.13 renames the function and warns of the old name, which is the only one in 2.11.
    is_renamed = hasattr(dist, "all_gather_single")
    gather: Any = getattr(dist, "all_gather_single" if is_renamed else "all_gather_into_tensor")
    gather(received, sent, group=group)

"""Process groups of torch.distributed: the launcher's ranks, their users, and a gather."""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from engine_api.devices import device_of

if TYPE_CHECKING:
    import torch


# Numbers of the default groups that this process makes of the launcher's ranks.
_GROUPS = itertools.count()


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
        True if the group was made here, so that the caller destroys it. An engine uses
        `ProcessGroupUse` instead, which spares the group of an engine that lives longer.

    Raises:
        ConfigError: there are fewer devices than ranks.
    """
    import torch.distributed as dist

    device = device_of(device_type)
    device.adopt_local_rank()
    if dist.is_initialized():
        return False
    store, rank, world_size = _meet(timeout)
    dist.init_process_group(
        device.process_groups, timeout=timeout, store=store, rank=rank, world_size=world_size
    )
    return True


def _meet(timeout: timedelta) -> tuple[Any, int, int]:
    """Return a store that all ranks share, this process's rank, and the number of ranks."""
    # torch documents these names, but does not re-export them.
    from torch.distributed import (
        HashStore,  # pyright: ignore[reportPrivateImportUsage]
        PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
        rendezvous,  # pyright: ignore[reportPrivateImportUsage, reportUnknownVariableType]
    )

    if not _is_launched():
        return HashStore(), 0, 1
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    # torchrun's store outlives a group. A second group with the same keys would read the addresses
    # of the first, which are dead.
    return PrefixStore(f"group {next(_GROUPS)}", store), rank, world_size


class ProcessGroupUse:
    """The use of the default process group by one engine, from its start to its end.

    The first engine of a process makes the group (`ensure_process_group`), and the last one that
    uses it destroys it, whichever was first. A group that the caller made is left alone.

    Args:
        device_type: kind of device whose tensors the group carries, in addition to the host's.
        timeout: time after which a rank that does not join a collective is an error.

    Raises:
        ConfigError: there are fewer devices than ranks.
    """

    # The group that an engine of this process made, and the number of engines that use it.
    _made: ClassVar[Any] = None
    _users: ClassVar[int] = 0

    def __init__(self, device_type: str, timeout: timedelta) -> None:
        import torch.distributed as dist

        if ensure_process_group(device_type, timeout):
            ProcessGroupUse._made = dist.group.WORLD
            ProcessGroupUse._users = 0
        self._group = dist.group.WORLD if dist.group.WORLD is ProcessGroupUse._made else None
        if self._group is not None:
            ProcessGroupUse._users += 1

    def end(self) -> None:
        """End the use, and destroy the group if it was made for engines and this was the last.

        A second call does nothing.
        """
        import torch.distributed as dist

        group = self._group
        self._group = None
        # The caller may have destroyed the group already.
        if group is None or group is not ProcessGroupUse._made:
            return
        ProcessGroupUse._users -= 1
        if not ProcessGroupUse._users:
            ProcessGroupUse._made = None
            if dist.is_initialized() and group is dist.group.WORLD:
                dist.destroy_process_group()


def all_gather(received: torch.Tensor, sent: torch.Tensor, group: Any = None) -> None:
    """Gather all ranks' ``sent`` ``[n]`` one after another into ``received`` ``[ranks · n]``.

    ``group`` None is the default group.
    """
    import torch.distributed as dist

    # torch 2.13 renames the function and warns of the old name, which is the only one in 2.11.
    is_renamed = hasattr(dist, "all_gather_single")
    gather: Any = getattr(dist, "all_gather_single" if is_renamed else "all_gather_into_tensor")
    gather(received, sent, group=group)


def reduce_scatter(received: torch.Tensor, sent: torch.Tensor, group: Any = None) -> None:
    """Add all ranks' ``sent`` ``[ranks · n]``, and place this rank's ``[n]`` of it in ``received``.

    ``group`` None is the default group.
    """
    import torch.distributed as dist

    # torch 2.13 renames this function as well.
    is_renamed = hasattr(dist, "reduce_scatter_single")
    reduce: Any = getattr(dist, "reduce_scatter_single" if is_renamed else "reduce_scatter_tensor")
    reduce(received, sent, group=group)

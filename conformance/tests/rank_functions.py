"""What the pool's tests run inside ranks."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist


def total(value: float) -> float:
    """Sum of ``value * (rank + 1)`` over the ranks."""
    tensor = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return tensor.item()


def surroundings() -> dict[str, Any]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    return {name: os.environ[name] for name in names} | {
        "backend": dist.get_backend(),
        "threads": torch.get_num_threads(),
        "random": torch.rand(1),
    }


def own(value: int) -> int:
    return value


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("odd one out")
    dist.barrier()


def exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        sys.exit(7)
    dist.barrier()


def crash_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.abort()
    dist.barrier()


def stall_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)
    dist.barrier()


def unpicklable() -> object:
    return lambda: None

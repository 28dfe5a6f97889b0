"""Functions that the rank pool's tests run inside ranks."""

from __future__ import annotations

import gc
import os
import random
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from engine_conformance.seeds import current_seed
from engine_conformance.shim import shimmed


def total(value: float) -> float:
    """Return the sum of ``value * (rank + 1)`` over the ranks."""
    tensor = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return tensor.item()


def surroundings() -> dict[str, Any]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    return {name: os.environ[name] for name in names} | {
        "backend": dist.get_backend(),
        "threads": torch.get_num_threads(),
        "random": torch.rand(1),
        "seed": current_seed(),
    }


def own(value: int) -> int:
    return value


def default_dtype() -> torch.dtype:
    return torch.get_default_dtype()


def as_new() -> dict[str, Any]:
    """Return what differs between two new processes, and what they have from their parent."""
    return {
        "pid": os.getpid(),
        "hash": hash("a string"),
        "random": random.random(),
        "numpy": numpy.random.random(),  # noqa: NPY002 - the generator that nobody has seeded
        "folder": str(Path.cwd()),
        "test": os.environ.get("PYTEST_CURRENT_TEST"),
    }


def raise_on(rank: int) -> None:
    dist.barrier()  # the others are on their way into the next one
    if dist.get_rank() == rank:
        raise KeyError("odd one out")
    dist.barrier()


def exit_on(rank: int) -> None:
    dist.barrier()
    if dist.get_rank() == rank:
        sys.exit(7)
    dist.barrier()


def crash_on(rank: int) -> None:
    dist.barrier()
    if dist.get_rank() == rank:
        os.abort()
    dist.barrier()


def stall_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)
    dist.barrier()


def unpicklable() -> object:
    return lambda: None


class Kept:
    """Object that a test can look for."""


_seen: list[weakref.ref[Kept]] = []


def fail(kept: Kept) -> None:
    raise ValueError(str(kept))


def hold_by_error() -> BaseException:
    """Return an error whose traceback holds an object in the frame that made the error."""
    kept = Kept()
    _seen.append(weakref.ref(kept))
    try:
        fail(kept)
    except ValueError as error:
        caught = error
    return caught


def still_held() -> list[bool]:
    gc.collect()
    return [reference() is not None for reference in _seen]


def gather_unevenly(lengths: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Gather every rank's rows and reduce their sum, with CUDA simulated.

    The result has this rank's part of the sum over the ranks.
    """
    with shimmed():
        rank = dist.get_rank()
        group = dist.group.WORLD
        rows = [10 * r + torch.arange(2.0 * n).reshape(n, 2) for r, n in enumerate(lengths)]
        gathered = [torch.empty_like(part) for part in rows]
        dist.all_gather(gathered, rows[rank], group)
        part = torch.empty_like(rows[rank])
        dist.reduce_scatter(part, [(rank + 1) * one for one in rows], dist.ReduceOp.SUM, group)
        return gathered, part


def gather_unevenly_later(called: str, lengths: list[int]) -> str:
    """Return the error of an uneven call that is not waited for."""
    with shimmed():
        parts = [torch.zeros(n) for n in lengths]
        own = parts[dist.get_rank()]
        arguments = (parts, own) if called == "all_gather" else (own, parts)
        try:
            getattr(dist, called)(*arguments, async_op=True)
        except NotImplementedError as error:
            return str(error)
    return ""

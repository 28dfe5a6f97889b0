"""The control plane of an engine: small Python objects between ranks, never tensors of the model.

It runs on a gloo group of its own, so that agreeing costs no device synchronization, and an
error on one rank becomes an error on all: no rank is left waiting in a collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from engine_api.errors import EngineError, RankFailure

T = TypeVar("T")


class Comm(Protocol):
    """All ranks of one engine."""

    rank: int
    world_size: int

    def all_gather(self, value: Any) -> list[Any]:
        """Everybody's ``value``, by rank."""
        ...

    def close(self) -> None:
        """Give the group back."""
        ...


class SingleComm:
    """One rank alone."""

    rank = 0
    world_size = 1

    def all_gather(self, value: Any) -> list[Any]:
        """``[value]``."""
        return [value]

    def close(self) -> None:
        """Nothing to give back."""


class TorchComm:
    """A gloo group over all ranks of the default process group. All ranks must construct it together."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo")
        # One thread a time: an asynchronous save has a group of its own.
        self._lock = threading.Lock()

    def all_gather(self, value: Any) -> list[Any]:
        """Everybody's ``value``, by rank."""
        import torch.distributed as dist

        rows: list[Any] = [None] * self.world_size
        with self._lock:
            dist.all_gather_object(rows, value, group=self._group)
        return rows

    def close(self) -> None:
        """Destroy the group."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group(self._group)


def together(comm: Comm, work: Callable[[], T]) -> list[T]:
    """Run ``work`` on every rank and return everybody's results, by rank.

    When it raises an ``EngineError`` (or an ``OSError``) anywhere, every rank raises: its own error
    where it failed, ``RankFailure`` with the others' messages elsewhere.
    """
    mine: Any = None
    error: EngineError | OSError | None = None
    try:
        mine = work()
    except (EngineError, OSError) as caught:
        error = caught
    rows = comm.all_gather((None if error is None else str(error), mine))
    if error is not None:
        raise error
    failures = {rank: message for rank, (message, _) in enumerate(rows) if message is not None}
    if failures:
        raise RankFailure(failures)
    return [value for _, value in rows]

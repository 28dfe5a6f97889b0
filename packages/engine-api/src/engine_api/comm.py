"""The control plane of an engine: small Python objects between ranks, never tensors of the model.

It runs on a gloo group of its own, so that agreeing costs no device synchronization, and an
error on one rank becomes an error on all: no rank is left waiting in a collective.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from engine_api.errors import RankFailure

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

    def __init__(self, timeout: timedelta | None = None) -> None:
        import torch.distributed as dist

        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout)
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

    When it raises anywhere, every rank raises: its own error where it failed, ``RankFailure`` with
    the others' messages elsewhere.
    """
    mine: Any = None
    error: Exception | None = None
    try:
        mine = work()
    except Exception as caught:  # noqa: BLE001 - whatever it is, nobody may be left waiting; raised below
        error = caught
    message = None if error is None else str(error) or type(error).__name__
    rows = comm.all_gather((message, mine))
    if error is not None:
        raise error
    failures = {rank: message for rank, (message, _) in enumerate(rows) if message is not None}
    if failures:
        raise RankFailure(failures)
    return [value for _, value in rows]

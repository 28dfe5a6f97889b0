"""Agreement between ranks before an engine has made their process group."""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import itertools
import os
import pickle
from typing import Any

from engine_api.comm import Comm, SingleComm, TorchComm

_rounds = itertools.count()  # of this process; every rank calls as often


def meeting() -> Comm:
    """Of all ranks that torchrun started; of this process alone without it."""
    import torch.distributed as dist

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return SingleComm()
    return TorchComm() if dist.is_initialized() else StoreComm()


class StoreComm:
    """Through the store by which the ranks find each other (``MASTER_ADDR``, ``MASTER_PORT``)."""

    def __init__(self) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._store: Any = None

    def all_gather(self, value: Any) -> list[Any]:
        """Everybody's ``value``, by rank; waits for the last as long as a process group would."""
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        if self._store is None:
            store, _, _ = next(rendezvous("env://", self.rank, self.world_size))
            self._store = dist.PrefixStore("engine_trainer", store)  # pyright: ignore[reportPrivateImportUsage] - documented, not re-exported
        round_ = next(_rounds)
        self._store.set(f"{round_}/{self.rank}", pickle.dumps(value))
        rows = [self._store.get(f"{round_}/{rank}") for rank in range(self.world_size)]
        return [pickle.loads(row) for row in rows]  # noqa: S301 - from this run's own ranks, as in any collective of objects

    def close(self) -> None:
        """Let go of the store."""
        self._store = None

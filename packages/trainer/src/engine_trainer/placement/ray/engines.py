"""The engine's ranks as actors (see ``EngineGroup``).

All dp shards are local to the controller, and each worker receives its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch

from engine_api.batch import Batch
from engine_api.losses import LossFn
from engine_api.results import CheckpointInfo, TokenOutputs, Topology
from engine_trainer.placement.groups import EngineGroup, Trained
from engine_trainer.placement.ray.calls import Pool

T = TypeVar("T")


class RayEngines:
    """One engine of a pool of ``EngineWorker``.

    Args:
        number: number of the engine among the workers' engines.
        topologies: topology of every rank, as the engine reports it; it tells which dp shard a rank
            receives, and which rank's results are collected.
    """

    def __init__(self, pool: Pool, number: int, topologies: Sequence[Topology]) -> None:
        self.pool = pool
        self.number = number
        self.dp_size = topologies[0].dp_size
        self.local_dp_ranks: Sequence[int] = range(self.dp_size)
        self._dp_ranks = [t.dp_rank for t in topologies]
        primary = {t.dp_rank: rank for rank, t in enumerate(topologies) if t.is_primary}
        # Primary ranks by data-parallel rank.
        self.primary = [primary[dp_rank] for dp_rank in self.local_dp_ranks]
        self._version = 0

    @property
    def weight_version(self) -> int:
        """See ``EngineGroup``."""
        return self._version

    def resolved(self) -> Mapping[str, Any]:
        """Return what the engine does of what was asked (see ``EngineGroup``)."""
        found: Mapping[str, Any] = self.call_all("resolved")[0]
        return found

    def infer(
        self, shards: Sequence[Batch], *, temperature: float = 1.0, adapter: bool = True
    ) -> list[TokenOutputs]:
        """See ``EngineGroup``."""
        found = self._scatter("infer", _without_fields(shards), temperature, adapter)
        return [found[rank] for rank in self.primary]

    def infer_states(self, shards: Sequence[Batch]) -> list[torch.Tensor]:
        """Return the hidden states from the primary workers (see ``EngineGroup``)."""
        found = self._scatter("infer_states", _without_fields(shards))
        return [found[rank] for rank in self.primary]

    def learn_from(self, teacher: EngineGroup | None) -> None:
        """Let each worker take the head of its own teacher (see ``EngineGroup``)."""
        assert teacher is None or isinstance(teacher, RayEngines), "it is on the same workers"
        self.call_all("learn_from", None if teacher is None else teacher.number)

    def train(
        self,
        shards: Sequence[Batch],
        loss: LossFn,
        *,
        denominator: float | None = None,
        temperature: float = 1.0,
    ) -> Trained:
        """See ``EngineGroup``."""
        results = self._scatter("train", shards, loss, denominator, temperature)
        result: Trained = results[0]  # the same on all ranks
        self._version = result.output.weight_version
        return result

    def gather(self, rows: Sequence[T]) -> list[T]:
        """Return the rows, which are all local to the controller (see ``EngineGroup``)."""
        return list(rows)

    def offload(self) -> None:
        """See ``EngineGroup``."""
        self.call_all("move", True)

    def reload(self) -> None:
        """See ``EngineGroup``."""
        self.call_all("move", False)

    def save_checkpoint(self, directory: Path, *, extra: Mapping[str, Any]) -> RaySave:
        """See ``EngineGroup``."""
        found = self.call_all("save", directory, dict(extra))
        return RaySave(self, found[0] if all(f is not None for f in found) else None)

    def load_checkpoint(self, directory: Path) -> CheckpointInfo:
        """See ``EngineGroup``."""
        info: CheckpointInfo = self.call_all("load", directory)[0]
        self._version = info.step
        return info

    def save_hf(self, directory: Path, *, dtype: torch.dtype) -> None:
        """See ``EngineGroup``."""
        self.call_all("save_hf", directory, dtype)

    def keep_generators(self) -> None:
        """See ``EngineGroup``."""
        self.call_all("keep_generators")

    def restore_generators(self) -> None:
        """See ``EngineGroup``."""
        self.call_all("restore_generators")

    def close(self) -> None:
        """See ``EngineGroup``."""
        self.call_all("close_engine")

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a worker's method of this engine on every rank."""
        return self.pool.call_all(method, self.number, *arguments)

    def _scatter(self, method: str, shards: Sequence[Batch], *arguments: Any) -> list[Any]:
        """Call a method on every rank with its dp shard.

        Each shard is put into the object store once, for its ranks alone.
        """
        references = [ray.put(shard) for shard in shards]
        calls = [
            self.pool.start(rank, method, self.number, references[dp_rank], *arguments)
            for rank, dp_rank in enumerate(self._dp_ranks)
        ]
        return [reply.value for reply in self.pool.finish(calls)]


def _without_fields(shards: Sequence[Batch]) -> list[Batch]:
    """Return tokens and images, which are all that inference reads."""
    return [shard.keep_fields() for shard in shards]


class RaySave:
    """A save that may still be running (see ``CheckpointHandle``)."""

    def __init__(self, engines: RayEngines, info: CheckpointInfo | None) -> None:
        self._engines = engines
        self._info = info

    def done(self) -> bool:
        """See ``CheckpointHandle``."""
        return self._ask(wait=False) is not None

    def result(self) -> CheckpointInfo:
        """See ``CheckpointHandle``."""
        info = self._ask(wait=True)
        assert info is not None
        return info

    def _ask(self, *, wait: bool) -> CheckpointInfo | None:
        if self._info is None:
            # Every rank writes its part: the save is complete when all parts are.
            found = self._engines.call_all("saved", wait)
            self._info = found[0] if all(f is not None for f in found) else None
        return self._info

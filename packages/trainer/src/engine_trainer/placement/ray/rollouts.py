"""The rollout's replicas as actors (see ``RolloutGroup``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine_api.rollout import SamplingParams, SyncResult
from engine_trainer.data import Prompt
from engine_trainer.placement.ray.calls import Call, Pool, Reply, WorkerLost
from engine_trainer.placement.ray.engines import RayEngines
from engine_trainer.placement.replica import ScoredCompletion
from engine_trainer.telemetry.logs import Timers

POLL_S = 0.05
"""Seconds between two looks at replicas that may get work, or may have started."""


class ColocatedRollouts:
    """A replica in the process of each engine rank, time-shared with the engine.

    Weights stay in the process.

    Args:
        policy: the engine that is served.
        timers: receive ``generate`` and ``reward``, those of the slowest replica.
    """

    def __init__(self, policy: RayEngines, timers: Timers) -> None:
        self._pool = policy.pool
        self._timers = timers
        self.size = len(policy.pool)
        self.local_replicas: Sequence[int] = range(self.size)

    def sync(self) -> list[SyncResult]:
        """See ``RolloutGroup``."""
        results: list[SyncResult] = self._pool.call_all("sync")[0]
        return results

    def admit(self) -> None:
        """Do nothing, because the replicas stay the same (see ``RolloutGroup``)."""

    def wake_up(self, *, weights: bool) -> None:
        """See ``RolloutGroup``."""
        self._pool.call_all("wake_up", weights)

    def sleep(self) -> None:
        """See ``RolloutGroup``."""
        self._pool.call_all("sleep")

    def generate_and_score(
        self, prompts: Sequence[Sequence[Prompt]], sampling: SamplingParams
    ) -> list[list[list[ScoredCompletion]]]:
        """See ``RolloutGroup``."""
        calls = [
            self._pool.start(rank, "generate_and_score", list(own), sampling)
            for rank, own in enumerate(prompts)
        ]
        replies = self._pool.finish(calls)
        note_phases(self._timers, [reply.phases for reply in replies])
        return [reply.value for reply in replies]

    def close(self) -> None:
        """See ``RolloutGroup``."""
        self._pool.call_all("close_rollout")


class SeparateRollouts:
    """Replicas in processes of their own, which receive the weights.

    They need not sleep, because no engine needs their memory. A caller that gives them work one by
    one names them by numbers, those of ``serving``.
    """

    elastic = False
    """True if replicas may be lost and others may join while the run goes on."""

    def __init__(self, pool: Pool, policy: RayEngines, timers: Timers) -> None:
        self.pool = pool
        self._policy = policy
        self._timers = timers
        self.size = len(pool)
        self.local_replicas: Sequence[int] = range(self.size)

    def sync(self) -> list[SyncResult]:
        """See ``RolloutGroup``."""
        engines = self._policy.pool
        version = self._policy.weight_version
        address = engines.finish([engines.start(0, "wire_address", version)])[0].value
        received = [
            self.pool.start(rank, "receive", address, rank, version) for rank in self.local_replicas
        ]
        values = [
            reply.value for reply in self.pool.finish([*received, *engines.start_all("send")])
        ]
        # The first rank of the engine sent them.
        wire_bytes: int = values[self.size]
        return [replace(result, wire_bytes=wire_bytes) for result in values[: self.size]]

    def admit(self) -> None:
        """Do nothing, because the replicas stay the same (see ``RolloutGroup``)."""

    def serving(self) -> list[int]:
        """Return the replicas that have weights and may be given work."""
        return list(self.local_replicas)

    def start(self, replica: int, method: str, *arguments: Any) -> Call:
        """Start a call of one replica."""
        return self.pool.start(replica, method, *arguments)

    def reply(self, replica: int, call: Call) -> Reply | None:
        """Return the reply of a call that is done, or None if the replica is lost and replaced.

        Raises the call's error, and ``WorkerLost`` unless the run is elastic.
        """
        del replica
        (reply,) = self.pool.finish([call])
        return reply

    def lose(self, replica: int, error: WorkerLost) -> None:
        """Replace a replica that does not respond.

        Raises ``error`` unless the run is elastic.
        """
        del replica
        raise error

    def check_attempts(self, attempts: int) -> None:
        """Raise an error if so many replicas were lost with the same group."""

    def wake_up(self, *, weights: bool) -> None:
        """Do nothing (see the class)."""

    def sleep(self) -> None:
        """Do nothing (see the class)."""

    def continuing(self, sampling: SamplingParams, slice_tokens: int) -> None:
        """Prepare for ``advance`` (see ``PartialRollouts``)."""
        self.pool.call_all("continuing", sampling, slice_tokens)

    def generate_and_score(
        self, prompts: Sequence[Sequence[Prompt]], sampling: SamplingParams
    ) -> list[list[list[ScoredCompletion]]]:
        """See ``RolloutGroup``."""
        calls = [
            self.pool.start(rank, "generate_and_score", list(own), sampling)
            for rank, own in enumerate(prompts)
        ]
        replies = self.pool.finish(calls)
        note_phases(self._timers, [reply.phases for reply in replies])
        return [reply.value for reply in replies]

    def close(self) -> None:
        """See ``RolloutGroup``."""
        self.pool.call_all("close_rollout")


def note_phases(timers: Timers, phases: Sequence[Mapping[str, float]]) -> None:
    """Add the seconds of the slowest replica to each phase, from the phases of every replica."""
    for phase in ("generate", "reward"):
        timers.add(phase, max((own.get(phase, 0.0) for own in phases), default=0.0))

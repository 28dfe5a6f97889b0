"""The rollout's replicas as actors (see ``RolloutGroup``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine_api.rollout import SamplingParams, SyncResult
from engine_trainer.data import Prompt
from engine_trainer.placement.ray.calls import Pool, Reply
from engine_trainer.placement.ray.engines import RayEngines
from engine_trainer.placement.replica import ScoredCompletion
from engine_trainer.telemetry.logs import Timers


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
        return _scored_completions(self._pool.finish(calls), self._timers)

    def close(self) -> None:
        """See ``RolloutGroup``."""
        self._pool.call_all("close_rollout")


class SeparateRollouts:
    """Replicas in processes of their own, which receive the weights.

    They need not sleep, because no engine needs their memory.
    """

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
        return _scored_completions(self.pool.finish(calls), self._timers)

    def close(self) -> None:
        """See ``RolloutGroup``."""
        self.pool.call_all("close_rollout")


def _scored_completions(
    replies: Sequence[Reply], timers: Timers
) -> list[list[list[ScoredCompletion]]]:
    for phase in ("generate", "reward"):
        timers.add(phase, max(reply.phases.get(phase, 0.0) for reply in replies))
    return [reply.value for reply in replies]

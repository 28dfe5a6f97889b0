"""Engines and rollouts on a Ray cluster (see ``engine_trainer.placement.groups.Launcher``)."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_api.capabilities import Capability
from engine_api.comm import Comm, SingleComm
from engine_api.config import EngineConfig
from engine_api.errors import ConfigError, RankFailure
from engine_trainer.config import RLConfig
from engine_trainer.config.sections import EngineSection, RolloutSection
from engine_trainer.placement import memory
from engine_trainer.placement.memory import FreeMemory
from engine_trainer.placement.ray import cluster
from engine_trainer.placement.ray.calls import Pool, WorkerLost, attempt, finish
from engine_trainer.placement.ray.elastic import ElasticRollouts
from engine_trainer.placement.ray.engines import RayEngines
from engine_trainer.placement.ray.meter import Meter
from engine_trainer.placement.ray.replicas import Replicas, Starter
from engine_trainer.placement.ray.rollouts import ColocatedRollouts, SeparateRollouts
from engine_trainer.placement.ray.workers import EngineWorker, RolloutWorker
from engine_trainer.placement.replica import RolloutSpec, rollout_device
from engine_trainer.telemetry.logs import Timers

log = logging.getLogger("engine_trainer")

FAREWELL_S = 10.0
"""Seconds that workers have to close their engines and rollouts before they are ended."""


class OnRay:
    """A controller's launcher, with pools of actors in placement groups.

    The cluster must be connected.

    Args:
        patience_s: seconds that the cluster may be too small at first, because a lost node may be
            replaced.

    Raises ``ConfigError`` when it stays too small.
    """

    def __init__(self, config: RLConfig, patience_s: float = 0.0) -> None:
        self.config = config
        self.section = config.ray
        self.comm: Comm = SingleComm()  # one controller
        self.meter = Meter()
        self._each = cluster.per_worker(self.section, config.engine)
        cluster.require(self._each, self.section.engines + (self.section.rollouts or 0), patience_s)
        self._placements: list[cluster.Placement] = []
        self._pools: list[Pool] = []
        self._starters: dict[str, Starter] = {}  # by the name of their pool
        self._policy: RayEngines | None = None
        self._rollout_pool: Pool | None = None  # None: colocated with the engines
        self._elastic: ElasticRollouts | None = None  # None: a lost replica ends this launcher
        self._num_engines = 0

    def resolve(
        self, section: EngineSection, other: EngineSection | None = None
    ) -> tuple[str, frozenset[Capability]]:
        """Resolve the engine in the first worker (see ``Launcher``)."""
        pool = self._engine_pool()
        found: tuple[str, frozenset[Capability]] = pool.finish(
            [pool.start(0, "resolve", section, other)]
        )[0].value
        return found

    def list_options(self, section: EngineSection) -> frozenset[str]:
        """Ask the first worker (see ``Launcher``)."""
        pool = self._engine_pool()
        found: frozenset[str] = pool.finish([pool.start(0, "list_options", section)])[0].value
        return found

    def free_memory(self, device: str) -> list[FreeMemory]:
        """Ask the workers of the engines (see ``Launcher``)."""
        return self._engine_pool().call_all("free_memory", device)

    def probe_rollout(self, section: RolloutSection, device: str) -> list[str]:
        """Ask the workers that will hold a replica (see ``Launcher``)."""
        return self._replica_pool().call_all("why_unusable", section, device)

    def engines(self, section: EngineSection, config: EngineConfig, device: str) -> RayEngines:
        """Build an engine in the workers of all engines (see ``Launcher``).

        Raises ``ConfigError`` when policy and rollout cannot fit.
        """
        pool = self._engine_pool()
        if self._policy is None:
            self._check_memory(pool, config, device)
            self._join(pool, device)
        made = RayEngines(
            pool, self._num_engines, pool.call_all("make_engine", section, config, device)
        )
        self._num_engines += 1
        self._policy = self._policy or made
        return made

    def rollouts(self, spec: RolloutSpec, timers: Timers) -> ColocatedRollouts | SeparateRollouts:
        """See ``Launcher``."""
        assert self._policy is not None, "the policy comes first"
        if self._rollout_pool is None:
            self._policy.pool.call_all("make_rollout", spec)
            return ColocatedRollouts(self._policy, timers)
        for key, given in {
            "lora: adapter": spec.section.lora == "adapter",
            "offload_engine": spec.section.offload_engine,
        }.items():
            if given:
                raise ConfigError(
                    f"rollout.{key}",
                    "needs the rollout in the engine's processes",
                    why=f"ray.rollouts is {self.section.rollouts}",
                    remedy="leave one of the two out",
                )
        build, in_flight = self._connect(spec, self._policy.pool, self._rollout_pool)
        if not self.section.elastic:
            return SeparateRollouts(self._rollout_pool, self._policy, timers, in_flight=in_flight)
        self._elastic = ElasticRollouts(
            Replicas(
                self._rollout_pool,
                replace(self._starters[self._rollout_pool.name], build=build),
                self.section,
            ),
            self._policy,
            timers,
            batch_size=spec.section.batch_size,
            # Where no replica is replaced, another one still takes the work of a lost one.
            attempts=self.section.restarts + 1,
            in_flight=in_flight,
        )
        return self._elastic

    def why_unusable(self, error: BaseException) -> str | None:
        """See ``Launcher``."""
        if isinstance(error, WorkerLost | RankFailure):
            return "a worker is lost, or in the middle of a call"
        return None

    def figures(self) -> dict[str, float]:
        """See ``Launcher``."""
        return self.meter.take() | ({} if self._elastic is None else self._elastic.figures())

    def profile(self, folder: Path | None) -> None:
        """See ``Launcher``."""
        for pool in self._pools:
            if self._elastic is None or pool is not self._rollout_pool:
                pool.call_all("profile", folder)
        if self._elastic is not None:
            self._elastic.profile(folder)

    def close(self) -> None:
        """Close all workers (see ``Launcher``).

        Workers close their engines and rollouts where they still can, and are ended in any case.
        """
        if self._elastic is not None:
            self._elastic.stop()

        def close_workers() -> None:
            finish([call for pool in self._pools for call in pool.start_all("close")], FAREWELL_S)

        attempt(close_workers)
        for pool in self._pools:
            cluster.kill(pool.actors)
        for placement in self._placements:
            placement.release()
        self._pools = []
        self._placements = []

    # --- inside -----------------------------------------------------------------------------------

    def _engine_pool(self) -> Pool:
        if self._pools:
            return self._pools[0]
        return self._pool("engine", EngineWorker, self.section.engines)

    def _replica_pool(self) -> Pool:
        """Return the workers that hold a replica each, which may be those of the engines."""
        engines = self._engine_pool()
        if self.section.rollouts is None:
            return engines
        if self._rollout_pool is None:
            self._rollout_pool = self._pool("rollout", RolloutWorker, self.section.rollouts)
        return self._rollout_pool

    def _check_memory(self, engines: Pool, config: EngineConfig, device: str) -> None:
        served = rollout_device(self.config.rollout, device)
        rooms = engines.call_all("free_memory", device)
        replicas = self._replica_pool()
        rollouts = rooms if replicas is engines else replicas.call_all("free_memory", served)
        memory.check(rooms, rollouts, self.config, config, device)

    def _pool(self, name: str, cls: type, workers: int) -> Pool:
        placement = cluster.Placement(self._each, workers, self.section.start_timeout_s)
        self._placements.append(placement)
        # Engines come first, so that their numbers are their ranks.
        before = sum(len(other) for other in self._pools)
        where = (str(Path.cwd()), sys.path, list(self.section.imports))
        seed = self.config.run.seed
        starter = Starter(
            actor=lambda rank: placement.start(cls, rank, f"{name}-{rank}"),
            setup=lambda rank: (*where, (seed, before + rank)),
        )
        self._starters[name] = starter
        actors = [starter.actor(rank) for rank in range(workers)]
        pool = Pool(name, actors, self.section.timeout_s, self.meter)
        self._pools.append(pool)
        starting = [pool.start(rank, "setup", *starter.setup(rank)) for rank in range(workers)]
        pool.finish(starting, start_timeout_s=self.section.start_timeout_s)
        return pool

    def _join(self, pool: Pool, device: str) -> None:
        size = len(pool)
        timeout_s = self.section.timeout_s
        address = pool.finish([pool.start(0, "serve_store", size, timeout_s)])[0].value
        pool.finish(
            [
                pool.start(rank, "join", address, rank, size, device, timeout_s)
                for rank in range(size)
            ]
        )

    def _connect(
        self, spec: RolloutSpec, engines: Pool, rollouts: Pool
    ) -> tuple[tuple[Any, ...], bool]:
        """Build the replicas and both ends of the wire.

        Returns the arguments of a replica, and whether all replicas take weights while they
        generate.
        """
        why = engines.finish([engines.start(0, "why_whole", spec)])[0].value
        log.info(
            "weights go to %d replicas %s",
            len(rollouts),
            f"as whole tensors: {why}" if why else "over the rollout's own wire",
        )
        # The controller's deadline comes first: a worker that hangs is then lost, and a restart
        # replaces it; with the wire's deadline first it would be a failed sync. In an elastic run
        # the wire's comes first: a failed sync leaves the replica that hangs, which is replaced.
        elastic = self.section.elastic
        timeout_s = self.section.timeout_s if elastic else 2 * self.section.timeout_s
        whole = bool(why)
        build = (spec, timeout_s, whole, elastic)
        sliced: list[str | None] = rollouts.call_all("make_rollout", *build)
        engines.call_all("make_wire", spec, len(rollouts), timeout_s, whole, elastic)
        reasons = [reason for reason in sliced if reason is not None]
        if self.config.overlap.mode == "full":
            log.info(
                "weights are updated %s",
                f"between slices of {self.config.overlap.slice_tokens} tokens: {reasons[0]}"
                if reasons
                else "in the middle of completions, which pause for it",
            )
        return build, not reasons

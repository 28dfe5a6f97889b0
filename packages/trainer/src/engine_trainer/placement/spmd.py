"""Engines and rollouts in the processes that run the loop, one process or every rank of torchrun.

Every method is called on all ranks together. The dp shard of a rank's own data-parallel rank is
local to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from engine_api import generators, heartbeat
from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.comm import Comm, SingleComm, TorchComm, together
from engine_api.config import EngineConfig
from engine_api.contract import Engine
from engine_api.errors import ConfigError
from engine_api.losses import LossFn
from engine_api.registry import EngineRegistry, Resolution
from engine_api.results import CheckpointHandle, CheckpointInfo, TokenOutputs
from engine_api.rollout import SamplingParams, SyncResult, WeightExporter
from engine_trainer.config import RLConfig
from engine_trainer.config.engine_keys import POLICY, named_below
from engine_trainer.config.sections import EngineSection, RolloutSection, RunSection
from engine_trainer.data import Prompt
from engine_trainer.placement.groups import (
    EngineGroup,
    Trained,
    format_sizes,
    model_sizes,
    run_together,
)
from engine_trainer.placement.memory import FreeMemory, check_here, free_memory
from engine_trainer.placement.rendezvous import connect_ranks
from engine_trainer.placement.replica import (
    Replica,
    RolloutSpec,
    Scored,
    create_exporter,
    why_unusable,
)
from engine_trainer.telemetry.logs import Timers
from engine_trainer.telemetry.profiling import Trace
from engine_trainer.utils.plugins import find_capabilities, list_options

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class SpmdEngines:
    """This rank's engine as a group.

    See ``EngineGroup``.
    """

    def __init__(self, engine: Engine, comm: Comm, device: str) -> None:
        self.engine = engine
        self.comm = comm
        self.device = device
        self.dp_size = engine.topology.dp_size
        self.local_dp_ranks: Sequence[int] = (engine.topology.dp_rank,)
        self._generators: Mapping[str, Any] = generators.capture(device)

    @property
    def weight_version(self) -> int:
        """See ``EngineGroup``."""
        return self.engine.weight_version

    def resolved(self) -> Mapping[str, Any]:
        """Return what the engine does of what was asked (see ``EngineGroup``)."""
        # An engine of a contract before 1.3 has no such member.
        tell = getattr(self.engine, "resolved", None)
        return {} if tell is None else tell()

    def infer(
        self, shards: Sequence[Batch], *, temperature: float = 1.0, adapter: bool = True
    ) -> list[TokenOutputs]:
        """See ``EngineGroup``."""
        (batch,) = shards
        outputs = self.engine.infer_batch(batch, temperature=temperature, adapter=adapter)
        return [
            TokenOutputs(
                log_probs=_to_cpu(outputs.log_probs),
                entropy=_to_cpu(outputs.entropy),
                values=_to_cpu(outputs.values),
            )
        ]

    def infer_states(self, shards: Sequence[Batch]) -> list[torch.Tensor]:
        """Return the hidden states of this rank's shard (see ``EngineGroup``)."""
        (batch,) = shards
        return [self.engine.infer_states(batch)]

    def learn_from(self, teacher: EngineGroup | None) -> None:
        """Give this rank's engine the head of the teacher's (see ``EngineGroup``)."""
        assert teacher is None or isinstance(teacher, SpmdEngines), "it is in this process"
        self.engine.set_teacher(None if teacher is None else teacher.engine.output_head())

    def train(
        self,
        shards: Sequence[Batch],
        loss: LossFn,
        *,
        denominator: float | None = None,
        temperature: float = 1.0,
    ) -> Trained:
        """See ``EngineGroup``."""
        (batch,) = shards
        output = self.engine.train_batch(
            batch, loss, denominator=denominator, temperature=temperature
        )
        noted = getattr(loss, "observed", None)
        return Trained(output=output, observed=[] if noted is None else self.comm.all_gather(noted))

    def gather(self, rows: Sequence[T]) -> list[T]:
        """Return all rows (see ``EngineGroup``).

        The row of a data-parallel rank is its primary rank's.
        """
        (row,) = rows
        topology = self.engine.topology
        return _by_rank(
            self.comm.all_gather((topology.dp_rank, row) if topology.is_primary else None)
        )

    def offload(self) -> None:
        """See ``EngineGroup``."""
        self.engine.to("cpu")

    def reload(self) -> None:
        """See ``EngineGroup``."""
        self.engine.to(self.device)

    def save_checkpoint(self, directory: Path, *, extra: Mapping[str, Any]) -> CheckpointHandle:
        """See ``EngineGroup``."""
        return self.engine.save_checkpoint(directory, extra=extra)

    def load_checkpoint(self, directory: Path) -> CheckpointInfo:
        """See ``EngineGroup``."""
        return self.engine.load_checkpoint(directory)

    def save_hf(self, directory: Path, *, dtype: torch.dtype) -> None:
        """See ``EngineGroup``."""
        self.engine.save_hf(directory, dtype=dtype)

    def keep_generators(self) -> None:
        """See ``EngineGroup``."""
        self._generators = generators.capture(self.device)

    def restore_generators(self) -> None:
        """See ``EngineGroup``."""
        generators.restore(self._generators, self.device)

    def close(self) -> None:
        """See ``EngineGroup``."""
        self.engine.close()


class SpmdRollouts:
    """A replica on every rank, so that all of them generate (see ``RolloutGroup``).

    There is one on every rank however the engine divides its work: a server may make process
    groups, which every rank must take part in. With replicas on some ranks only it would hang.
    """

    def __init__(self, replica: Replica, exporter: WeightExporter, policy: SpmdEngines) -> None:
        self.replica = replica
        self.exporter = exporter
        self.policy = policy
        topology = policy.engine.topology
        self.size = topology.world_size
        self.local_replicas: Sequence[int] = (topology.rank,)

    def sync(self) -> list[SyncResult]:
        """Sync all replicas (see ``RolloutGroup``).

        Raises ``RolloutError``: all ranks together.
        """
        return together(self.policy.comm, self._sync)

    def admit(self, *, if_none_serves: bool = False) -> None:
        """Do nothing, because the replicas stay the same (see ``RolloutGroup``)."""

    def wake_up(self, *, weights: bool) -> None:
        """See ``RolloutGroup``."""
        together(
            self.policy.comm,
            lambda: self.replica.rollout.wake_up(weights=weights, kv_cache=not weights),
        )

    def sleep(self) -> None:
        """See ``RolloutGroup``."""
        together(self.policy.comm, self.replica.rollout.sleep)

    def generate_and_score(
        self, prompts: Sequence[Sequence[Prompt]], sampling: SamplingParams
    ) -> list[list[Scored]]:
        """Generate and score (see ``RolloutGroup``).

        Raises ``RolloutError``, ``RewardError``; ``RankFailure`` on the other ranks.
        """
        (local,) = prompts
        return together(self.policy.comm, lambda: self.replica.generate_and_score(local, sampling))

    def close(self) -> None:
        """Close the rollout and the exporter."""
        self.replica.close()
        self.exporter.close()

    def _sync(self) -> SyncResult:
        engine = self.policy.engine
        export = self.exporter.export(engine)
        try:
            return self.replica.rollout.update_weights(export, engine.weight_version)
        finally:
            # A rank whose sync failed still takes part in the other ranks' gathers.
            for _ in export:
                pass


class Spmd:
    """A launcher that runs everything in this process (see ``Launcher``).

    Args:
        config: configuration of an RL run, whose placement is checked before anything is loaded;
            None: the caller has checked it.
        timeout_s: seconds that a live rank may keep other ranks waiting between the engine's calls.
    """

    def __init__(
        self, config: RLConfig | None = None, timeout_s: float = RunSection.timeout_s
    ) -> None:
        self._config = config
        self._timeout_s = timeout_s
        self.comm: Comm = connect_ranks(timeout_s)
        self._made: list[SpmdEngines] = []
        self._trace: Trace | None = None

    def resolve(
        self, section: EngineSection, other: EngineSection | None = None
    ) -> tuple[str, frozenset[Capability]]:
        """See ``Launcher``."""
        found = _resolve(section)
        if (
            other is not None
            and found.plugin.one_layout
            and found.plugin.name == _resolve(other).plugin.name
        ):
            sizes = model_sizes(section.parallelism)
            others = model_sizes(other.parallelism)
            if sizes != others:
                raise ConfigError(
                    "engine.parallelism",
                    f"expected the sizes of the other engine, {format_sizes(others)}, got "
                    f"{format_sizes(sizes)}",
                    why=f"engines of {found.plugin.name} in one process have one layout",
                    remedy="give both the same sizes, or one of them another backend",
                )
        with named_below(POLICY):
            return found.device, find_capabilities(found.plugin, found.source, section.options)

    def list_options(self, section: EngineSection) -> frozenset[str]:
        """Return the names of the engine's options (see ``Launcher``)."""
        found = _resolve(section)
        return frozenset(list_options(found.plugin, found.source))

    def free_memory(self, device: str) -> list[FreeMemory]:
        """Return what each rank has free (see ``Launcher``)."""
        return together(self.comm, lambda: free_memory(device))

    def probe_rollout(self, section: RolloutSection, device: str) -> list[str]:
        """Ask each rank, which holds a replica (see ``Launcher``)."""
        return together(self.comm, lambda: why_unusable(section, device))

    def engines(self, section: EngineSection, config: EngineConfig, device: str) -> SpmdEngines:
        """Build an engine (see ``Launcher``).

        Raises ``ConfigError``, on all ranks, when policy and rollout cannot fit, or the ranks would
        share a server.
        """
        if not self._made and self._config is not None:
            refuse_shared_server(self._config.rollout, self.comm.world_size)
            check_here(self.comm, self._config, config, device)
        with named_below(POLICY):
            engine: Engine = EngineRegistry.create(
                model_type=section.model_type, backend=section.backend, device=device, config=config
            )
            engine.initialize()
        # The first engine makes the process group.
        if not self._made:
            self.comm.close()
            several = engine.topology.world_size > 1
            self.comm = TorchComm(timedelta(seconds=self._timeout_s)) if several else SingleComm()
        self._made.append(SpmdEngines(engine, self.comm, device))
        return self._made[-1]

    def rollouts(self, spec: RolloutSpec, timers: Timers) -> SpmdRollouts:
        """Build the replicas (see ``Launcher``).

        Raises ``PluginError``, ``ConfigError``: all ranks together.
        """
        refuse_shared_server(spec.section, self.comm.world_size)
        policy = self._made[0]

        def build() -> tuple[Replica, WeightExporter]:
            exporter = create_exporter(spec)
            return Replica.create(spec, timers), exporter

        return SpmdRollouts(*run_together(self.comm, build), policy)

    def why_unusable(self, error: BaseException) -> str | None:
        """See ``Launcher``."""
        if self.comm.world_size == 1 or heartbeat.raised_by_all(error):
            return None
        return "other ranks may be gone, or in the middle of a call"

    def figures(self) -> dict[str, float]:
        """See ``Launcher``."""
        return {}

    def profile(self, folder: Path | None) -> None:
        """See ``Launcher``."""
        if folder is None:
            trace = self._trace
            self._trace = None
            if trace is not None:
                trace.end()
            return
        self._trace = Trace(f"rank-{self._made[0].engine.topology.rank}")
        self._trace.begin(folder)

    def close(self) -> None:
        """Close the engines (see ``Launcher``).

        It agrees on nothing, because after an error other ranks may be anywhere.
        """
        if self._made:
            self.comm.close()
        # The policy comes last: all engines use its process group.
        while self._made:
            self._made.pop().close()


def refuse_shared_server(section: RolloutSection, ranks: int) -> None:
    """Raise ``ConfigError`` where several ranks would send their weights to one server.

    The server would take one rank's weights while that rank waits for the others to take part in
    its gathers, and they wait for the server.
    """
    if ranks > 1 and "url" in section.options:
        raise ConfigError(
            "rollout.options.url",
            f"expected one rank, got {ranks}, each of which sends to a server of its own",
            why="a server takes the weights of one rank at a time, and the ranks send together",
            remedy="leave url out: each rank then starts a server; or use one rank",
        )


def _resolve(section: EngineSection) -> Resolution:
    return EngineRegistry.resolve(
        model_type=section.model_type, backend=section.backend, device=section.device
    )


def _by_rank(rows: Sequence[tuple[int, T] | None]) -> list[T]:
    """Return the primary ranks' rows by data-parallel rank."""
    return [row for _, row in sorted((r for r in rows if r is not None), key=lambda pair: pair[0])]


def _to_cpu(values: torch.Tensor | None) -> torch.Tensor | None:
    return None if values is None else values.cpu()

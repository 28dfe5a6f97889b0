"""The actors, one process per rank of every engine and one per replica of the rollout."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.config import EngineConfig
from engine_api.devices import device_of
from engine_api.errors import RolloutError
from engine_api.losses import LossFn
from engine_api.results import CheckpointHandle, CheckpointInfo, TokenOutputs, Topology
from engine_api.rollout import (
    SamplingParams,
    SyncResult,
    WatchedSender,
    WeightExporter,
    WeightSender,
    WeightWire,
)
from engine_api.stores import reach_store, serve_store
from engine_trainer.config.sections import EngineSection
from engine_trainer.data import Prompt
from engine_trainer.placement.groups import Trained
from engine_trainer.placement.ray import channel
from engine_trainer.placement.ray.actor import Worker, address
from engine_trainer.placement.ray.agent_rollouts import AgentRollouts
from engine_trainer.placement.ray.calls import require_running
from engine_trainer.placement.ray.in_flight_rollouts import InFlightRollouts
from engine_trainer.placement.ray.partial_rollouts import PartialRollouts
from engine_trainer.placement.replica import Replica, RolloutSpec, Scored, ScoredCompletion
from engine_trainer.placement.spmd import Spmd, SpmdEngines, SpmdRollouts


class EngineWorker(Worker):
    """One rank of every engine.

    See ``spmd``: all ranks are called together, unless a method says differently.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.spmd = Spmd()
        self._engines: list[SpmdEngines] = []
        self._rollouts: SpmdRollouts | None = None
        # Saves that may still run, by engine.
        self._handles: dict[int, CheckpointHandle] = {}
        # The store of the process group, on the first rank.
        self._store: Any = None
        # For replicas in other processes; the sender is on the first rank.
        self._exporter: WeightExporter | None = None
        self._sender: WeightSender | None = None
        self._make_wire: Callable[[], WeightWire] | None = None

    def close(self) -> None:
        """Close rollout, engines and process group."""
        super().close()
        if self._rollouts is not None:
            self._rollouts.close()
        if self._exporter is not None:
            self._exporter.close()
        self.spmd.close()

    # --- the process group ----------------------------------------------------------------------

    def serve_store(self, size: int, timeout_s: float) -> tuple[str, int]:
        """Serve the store of the process group on the first rank, and return its address."""
        host = address()
        self._store = serve_store(host, size, timeout_s)
        return host, self._store.port

    def join(
        self, meet: tuple[str, int], rank: int, size: int, device: str, timeout_s: float
    ) -> None:
        """Make the default process group, with the variables that torchrun would set."""
        # A single rank needs no group here: the engine makes its own, as without a launcher.
        if size == 1:
            return
        host, port = meet
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }
        store = self._store or reach_store(host, port, size, timeout_s)
        kind = device_of(device)
        kind.adopt_local_rank()
        dist.init_process_group(
            kind.process_groups,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )

    # --- engines --------------------------------------------------------------------------------

    def resolve(
        self, section: EngineSection, other: EngineSection | None
    ) -> tuple[str, frozenset[Capability]]:
        """Resolve an engine on this worker alone (see ``Launcher.resolve``)."""
        return self.spmd.resolve(section, other)

    def list_options(self, section: EngineSection) -> frozenset[str]:
        """Return the names of an engine's options (see ``Launcher.list_options``)."""
        return self.spmd.list_options(section)

    def make_engine(self, section: EngineSection, config: EngineConfig, device: str) -> Topology:
        """Build one more engine.

        Later calls name it by its number, from 0.
        """
        self._engines.append(self.spmd.engines(section, config, device))
        return self._engines[-1].engine.topology

    def infer(
        self, number: int, batch: Batch, temperature: float, adapter: bool
    ) -> TokenOutputs | None:
        """Return this data-parallel rank's outputs, from its primary rank."""
        engines = self._engines[number]
        (outputs,) = engines.infer([batch], temperature=temperature, adapter=adapter)
        return outputs if engines.engine.topology.is_primary else None

    def infer_states(self, number: int, batch: Batch) -> torch.Tensor | None:
        """Return this data-parallel rank's hidden states, from its primary rank."""
        engines = self._engines[number]
        (states,) = engines.infer_states([batch])
        return states if engines.engine.topology.is_primary else None

    def learn_from(self, number: int, teacher: int | None) -> None:
        """Give one engine the current head of another, or drop it (see ``EngineGroup``)."""
        self._engines[number].learn_from(None if teacher is None else self._engines[teacher])

    def train(
        self, number: int, batch: Batch, loss: LossFn, denominator: float | None, temperature: float
    ) -> Trained:
        """See ``EngineGroup.train``."""
        return self._engines[number].train(
            [batch], loss, denominator=denominator, temperature=temperature
        )

    def move(self, number: int, away: bool) -> None:
        """Offload or reload an engine."""
        engines = self._engines[number]
        if away:
            engines.offload()
        else:
            engines.reload()

    def save(self, number: int, directory: Path, extra: Mapping[str, Any]) -> CheckpointInfo | None:
        """Start a save, and return its result if it is complete already."""
        handle = self._handles[number] = self._engines[number].save_checkpoint(
            directory, extra=extra
        )
        return handle.result() if handle.done() else None

    def saved(self, number: int, wait: bool) -> CheckpointInfo | None:
        """Return the result of the save that was started.

        It is None while the save runs.
        """
        handle = self._handles[number]
        return handle.result() if wait or handle.done() else None

    def load(self, number: int, directory: Path) -> CheckpointInfo:
        """See ``Engine.load_checkpoint``."""
        return self._engines[number].load_checkpoint(directory)

    def resolved(self, number: int) -> dict[str, Any]:
        """Return what the engine does of what was asked (see ``EngineGroup.resolved``)."""
        return dict(self._engines[number].resolved())

    def save_hf(self, number: int, directory: Path, dtype: torch.dtype) -> None:
        """See ``Engine.save_hf``."""
        self._engines[number].save_hf(directory, dtype=dtype)

    def keep_generators(self, number: int) -> None:
        """See ``EngineGroup.keep_generators``."""
        self._engines[number].keep_generators()

    def restore_generators(self, number: int) -> None:
        """See ``EngineGroup.restore_generators``."""
        self._engines[number].restore_generators()

    def close_engine(self, number: int) -> None:
        """See ``Engine.close``."""
        self._engines[number].close()

    # --- a replica in the same process ------------------------------------------------------------

    def make_rollout(self, spec: RolloutSpec) -> None:
        """Build a replica on each rank."""
        self._rollouts = self.spmd.rollouts(spec, self.timers)

    def sync(self) -> list[SyncResult]:
        """See ``RolloutGroup.sync``."""
        assert self._rollouts is not None
        return self._rollouts.sync()

    def wake_up(self, weights: bool) -> None:
        """See ``RolloutGroup.wake_up``."""
        assert self._rollouts is not None
        self._rollouts.wake_up(weights=weights)

    def sleep(self) -> None:
        """See ``RolloutGroup.sleep``."""
        assert self._rollouts is not None
        self._rollouts.sleep()

    def generate_and_score(
        self, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> list[Scored]:
        """Generate and score on this replica alone."""
        assert self._rollouts is not None
        return self._rollouts.replica.generate_and_score(prompts, sampling)

    def close_rollout(self) -> None:
        """See ``RolloutGroup.close``."""
        assert self._rollouts is not None
        self._rollouts.close()

    # --- replicas elsewhere -----------------------------------------------------------------------

    def why_whole(self, spec: RolloutSpec) -> str:
        """See ``channel.why_whole``."""
        return channel.why_whole(spec, self._engines[0].engine.capabilities)

    def make_wire(
        self, spec: RolloutSpec, receivers: int, timeout_s: float, whole: bool, elastic: bool
    ) -> None:
        """Build the exporter, and on the first rank the wire's end."""
        self._exporter = channel.exporter_for(spec, whole=whole)
        if self._engines[0].engine.topology.rank == 0:
            self._make_wire = partial(
                channel.make_wire, spec, timeout_s, whole=whole, elastic=elastic
            )
            self.serve_wire(receivers)

    def serve_wire(self, receivers: int) -> None:
        """Replace the wire's end, for other replicas or after a failed sync, on the first rank."""
        assert self._make_wire is not None
        if self._wire is not None:
            self._wire.close()
        self._wire = self._make_wire()
        self._sender = self._wire.serve(address(), receivers)

    def wire_address(self, version: int) -> str:
        """Return the address for the next ``send``, of weights of ``version``, on the first rank.

        Raises ``RolloutError`` for a different version.
        """
        assert self._sender is not None
        found = self._engines[0].engine.weight_version
        if found != version:
            raise RolloutError(
                f"the engine has weights of version {found}, not {version}",
                where="weight sync",
                remedy="sync between two steps, not within one",
            )
        return self._sender.address

    def send(self, receiving: Sequence[Any] = ()) -> int:
        """Export, send from the first rank, and return the bytes that each replica received.

        Args:
            receiving: references of the replicas' calls; the sync ends with an error where a
                replica's process ends in its call.
        """
        assert self._exporter is not None
        export = self._exporter.export(self._engines[0].engine)
        try:
            if self._sender is None:
                return 0
            if isinstance(self._sender, WatchedSender):
                return self._sender.send_watched(export, lambda: require_running(receiving))
            return self._sender.send(export)
        finally:
            # All ranks take part in the gathers to the end, the first one also after a failed sync.
            for _ in export:
                pass


class RolloutWorker(Worker):
    """One replica in a process of its own."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._replica: Replica | None = None
        self._under_way: InFlightRollouts | PartialRollouts | AgentRollouts | None = None

    def close(self) -> None:
        """Close the replica and the channel."""
        super().close()
        self.close_rollout()

    @property
    def replica(self) -> Replica:
        """The replica, from ``make_rollout`` on."""
        assert self._replica is not None
        return self._replica

    def make_rollout(
        self, spec: RolloutSpec, timeout_s: float, whole: bool, elastic: bool
    ) -> str | None:
        """Build the replica and the wire's end (see ``Replica.create``).

        Returns why the rollout takes no weights while it generates, None if it does.
        """
        self._replica = Replica.create(spec, self.timers)
        self._wire = channel.make_wire(spec, timeout_s, whole=whole, elastic=elastic)
        return self._replica.why_sliced

    def receive(self, address: str, rank: int, version: int) -> SyncResult:
        """Install the weights that the engine sends to replica ``rank``."""
        assert self._wire is not None
        try:
            with self._wire.receive(address, rank) as export:
                return self.replica.rollout.update_weights(export, version)
        except BaseException:
            # After any error, because the controller may repeat the sync with other replicas.
            if isinstance(self._under_way, InFlightRollouts):
                self._under_way.note_failed_sync()
            raise

    def wake_up(self, weights: bool) -> None:
        """See ``RolloutGroup.wake_up``."""
        self.replica.rollout.wake_up(weights=weights, kv_cache=not weights)

    def sleep(self) -> None:
        """See ``RolloutGroup.sleep``."""
        self.replica.rollout.sleep()

    def generate_and_score(
        self, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> list[Scored]:
        """See ``Replica.generate_and_score``."""
        return self.replica.generate_and_score(prompts, sampling)

    def continuing(self, sampling: SamplingParams, slice_tokens: int) -> None:
        """Prepare for ``advance``."""
        agent = self.replica.agent
        if self.replica.why_sliced is None:
            self._under_way = InFlightRollouts(self.replica, sampling)
        elif agent:
            self._under_way = AgentRollouts(self.replica, agent, sampling, slice_tokens)
        else:
            self._under_way = PartialRollouts(self.replica, sampling, slice_tokens)

    def advance(
        self, new: Sequence[tuple[int, Prompt]], seed: int
    ) -> tuple[list[tuple[int, list[ScoredCompletion]]], int]:
        """Return complete groups, and the number of tokens that the rollout has generated.

        The number is 0 where calls generate slices, each of which ends soon. See
        ``InFlightRollouts.advance`` and ``PartialRollouts.advance``.
        """
        assert self._under_way is not None
        done = self._under_way.advance(new, seed)
        if isinstance(self._under_way, InFlightRollouts):
            return done, self._under_way.tokens_generated
        return done, 0

    def close_rollout(self) -> None:
        """See ``RolloutGroup.close``."""
        if self._under_way is not None:
            self._under_way.close()
        if self._replica is not None:
            self._replica.close()

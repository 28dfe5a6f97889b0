"""What the loops drive: an engine on all of its ranks, and a rollout on all of its replicas, wherever these run.

Work is divided into *dp shards*: a packed batch for each data-parallel rank, a list of prompts for each replica. A process
*holds* some of them: its own where every rank runs the loop (one process, torchrun; ``engine_trainer.placement.spmd``), all of them where
a single controller does (Ray; ``engine_trainer.placement.ray``). What is computed from a shard is the same code in both places, so
that the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.comm import Comm, together
from engine_api.config import EngineConfig, Parallelism
from engine_api.losses import LossFn
from engine_api.microbatch import balance
from engine_api.results import CheckpointHandle, CheckpointInfo, TokenOutputs, TrainOutput
from engine_api.rollout import SamplingParams, SyncResult
from engine_trainer.config.sections import EngineSection
from engine_trainer.data import Prompt
from engine_trainer.placement.replica import RolloutSpec, ScoredCompletion
from engine_trainer.telemetry.logs import Timers

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The result of one update.

    Attributes:
        output: the same on all ranks.
        observed: what the loss noted beside its sums (its attribute ``observed``), one a rank of the engine; empty where
            the loss has none.
    """

    output: TrainOutput
    observed: list[Any] = field(default_factory=list[Any])


class EngineGroup(Protocol):
    """One engine on all of its ranks; in each method what ``engine_api.contract.Engine`` says of its member.

    Attributes:
        dp_size: data-parallel ranks.
        local_dp_ranks: the data-parallel ranks whose dp shards this process gives and receives, in order.
    """

    dp_size: int
    local_dp_ranks: Sequence[int]

    @property
    def weight_version(self) -> int:
        """Optimizer steps applied."""
        ...

    def infer(
        self, shards: Sequence[Batch], *, temperature: float = 1.0, adapter: bool = True
    ) -> list[TokenOutputs]:
        """Per-token results of each shard that is held, on the CPU."""
        ...

    def train(
        self,
        shards: Sequence[Batch],
        loss: LossFn,
        *,
        denominator: float | None = None,
        temperature: float = 1.0,
    ) -> Trained:
        """One update from the shards of all data-parallel ranks."""
        ...

    def gather(self, rows: Sequence[T]) -> list[T]:
        """One row for each shard that is held → every data-parallel rank's, by rank."""
        ...

    def offload(self) -> None:
        """Weights and optimizer leave the device; nothing but ``save_checkpoint`` and ``reload`` may follow."""
        ...

    def reload(self) -> None:
        """They come back."""
        ...

    def save_checkpoint(self, directory: Path, *, extra: Mapping[str, Any]) -> CheckpointHandle:
        """See ``Engine.save_checkpoint``."""
        ...

    def load_checkpoint(self, directory: Path) -> CheckpointInfo:
        """See ``Engine.load_checkpoint``."""
        ...

    def save_hf(self, directory: Path) -> None:
        """See ``Engine.save_hf``."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class RolloutGroup(Protocol):
    """One rollout on all of its replicas, which serve the policy's weights.

    Attributes:
        size: replicas.
        local_replicas: the replicas whose prompts this process gives, in order.
    """

    size: int
    local_replicas: Sequence[int]

    def sync(self) -> list[SyncResult]:
        """Bring the policy's weights of now to every replica; one result each, by replica."""
        ...

    def wake_up(self, *, weights: bool) -> None:
        """The weights' memory, or the caches'; changes nothing where a replica is awake."""
        ...

    def sleep(self) -> None:
        """Both are given back."""
        ...

    def generate_and_score(
        self, prompts: Sequence[Sequence[Prompt]], sampling: SamplingParams
    ) -> list[list[list[ScoredCompletion]]]:
        """Judged answers of every replica, by replica: ``sampling.n`` for each of its prompts."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Launcher(Protocol):
    """Where engines and rollouts run.

    Attributes:
        comm: agreement between the processes that run the loop.
    """

    comm: Comm

    def resolve(
        self, section: EngineSection, beside: EngineSection | None = None
    ) -> tuple[str, frozenset[Capability]]:
        """The device type that the engine takes where it will run, and what its plug-in declares.

        Raises ``PluginError``; ``ConfigError`` for sizes that cannot be in one process with the engine ``beside`` it.
        """
        ...

    def engines(self, section: EngineSection, config: EngineConfig, device: str) -> EngineGroup:
        """A new engine, initialized; the first one is the policy."""
        ...

    def rollouts(self, spec: RolloutSpec, timers: Timers) -> RolloutGroup:
        """Replicas that serve the policy; phases ``generate`` and ``reward`` go to ``timers``."""
        ...

    def figures(self) -> dict[str, float]:
        """Since the last call: how long each worker worked and waited; nothing where the loop's own clocks say it."""
        ...

    def profile(self, folder: Path | None) -> None:
        """Record a trace in every process from now on; None: write what was recorded to that folder."""
        ...

    def close(self) -> None:
        """Give everything back, after an error too; idempotent."""
        ...


def agreed(comm: Comm, work: Callable[[], T]) -> T:
    """What ``work`` gives in this process; when it raises in one, it raises in all (see ``together``).

    For what only one data-parallel rank may see, before the next collective call: the result does not travel.
    """
    made: list[T] = []
    together(comm, lambda: made.append(work()))
    return made[0]


def model_sizes(parallelism: Parallelism) -> dict[str, int]:
    """Ranks that share a data-parallel rank's work or weights, by kind; what they leave of the world is ``dp_shard``."""
    return {
        name: getattr(parallelism, name) for name in ("tp", "pp", "cp", "ulysses", "dp_replicate")
    }


def said(sizes: Mapping[str, int]) -> str:
    """For errors: those that are not 1."""
    return (
        " x ".join(f"{name} {size}" for name, size in sizes.items() if size != 1)
        or "data-parallel ranks alone"
    )


def divide(lengths: Sequence[int], group: EngineGroup) -> list[list[int]]:
    """Which documents each held shard has: balanced by tokens over all data-parallel ranks, in their given order."""
    bins = balance(lengths, group.dp_size)
    return [bins[rank] for rank in group.local_dp_ranks]

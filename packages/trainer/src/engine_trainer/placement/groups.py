"""The groups that the loops drive, an engine on all its ranks and a rollout on all its replicas.

Work is divided into *dp shards*, a packed batch for each data-parallel rank, and into a list of
prompts for each replica. Some of them are *local* to a process: its own where every rank runs the
loop (one process, torchrun; ``engine_trainer.placement.spmd``), all of them where a single
controller does (Ray; ``engine_trainer.placement.ray``). A dp shard is computed by the same code in
both cases, so that the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.comm import Comm, together
from engine_api.config import EngineConfig, Parallelism
from engine_api.losses import LossFn
from engine_api.microbatch import balance
from engine_api.results import CheckpointHandle, CheckpointInfo, TokenOutputs, TrainOutput
from engine_api.rollout import SamplingParams, SyncResult
from engine_trainer.config.sections import EngineSection, RolloutSection
from engine_trainer.data import Prompt
from engine_trainer.placement.replica import RolloutSpec, Scored
from engine_trainer.telemetry.logs import Timers

if TYPE_CHECKING:
    import torch

    from engine_trainer.placement.memory import FreeMemory

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The result of one update.

    Attributes:
        output: the same on all ranks.
        observed: the loss's attribute ``observed``, one for each rank of the engine; empty where
            the loss has none.
    """

    output: TrainOutput
    observed: list[Any] = field(default_factory=list[Any])


class EngineGroup(Protocol):
    """One engine on all of its ranks.

    Each method does what ``engine_api.contract.Engine`` says of its member.

    Attributes:
        dp_size: number of data-parallel ranks.
        local_dp_ranks: the data-parallel ranks whose dp shards this process gives and receives, in
            order.
    """

    dp_size: int
    local_dp_ranks: Sequence[int]

    @property
    def weight_version(self) -> int:
        """The number of optimizer steps applied."""
        ...

    def resolved(self) -> Mapping[str, Any]:
        """Return what the engine does of what was asked (see ``Engine.resolved``).

        It is empty for an engine of a contract before 1.3, which cannot tell.
        """
        ...

    def infer(
        self, shards: Sequence[Batch], *, temperature: float = 1.0, adapter: bool = True
    ) -> list[TokenOutputs]:
        """Return per-token results of each local dp shard, on the CPU."""
        ...

    def infer_states(self, shards: Sequence[Batch]) -> list[torch.Tensor]:
        """Return the hidden states ``[T, d]`` of each local dp shard, on the CPU."""
        ...

    def learn_from(self, teacher: EngineGroup | None) -> None:
        """Give the engine the current output head of a teacher on the same ranks, or drop it.

        The teacher may be this engine itself. Later steps do not change the head that was given.
        """
        ...

    def train(
        self,
        shards: Sequence[Batch],
        loss: LossFn,
        *,
        denominator: float | None = None,
        temperature: float = 1.0,
    ) -> Trained:
        """Apply one update from the dp shards of all data-parallel ranks."""
        ...

    def gather(self, rows: Sequence[T]) -> list[T]:
        """Return the rows of all data-parallel ranks, by rank, from one row per local shard."""
        ...

    def offload(self) -> None:
        """Move weights and optimizer off the device.

        Only ``save_checkpoint`` and ``reload`` may follow.
        """
        ...

    def reload(self) -> None:
        """Move weights and optimizer back to the device."""
        ...

    def save_checkpoint(self, directory: Path, *, extra: Mapping[str, Any]) -> CheckpointHandle:
        """See ``Engine.save_checkpoint``."""
        ...

    def load_checkpoint(self, directory: Path) -> CheckpointInfo:
        """See ``Engine.load_checkpoint``."""
        ...

    def save_hf(self, directory: Path, *, dtype: torch.dtype) -> None:
        """See ``Engine.save_hf``."""
        ...

    def keep_generators(self) -> None:
        """Keep the states that the generators of the engine's processes have now."""
        ...

    def restore_generators(self) -> None:
        """Restore the states that ``keep_generators`` kept last."""
        ...

    def close(self) -> None:
        """Close the engine (idempotent)."""
        ...


class RolloutGroup(Protocol):
    """One rollout on all of its replicas, which serve the policy's weights.

    Attributes:
        size: number of replicas.
        local_replicas: the replicas whose prompts this process gives, in order.
    """

    size: int
    local_replicas: Sequence[int]

    def sync(self) -> list[SyncResult]:
        """Bring the policy's current weights to every replica, and return a result for each."""
        ...

    def admit(self, *, if_none_serves: bool = False) -> None:
        """Bring the weights to replicas that have started since the last sync, where some may.

        Called by the process and thread that drives the engines, while they do nothing else.

        Args:
            if_none_serves: brings the weights only where no replica serves. The completions of a
                step then keep one version as long as any replica is left.
        """
        ...

    def wake_up(self, *, weights: bool) -> None:
        """Allocate the memory of the weights, or that of the caches.

        Changes nothing where a replica is awake.
        """
        ...

    def sleep(self) -> None:
        """Free the memory of weights and caches."""
        ...

    def generate_and_score(
        self, prompts: Sequence[Sequence[Prompt]], sampling: SamplingParams
    ) -> list[list[Scored]]:
        """Generate ``sampling.n`` completions per prompt and score them.

        The result has one list per replica, with None for a prompt that is left out for an image.
        """
        ...

    def close(self) -> None:
        """Close the replicas (idempotent)."""
        ...


class Launcher(Protocol):
    """A place where engines and rollouts run.

    Attributes:
        comm: agreement between the processes that run the loop.
    """

    comm: Comm

    def resolve(
        self, section: EngineSection, other: EngineSection | None = None
    ) -> tuple[str, frozenset[Capability]]:
        """Return the device type that the engine takes, and what it declares with its options.

        Both are found where the engine will run.

        Raises ``PluginError``; ``ConfigError`` for sizes that cannot be in one process with those
        of the engine ``other``.
        """
        ...

    def list_options(self, section: EngineSection) -> frozenset[str]:
        """Return the names of the options that the engine has, where it will run.

        Raises ``PluginError``.
        """
        ...

    def free_memory(self, device: str) -> list[FreeMemory]:
        """Return the free memory of each rank of the engines, before any is built."""
        ...

    def probe_rollout(self, section: RolloutSection, device: str) -> list[str]:
        """Return why each process of the replicas cannot use a rollout, "" where it can.

        It is asked where the replicas will run, before any is built (``replica.why_unusable``).
        """
        ...

    def engines(self, section: EngineSection, config: EngineConfig, device: str) -> EngineGroup:
        """Build and initialize an engine.

        The first one is the policy.
        """
        ...

    def rollouts(self, spec: RolloutSpec, timers: Timers) -> RolloutGroup:
        """Build replicas that serve the policy.

        Phases ``generate`` and ``reward`` go to ``timers``.
        """
        ...

    def why_unusable(self, error: BaseException) -> str | None:
        """Return why engines cannot be called after an error of the loop, or None if they can be.

        Ranks that do not all raise, or that are gone, cannot take part in a save.
        """
        ...

    def figures(self) -> dict[str, float]:
        """Return for each worker the time it worked and waited since the last call.

        It is empty where the loop's own timers have these figures.
        """
        ...

    def profile(self, folder: Path | None) -> None:
        """Start a trace in every process, to be written to ``folder``.

        None: write what was recorded.
        """
        ...

    def close(self) -> None:
        """Close all engines and rollouts, after an error too (idempotent)."""
        ...


def run_together(comm: Comm, work: Callable[[], T]) -> T:
    """Return the result of ``work`` in this process.

    An error in one process raises in all.

    See ``together``. For work that only one data-parallel rank may see fail, before the next
    collective call: the result does not travel.
    """
    made: list[T] = []
    together(comm, lambda: made.append(work()))
    return made[0]


def model_sizes(parallelism: Parallelism) -> dict[str, int]:
    """Return the sizes of all kinds of parallelism but ``dp_shard``.

    Ranks of these kinds share a data-parallel rank's work or weights; the rest of the world is
    ``dp_shard``.
    """
    return {
        name: getattr(parallelism, name) for name in ("tp", "pp", "cp", "ulysses", "dp_replicate")
    }


def format_sizes(sizes: Mapping[str, int]) -> str:
    """Return the sizes that are not 1 as text for an error."""
    return (
        " x ".join(f"{name} {size}" for name, size in sizes.items() if size != 1)
        or "data-parallel ranks alone"
    )


def divide(lengths: Sequence[int], group: EngineGroup) -> list[list[int]]:
    """Return the indices of each local dp shard's documents.

    They are balanced by tokens over all data-parallel ranks, and keep their given order.
    """
    bins = balance(lengths, group.dp_size)
    return [bins[rank] for rank in group.local_dp_ranks]


def by_replica(prompts: Sequence[Prompt], size: int) -> list[list[int]]:
    """Assign ``prompts`` to ``size`` replicas in turn, equal prompts to the same replica.

    Prompts with different images are not equal. The result has the indices of each replica's
    prompts. A rollout distinguishes equal prompts by their order. Two replicas, which have the same
    seed, would give them equal completions.
    """
    turns: dict[tuple[int | str, ...], int] = {}
    indices: list[list[int]] = [[] for _ in range(size)]
    for i, prompt in enumerate(prompts):
        turn = turns.setdefault(prompt.key, len(turns))
        indices[turn % size].append(i)
    return indices

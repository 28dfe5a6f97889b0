"""The critic of PPO: a value model that learns what a completion will still earn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from engine_api.batch import Batch
from engine_api.results import TrainOutput
from engine_trainer.algorithms.value_loss import ValueLoss, explained_variance
from engine_trainer.config import RLConfig
from engine_trainer.config.engine_keys import named_below
from engine_trainer.placement.groups import Launcher
from engine_trainer.rl.companion import check_companion
from engine_trainer.rl.partition import Partition
from engine_trainer.run.run import Run

KEY = "algorithm.critic"

Update = tuple[Sequence[Batch], float]
"""The dp shards of one update, and the number of their tokens that count."""


class Critic:
    """A second engine, next to the policy's, with dp shards of its own topology.

    ``run`` saves and loads it. Every method is called on all processes of the loop together.

    Attributes:
        apart: True if it divides documents over other data-parallel ranks than the policy.
        shares_prefixes: True if it computes a group's prompt once.
    """

    def __init__(self, run: Run, config: RLConfig) -> None:
        section = config.algorithm.critic
        assert section is not None
        self.section = section
        self.loss = ValueLoss(clip=section.value_clip)
        engine = section.engine(config.engine)
        steps = run.total_steps * config.algorithm.mini_batches * section.epochs
        self.shares_prefixes = engine.memory.share_prefixes
        with named_below(KEY):
            built = engine.build(seed=config.run.seed, total_steps=steps)
            device, _ = run.launcher.resolve(engine)
            self.engines = run.launcher.engines(engine, built, device)
        run.companions["critic"] = self.engines
        own = (self.engines.dp_size, list(self.engines.local_dp_ranks))
        policy = (run.policy.dp_size, list(run.policy.local_dp_ranks))
        self.apart = not all(run.comm.all_gather(own == policy))

    def values(self, shards: Sequence[Batch]) -> list[torch.Tensor]:
        """Return V of the state before each token, ``[T]`` float32 for each local dp shard."""
        bare = [shard.keep_fields() for shard in shards]
        return [
            torch.zeros(0, dtype=torch.float32) if o.values is None else o.values
            for o in self.engines.infer(bare)
        ]

    def update(self, updates: Iterable[Update]) -> dict[str, float]:
        """Apply the updates of one step and return ``critic/…``, the same on all ranks.

        Args:
            updates: dp shards with ``mask``, ``values`` (before the first update) and ``returns``.
        """
        outputs = [
            self.engines.train([_batch(s) for s in shards], self.loss, denominator=tokens).output
            for shards, tokens in updates
            if tokens
        ]
        return _figures(outputs)

    def close(self) -> None:
        """Close the critic's engine."""
        self.engines.close()


def _batch(shard: Batch) -> Batch:
    extra = {
        "returns": shard["returns"],
        "old_values": shard["values"],
        "loss_weight": shard["mask"],
    }
    return shard.keep_fields().with_fields(**extra)


@dataclass(frozen=True, kw_only=True)
class CriticShards:
    """A step's completions in the critic's partition.

    ``shards`` have the field ``values``, taken before the critic's first update.
    """

    partition: Partition
    shards: list[Batch]

    def values(self, partition: Partition) -> list[torch.Tensor]:
        """Return the values in another partition, ``[T]`` float32 for each of its dp shards.

        Called on all processes of the loop together.
        """
        return self.partition.move([shard["values"] for shard in self.shards], partition)


def check_critic(config: RLConfig, launcher: Launcher, ranks: int) -> None:
    """Refuse a critic that cannot be on the policy's ``ranks``, before anything is loaded.

    Raises ``ConfigError``, ``UnsupportedCapability``, ``PluginError``.
    """
    if config.algorithm.critic is None:
        return
    check_companion(config.algorithm.critic.engine(config.engine), config, launcher, ranks, KEY)


def _figures(outputs: Sequence[TrainOutput]) -> dict[str, float]:
    applied = [o for o in outputs if o.skipped is None]
    figures = {
        "critic/updates": float(len(applied)),
        "critic/skipped": float(len(outputs) - len(applied)),
    }
    if not outputs:
        return figures
    sums = {name: math.fsum(o.metrics[name] for o in outputs) for name in outputs[0].metrics}
    tokens = max(sums["tokens"], 1.0)
    figures |= {
        f"critic/{name}": sums[name] / tokens
        for name in ("value", "return", "clipped")
        if name in sums
    }
    return figures | {
        "critic/loss": math.fsum(o.loss for o in outputs) / len(outputs),
        "critic/grad_norm": math.fsum(o.grad_norm for o in outputs) / len(outputs),
        "critic/lr": outputs[-1].lr,
        "critic/explained_variance": explained_variance(sums),
    }

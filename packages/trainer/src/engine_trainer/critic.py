"""The critic of PPO: a value model that learns what a completion will still earn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from engine_api.batch import Batch
from engine_api.errors import ConfigError
from engine_api.results import TrainOutput
from engine_trainer.algorithms.value_loss import ValueLoss, explained_variance
from engine_trainer.config import RLConfig
from engine_trainer.groups import EngineGroup
from engine_trainer.runtime import Run

Update = tuple[Sequence[Batch], float]  # the shares of one update, and the number of their tokens that count


class Critic:
    """A second engine beside the policy's, with shares as the policy has them. ``run`` saves and loads it.

    Every method is called on all processes of the loop together.
    """

    def __init__(self, run: Run, config: RLConfig) -> None:
        section = config.algorithm.critic
        assert section is not None
        self.section = section
        self.loss = ValueLoss(clip=section.value_clip)
        engine = section.engine(config.engine)
        steps = run.total_steps * config.algorithm.mini_batches * section.epochs
        try:
            built = engine.build(seed=config.run.seed, total_steps=steps)
        except ConfigError as error:
            field = error.field.replace("engine.", "algorithm.critic.", 1)
            raise ConfigError(field, error.what, why=error.why, remedy=error.remedy) from error
        device, _ = run.launcher.resolve(engine)
        self.engines = run.launcher.engines(engine, built, device)
        run.beside["critic"] = self.engines
        _check_shares(self.engines, run.policy)

    def values(self, shares: Sequence[Batch]) -> list[torch.Tensor]:
        """``[T]`` float32 of each share that is held: V of the state before each token."""
        bare = [Batch(input_ids=s.input_ids, cu_seqlens=s.cu_seqlens) for s in shares]
        return [torch.zeros(0) if o.values is None else o.values for o in self.engines.infer(bare)]

    def learn(self, updates: Iterable[Update]) -> dict[str, float]:
        """The updates of one step; ``critic/…``, the same on all ranks.

        Args:
            updates: shares with ``mask``, ``values`` (before the first update) and ``returns``.
        """
        outputs = [self.engines.train([_batch(s) for s in shares], self.loss, denominator=tokens).output
                   for shares, tokens in updates if tokens]  # fmt: skip
        return _figures(outputs)

    def close(self) -> None:
        """Close its engine."""
        self.engines.close()


def _batch(share: Batch) -> Batch:
    extra = {"returns": share["returns"], "old_values": share["values"], "loss_weight": share["mask"]}
    return Batch(input_ids=share.input_ids, cu_seqlens=share.cu_seqlens, fields=extra)


def _check_shares(critic: EngineGroup, policy: EngineGroup) -> None:
    """Raise ``ConfigError`` unless both engines divide documents over the same data-parallel ranks."""
    if (critic.dp_size, list(critic.held)) != (policy.dp_size, list(policy.held)):
        raise ConfigError("algorithm.critic.parallelism", f"{critic.dp_size} data-parallel ranks, the policy has {policy.dp_size}",
                          why="both are given the same shares of a step's completions",
                          remedy="give both engines the same product of tp, pp, cp and ulysses, or leave it null")  # fmt: skip


def _figures(outputs: Sequence[TrainOutput]) -> dict[str, float]:
    applied = [o for o in outputs if o.skipped is None]
    figures = {"critic/updates": float(len(applied)), "critic/skipped": float(len(outputs) - len(applied))}
    if not outputs:
        return figures
    sums = {name: math.fsum(o.metrics[name] for o in outputs) for name in outputs[0].metrics}
    tokens = max(sums["tokens"], 1.0)
    figures |= {f"critic/{name}": sums[name] / tokens for name in ("value", "return", "clipped") if name in sums}
    return figures | {
        "critic/loss": math.fsum(o.loss for o in outputs) / len(outputs),
        "critic/grad_norm": math.fsum(o.grad_norm for o in outputs) / len(outputs),
        "critic/lr": outputs[-1].lr,
        "critic/explained_variance": explained_variance(sums),
    }

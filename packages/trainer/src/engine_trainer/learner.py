"""From groups and rewards to updates of the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine_api.batch import Batch
from engine_api.losses import token_weights
from engine_api.results import TrainOutput
from engine_trainer.algorithms.advantages import group_advantages
from engine_trainer.algorithms.correction import correct, correction_figures, ratios
from engine_trainer.algorithms.losses import PolicyLoss, denominator, kl_divergence
from engine_trainer.config import AlgorithmSection, RLConfig
from engine_trainer.experience import shaped_rewards
from engine_trainer.mismatch import MismatchWatch, largest_of, mismatch_figures, mismatch_sums
from engine_trainer.reference import Reference, log_probs_of
from engine_trainer.runtime import Run, share_of
from engine_trainer.sampler import Answer, Group


@dataclass(frozen=True, kw_only=True)
class _Document:
    """A prompt with one answer. ``group`` and ``place`` say which: the advantage is ``advantages[group, place]``."""

    group: int
    place: int
    tokens: list[int]
    mask: list[float]  # 1 where a token counts
    rollout_log_probs: list[float]

    @property
    def counted(self) -> int:
        return int(sum(self.mask))

    def fields(self) -> Mapping[str, Any]:
        return {"input_ids": self.tokens, "mask": self.mask, "rollout_log_probs": self.rollout_log_probs}


@dataclass(frozen=True, kw_only=True)
class _MiniBatch:
    """The documents of one update: ``denominator`` is of all of them, ``mine`` are those that this rank trains on."""

    denominator: float
    trained: int  # over all ranks
    mine: list[_Document]


class Learner:
    """GRPO and its relatives: advantages, log-probs, then ``epochs`` × ``mini_batches`` updates.

    Every method is called on all ranks together.
    """

    def __init__(self, run: Run, config: RLConfig) -> None:
        self.engine, self.comm, self.timers = run.engine, run.comm, run.timers
        self.config, algorithm = config, config.algorithm
        self.temperature = config.rollout.temperature
        self.loss = policy_loss(algorithm)
        self.reference = Reference(run) if algorithm.kl.coefficient else None

    def learn(self, groups: Sequence[Group]) -> dict[str, float]:
        """Update the engine; the step's figures, the same on all ranks. No groups: nothing is changed."""
        if not groups:
            return {"train/updates": 0.0}
        rewards = shaped_rewards(groups, self.config)
        advantages = group_advantages(rewards, self.config.algorithm.advantage)
        mini_batches = self._divide(groups, advantages)
        with self.timers.phase("log_probs"):
            mine = [d for m in mini_batches for d in m.mine]
            batch = self._with_log_probs(Batch.pack([d.fields() for d in mine]) if mine else _empty())
        if self._kl_in_reward:
            advantages = group_advantages(rewards - self._penalties(batch, mine, rewards.shape),
                                          self.config.algorithm.advantage)  # fmt: skip
        batch, figures = self._corrected(self._with_weights(batch, mine, advantages))
        with self.timers.phase("train"):
            return figures | self._update(mini_batches, batch)

    def close(self) -> None:
        """Close the reference's engine."""
        if self.reference is not None:
            self.reference.close()

    # --- before the updates ---------------------------------------------------------------------

    @property
    def _engine_knows(self) -> bool:
        """Whether the engine's log-probs are computed before the first update, because something reads them."""
        algorithm = self.config.algorithm
        read = not self.loss.on_policy or self._kl_in_reward or algorithm.correction.enabled
        return read and algorithm.old_log_probs == "engine"

    @property
    def _kl_in_reward(self) -> bool:
        return self.reference is not None and self.config.algorithm.kl.where == "reward"

    def _divide(self, groups: Sequence[Group], advantages: torch.Tensor) -> list[_MiniBatch]:
        """Whole groups to mini-batches, and of each mini-batch a part of about equal tokens to each rank."""
        # Without an advantage there is no gradient where nothing else is in the loss. Such documents count in
        # the denominator, and are not computed.
        skip = self.loss.only_advantages and not self._kl_in_reward
        documents = [_document(g, i, group, answer, self.config.algorithm.overlong.filter)
                     for g, group in enumerate(groups) for i, answer in enumerate(group.answers)]  # fmt: skip
        count = min(self.config.algorithm.mini_batches, len(groups))
        mini_batches: list[_MiniBatch] = []
        for k in range(count):
            chosen = [d for d in documents if d.group * count // len(groups) == k]
            live = [d for d in chosen if d.counted and not (skip and advantages[d.group, d.place] == 0)]
            mine = share_of([len(d.tokens) for d in live], self.engine.topology)
            whole = denominator(self.config.algorithm.aggregation, [d.counted for d in chosen])
            mini_batches.append(_MiniBatch(denominator=whole, trained=len(live), mine=[live[i] for i in mine]))
        return mini_batches

    def _with_log_probs(self, batch: Batch) -> Batch:
        """``old_log_probs`` and ``ref_log_probs``, where something reads them."""
        extra: dict[str, torch.Tensor] = {}
        if self.config.algorithm.old_log_probs == "rollout":
            extra["old_log_probs"] = batch["rollout_log_probs"]
        elif self._engine_knows:
            extra["old_log_probs"] = log_probs_of(self.engine.infer_batch(batch, temperature=self.temperature))
        if self.reference is not None:
            extra["ref_log_probs"] = self.reference.log_probs(batch, self.temperature)
        return batch.with_fields(**extra)

    def _penalties(self, batch: Batch, mine: Sequence[_Document], shape: Sequence[int]) -> torch.Tensor:
        """``[P, n]`` float64: coefficient · Σ KL over each answer's tokens, gathered from all ranks."""
        kl = kl_divergence(batch["old_log_probs"], batch["ref_log_probs"], self.config.algorithm.kl.estimator)
        sums = [float((kl[a:b] * batch["mask"][a:b]).double().sum()) for a, b in _spans(batch)]
        own = {(d.group, d.place): value for d, value in zip(mine, sums, strict=True)}
        penalties = torch.zeros(*shape, dtype=torch.float64)
        for row in self.comm.all_gather(own):
            for (group, place), value in row.items():
                penalties[group, place] = self.config.algorithm.kl.coefficient * value
        return penalties

    def _with_weights(self, batch: Batch, mine: Sequence[_Document], advantages: torch.Tensor) -> Batch:
        values = torch.tensor([float(advantages[d.group, d.place]) for d in mine])
        spread = torch.repeat_interleave(values, torch.tensor(batch.lengths, dtype=torch.int64))
        weight = token_weights(batch["mask"], batch.cu_seqlens, self.config.algorithm.aggregation)
        return batch.with_fields(loss_weight=weight, advantages=spread * batch["mask"])

    def _corrected(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with the rollout corrected, and ``mismatch/…`` and ``correction/…``; where the engine's log-probs are known.

        The denominator stays that of all counted tokens: a rejected token is a zero in the mean, not left out of it.
        """
        if not self._engine_knows:
            return batch, {}
        section = self.config.algorithm.correction
        engine, rollout = batch["old_log_probs"], batch["rollout_log_probs"]
        given = ratios(engine, rollout, batch["mask"], batch.cu_seqlens)
        sums = mismatch_sums(given, engine, rollout)
        if section.enabled:
            result = correct(given, section)
            sums |= result.sums
            batch = batch.with_fields(correction=result.weights, loss_weight=batch.loss_weight * result.kept)
        totals = self._totals(sums)
        largest = self.comm.all_gather(largest_of(given))
        return batch, mismatch_figures(totals, largest) | correction_figures(totals, section)

    def _totals(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Over all data-parallel ranks; a model-parallel group counts once."""
        mine = {name: float(value) for name, value in sums.items()} if self.engine.topology.is_primary else {}
        rows = self.comm.all_gather(mine)
        return {name: math.fsum(row.get(name, 0.0) for row in rows) for name in sums}

    # --- the updates ----------------------------------------------------------------------------

    def _update(self, mini_batches: Sequence[_MiniBatch], batch: Batch) -> dict[str, float]:
        outputs: list[TrainOutput] = []
        watch = MismatchWatch(self.loss)
        first = self.loss if self._engine_knows else watch
        for _ in range(self.config.algorithm.epochs):
            start = 0
            for mini in mini_batches:
                part = batch.select(range(start, start + len(mini.mine)))
                start += len(mini.mine)
                if mini.trained:  # else no token has a gradient, on any rank
                    # Only before the first update are the weights those of the rollout.
                    loss = self.loss if outputs else first
                    outputs.append(self.engine.train_batch(part, loss, denominator=mini.denominator,
                                                           temperature=self.temperature))  # fmt: skip
        seen = outputs[0].metrics if outputs else {}
        return _figures(outputs) | mismatch_figures(seen, self.comm.all_gather(watch.largest))


def policy_loss(algorithm: AlgorithmSection) -> PolicyLoss:
    """The loss that the configuration describes. Raises ``ConfigError``."""
    one_update = algorithm.mini_batches == algorithm.epochs == 1
    return PolicyLoss(
        clip_low=algorithm.clip_low, clip_high=algorithm.clip_high, dual_clip=algorithm.dual_clip,
        kl_coef=algorithm.kl.coefficient if algorithm.kl.where == "loss" else 0.0, kl_estimator=algorithm.kl.estimator,
        entropy_coef=algorithm.entropy_coefficient, entropy=True,
        on_policy=one_update and algorithm.old_log_probs == "engine", corrected=algorithm.correction.enabled,
    )  # fmt: skip


def _document(row: int, place: int, group: Group, answer: Answer, drop_cut: bool) -> _Document:
    before = [0.0] * len(group.prompt.tokens)
    # DAPO's overlong filter: the end of an answer that was cut has not been judged, so that none of it counts.
    counts = 0.0 if drop_cut and not answer.finished else 1.0
    return _Document(group=row, place=place, tokens=[*group.prompt.tokens, *answer.tokens],
                     mask=before + [counts] * len(answer.tokens), rollout_log_probs=before + answer.log_probs)  # fmt: skip


def _empty() -> Batch:
    nothing = torch.zeros(0)
    return Batch.pack([]).with_fields(mask=nothing, rollout_log_probs=nothing)


def _spans(batch: Batch) -> list[tuple[int, int]]:
    return list(zip(batch.boundaries, batch.boundaries[1:], strict=False))


def _figures(outputs: Sequence[TrainOutput]) -> dict[str, float]:
    applied = [o for o in outputs if o.skipped is None]
    figures = {"train/updates": float(len(applied)), "train/skipped": float(len(outputs) - len(applied))}
    if not outputs:
        return figures
    sums: dict[str, float] = {}
    for output in outputs:
        for name, value in output.metrics.items():
            sums[name] = sums.get(name, 0.0) + value
    tokens = max(sums.pop("tokens", 0.0), 1.0)
    per_token = {
        f"train/{n}": v / tokens for n, v in sums.items() if not n.startswith(("mismatch", "weight", "policy_loss"))
    }
    return (
        figures
        | per_token
        | {
            "train/loss": math.fsum(o.loss for o in outputs) / len(outputs),
            "train/grad_norm": math.fsum(o.grad_norm for o in outputs) / len(outputs),
            "train/lr": outputs[-1].lr,
            "train/tokens": float(sum(o.num_tokens for o in outputs)),
        }
    )

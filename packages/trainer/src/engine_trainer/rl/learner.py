"""The learner, from groups and rewards to updates of the engines."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from engine_api.batch import Batch
from engine_api.distillation import Teaching
from engine_api.errors import ConfigError, RolloutError
from engine_api.losses import LossFn, token_weights
from engine_api.results import TrainOutput
from engine_trainer.algorithms.checks import loss_findings
from engine_trainer.algorithms.correction import correction_figures, ratios
from engine_trainer.algorithms.inputs import Completions
from engine_trainer.algorithms.losses import PolicyLoss, denominator
from engine_trainer.config import AlgorithmSection, CorrectionSection, RLConfig
from engine_trainer.extensions.built_in import LOSSES
from engine_trainer.extensions.functions import absolute_target
from engine_trainer.placement.groups import Trained, run_together
from engine_trainer.placement.replica import Group, ScoredCompletion
from engine_trainer.rl.credit import CompletionIndex, CreditAssignment
from engine_trainer.rl.critic import Critic, CriticShards
from engine_trainer.rl.experience import completions_of, is_stale
from engine_trainer.rl.kept_tokens import FIELD, KeptTokens, TokenWatch
from engine_trainer.rl.mismatch import (
    MismatchWatch,
    apply,
    largest_of,
    mismatch_figures,
    mismatch_sums,
)
from engine_trainer.rl.partition import Partition, TrainingDocument
from engine_trainer.rl.teacher import create_teacher, teacher_documents, teaching_of_run
from engine_trainer.run.reference import Reference, log_probs_of
from engine_trainer.run.run import Run
from engine_trainer.utils.experts import pad_experts
from engine_trainer.utils.hf_models import draws_dropout

log = logging.getLogger("engine_trainer")


@dataclass(frozen=True, kw_only=True)
class _MiniBatch:
    """The documents of one update."""

    denominator: float
    """Divisor of the loss, which includes the documents that are left out."""
    tokens: int
    """Number of tokens of ``documents`` that count."""
    documents: list[TrainingDocument]


class Learner:
    """GRPO, PPO and their relatives, from groups of completions to updates of the engines.

    A step computes old and reference log-probs, values, advantages and the rollout's correction,
    then applies ``epochs`` × ``mini_batches`` updates. Every method is called on all processes of
    the loop together. Per-token numbers are lists of dp shards, one for each local data-parallel
    rank.
    """

    def __init__(self, run: Run, config: RLConfig) -> None:
        algorithm = config.algorithm
        self.policy = run.policy
        self.timers = run.timers
        self._comm = run.comm
        self.config = config
        self.temperature = config.rollout.temperature
        self.loss = policy_loss(algorithm, teaching_of_run(config))
        self.credit = CreditAssignment(algorithm, run.policy)
        self.reference = Reference(run) if algorithm.reads_reference else None
        self.critic = Critic(run, config) if algorithm.critic else None
        self.teacher = create_teacher(run, config, self.loss.teaching)
        self.kept = KeptTokens([], [], ())

    @property
    def state(self) -> dict[str, float]:
        """The state that a resumed run needs in addition to the engines, as JSON."""
        return {"kl_coefficient": self.credit.kl_coefficient}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore a saved ``state``.

        Without ``kl.target`` the coefficient stays the configuration's.
        """
        if self.config.algorithm.kl.target is not None and "kl_coefficient" in state:
            self.credit.kl_coefficient = state["kl_coefficient"]

    def learn(
        self, groups: Sequence[Group], keep: Sequence[CompletionIndex] = ()
    ) -> dict[str, float]:
        """Update the engines and return the step's figures, the same on all ranks.

        Without groups nothing is changed. ``kept`` then has the numbers that were used for the
        tokens of the completions ``keep``.

        Raises ``BatchError`` where a rank finds a log-prob or a value that is not finite,
        ``RankFailure`` on the other ranks.
        """
        self.kept = KeptTokens([], [], ())
        if not groups:
            return {"train/updates": 0.0}
        self._move(away=False)
        completions = completions_of(groups, self.config)
        documents = self._documents(groups)
        self.kept = KeptTokens(groups, documents, keep)
        mini_batches = self._divide(documents, len(groups), completions)
        partition = Partition(
            self.policy,
            [m.documents for m in mini_batches],
            keeps_groups=self.config.engine.memory.share_prefixes,
        )
        packed = run_together(self._comm, partition.pack)

        # Old and reference log-probs.
        with self.timers.phase("log_probs"):
            shards = self._with_log_probs(self._mark_kept_tokens(packed, partition))
            shards = self._with_teacher(shards, partition, mini_batches, groups)

        # Values.
        critic_shards = self._evaluate_critic(partition, packed, mini_batches)
        values = critic_shards.values(partition) if critic_shards else []

        # Advantages.
        indices = [[document.index for document in shard] for shard in partition.shards]
        credit = self.credit.assign(shards, indices, completions, values)
        shards = self._with_weights(shards, credit.advantages)
        figures = credit.figures | _replayed_figures(documents)

        # Correction.
        shards, corrected = self._apply_correction(shards)
        self._keep(shards)

        # Updates.
        if critic_shards:
            figures |= self._update_critic(critic_shards, partition, credit.returns, mini_batches)
        with self.timers.phase("train"):
            figures |= corrected | self._update(mini_batches, partition.by_mini_batch(shards))
        if self.teacher is not None:
            self.teacher.end_updates(self.policy)
        self.offload_idle_engines()
        return figures

    def offload_idle_engines(self) -> None:
        """Move reference, critic and teacher off the device until the next update.

        Only with ``rollout.offload_engine``.
        """
        self._move(away=True)

    @property
    def oldest_version(self) -> int:
        """The oldest weight version whose tokens are trained on."""
        overlap = self.config.overlap
        algorithm = self.config.algorithm
        if overlap.mode == "none":
            return -1
        updates_per_step = algorithm.mini_batches * algorithm.epochs
        return self.policy.weight_version - overlap.max_staleness * updates_per_step

    def close(self) -> None:
        """Close the engines of reference, critic and teacher."""
        for part in (self.reference, self.critic, self.teacher):
            if part is not None:
                part.close()

    def _move(self, *, away: bool) -> None:
        if not self.config.rollout.offload_engine:
            return
        for part in (self.reference, self.critic, self.teacher):
            # A reference that is the policy without its adapter has no engines of its own.
            engines = None if part is None else part.engines
            if engines is None:
                continue
            if away:
                engines.offload()
            else:
                engines.reload()

    # --- before the updates ---------------------------------------------------------------------

    @property
    def _aggregation_length(self) -> int:
        """The constant, in tokens, that ``seq-mean-token-sum-norm`` divides by."""
        given = self.config.algorithm.aggregation_length
        return self.config.rollout.max_new_tokens if given is None else given

    @cached_property
    def _dropout(self) -> bool:
        return draws_dropout(self.config.engine)

    @property
    def _engine_knows(self) -> bool:
        """True if the engine's log-probs are computed before the first update.

        With a single update they are those of its own forward pass, which is weighted there
        (``MismatchWatch``), unless dropout changes them. Rejected tokens have to be known
        beforehand: an update without any token is none.
        """
        algorithm = self.config.algorithm
        if algorithm.old_log_probs != "engine":
            return False
        correction = algorithm.correction
        corrects_ahead = correction.reject != "none" or (correction.enabled and self._dropout)
        reads = self.credit.reads_old_log_probs
        return not self.loss.on_policy or reads or corrects_ahead

    def _documents(self, groups: Sequence[Group]) -> list[TrainingDocument]:
        """Return the training documents of all completions."""
        documents = [
            _document(
                g,
                i,
                group,
                completion,
                self.config.algorithm.overlong.filter,
                self.oldest_version,
                "weight_versions" in self.loss.traits.needs,
            )
            for g, group in enumerate(groups)
            for i, completion in enumerate(group.completions)
        ]
        if self.config.rollout.routed_experts == "off":
            return documents
        return _with_experts(documents, groups)

    def _divide(
        self, documents: Sequence[TrainingDocument], groups: int, completions: Completions
    ) -> list[_MiniBatch]:
        """Divide whole groups into mini-batches."""
        # Where the loss has only advantages, a document without one has no gradient. It counts in
        # the denominator, and is not computed.
        skip = self.loss.only_advantages and self.credit.zero_stays_zero
        rewards = completions.rewards
        known = self.credit.before(completions) if skip else torch.ones_like(rewards)
        count = min(self.config.algorithm.mini_batches, groups)
        mini_batches: list[_MiniBatch] = []
        for k in range(count):
            chosen = [d for d in documents if d.group * count // groups == k]
            live = [d for d in chosen if d.counted and known[d.index] != 0]
            counts = [d.counted for d in chosen]
            whole = denominator(self.config.algorithm.aggregation, counts, self._aggregation_length)
            tokens = sum(d.counted for d in live)
            mini_batches.append(_MiniBatch(denominator=whole, tokens=tokens, documents=live))
        return mini_batches

    def _mark_kept_tokens(self, shards: Sequence[Batch], partition: Partition) -> list[Batch]:
        """Return the shards with the places of their kept tokens, where any are kept."""
        if not self.kept:
            return list(shards)
        return self._with_fields(
            shards, **{FIELD: [self.kept.places(shard) for shard in partition.shards]}
        )

    def _keep(self, shards: Sequence[Batch]) -> None:
        """Note the numbers of the kept tokens on all processes of the loop."""
        if self.kept:
            for row in self.policy.gather([self.kept.read(shard) for shard in shards]):
                self.kept.note(row)

    def _with_log_probs(self, shards: Sequence[Batch]) -> list[Batch]:
        """Return the shards with ``old_log_probs`` and ``ref_log_probs``, where they are read."""
        extra: dict[str, list[torch.Tensor]] = {}
        if self.config.algorithm.old_log_probs == "rollout":
            extra["old_log_probs"] = [s["rollout_log_probs"] for s in shards]
        elif self._engine_knows:
            outputs = self.policy.infer(shards, temperature=self.temperature)
            extra["old_log_probs"] = [log_probs_of(o) for o in outputs]
        if self.reference is not None:
            extra["ref_log_probs"] = self.reference.log_probs(shards, self.temperature)
        return self._with_fields(shards, **extra)

    def _with_teacher(
        self,
        shards: Sequence[Batch],
        partition: Partition,
        mini_batches: Sequence[_MiniBatch],
        groups: Sequence[Group],
    ) -> list[Batch]:
        """Return the shards with the fields of the teacher, where there is one.

        Without documents there is no update, and the teacher is asked nothing.
        """
        documents = [d for mini in mini_batches for d in mini.documents]
        if self.teacher is None or not documents:
            return list(shards)
        found = self.teacher.fields(
            teacher_documents(documents, groups), partition, self.temperature
        )
        self.teacher.begin_updates(self.policy)
        return self._with_fields(shards, **found)

    def _with_fields(self, shards: Sequence[Batch], **extra: Sequence[torch.Tensor]) -> list[Batch]:
        """Return each dp shard with its tensor of each field.

        A number that is not finite on any rank ends the step on all ranks.
        """
        return run_together(
            self._comm,
            lambda: [
                shard.with_fields(**{name: values[k] for name, values in extra.items()})
                for k, shard in enumerate(shards)
            ],
        )

    def _evaluate_critic(
        self, partition: Partition, packed: Sequence[Batch], mini_batches: Sequence[_MiniBatch]
    ) -> CriticShards | None:
        """Return the critic's values on its own dp shards, or None without a critic.

        Its shards are the policy's where both engines partition alike.
        """
        if self.critic is None:
            return None
        if self.critic.apart:
            partition = Partition(
                self.critic.engines,
                [m.documents for m in mini_batches],
                keeps_groups=self.critic.shares_prefixes,
            )
            packed = run_together(self._comm, partition.pack)
        with self.timers.phase("values"):
            values = self.critic.values(packed)
            return CriticShards(
                partition=partition, shards=self._with_fields(packed, values=values)
            )

    def _with_weights(
        self, shards: Sequence[Batch], advantages: Sequence[torch.Tensor]
    ) -> list[Batch]:
        """Return the shards with ``loss_weight`` and ``advantages``."""
        mode = self.config.algorithm.aggregation
        weights = [token_weights(shard["mask"], shard.cu_seqlens, mode) for shard in shards]
        return self._with_fields(shards, loss_weight=weights, advantages=advantages)

    def _apply_correction(self, shards: Sequence[Batch]) -> tuple[list[Batch], dict[str, float]]:
        """Return the shards with the rollout corrected, and ``mismatch/…`` and ``correction/…``.

        Shards stay as they are where the engine's log-probs are not known. The denominator stays
        that of all counted tokens: a rejected token is a zero in the mean, it is not left out of
        it.
        """
        if not self._engine_knows:
            return list(shards), {}
        section = self.config.algorithm.correction
        results = [_correct(shard, section) for shard in shards]
        rows = self.policy.gather([(sums, largest) for _, sums, largest in results])
        totals = {name: math.fsum(sums[name] for sums, _ in rows) for name in rows[0][0]}
        figures = mismatch_figures(totals, [largest for _, largest in rows]) | correction_figures(
            totals, section
        )
        return [shard for shard, _, _ in results], figures

    # --- the updates ----------------------------------------------------------------------------

    def _update_critic(
        self,
        critic_shards: CriticShards,
        partition: Partition,
        returns: Sequence[torch.Tensor],
        mini_batches: Sequence[_MiniBatch],
    ) -> dict[str, float]:
        """Update the critic towards ``returns`` and return ``critic/…``."""
        assert self.critic is not None
        with self.timers.phase("critic"):
            shards = self._with_fields(
                critic_shards.shards, returns=partition.move(returns, critic_shards.partition)
            )
            parts = critic_shards.partition.by_mini_batch(shards)
            updates = [(part, mini.tokens) for part, mini in zip(parts, mini_batches, strict=True)]
            return self.critic.update(updates * self.critic.section.epochs)

    def _update(
        self, mini_batches: Sequence[_MiniBatch], parts: Sequence[Sequence[Batch]]
    ) -> dict[str, float]:
        """Update the policy and return its figures.

        ``parts``: for each mini-batch its part of every dp shard.
        """
        trained: list[Trained] = []
        # The weights are those of the rollout only before the first update.
        section = self.config.algorithm.correction
        for epoch in range(self.config.algorithm.epochs):
            for mini, part in zip(mini_batches, parts, strict=True):
                # Without documents no token has a gradient, on any rank.
                if mini.documents:
                    loss: LossFn = replace(
                        self.loss,
                        denominator=mini.denominator,
                        version=self.policy.weight_version,
                    )
                    if not trained and not self._engine_knows:
                        loss = MismatchWatch(loss, section)
                    trained.append(self._train(mini, part, loss, watched=epoch == 0))
        for reason in dict.fromkeys(t.output.skipped for t in trained if t.output.skipped):
            # Rank 0 shows this level, and the reason is the same on all ranks.
            log.info("an update was skipped: %s; weights and optimizer are as before", reason)
        figures = _figures([t.output for t in trained])
        if trained and not self._engine_knows:
            sums = trained[0].output.metrics
            figures |= mismatch_figures(sums, trained[0].observed) | correction_figures(
                sums, section
            )
        return figures

    def _train(
        self, mini: _MiniBatch, part: Sequence[Batch], loss: LossFn, *, watched: bool
    ) -> Trained:
        """Apply one update, and with ``watched`` note what its forward pass gives kept tokens."""
        watched = watched and bool(self.kept)
        result = self.policy.train(
            part,
            TokenWatch(loss) if watched else loss,
            denominator=mini.denominator,
            temperature=self.temperature,
        )
        if not watched:
            return result
        for row in result.observed:
            self.kept.note(row["tokens"], replace=False)
        inner = [row["inner"] for row in result.observed if row["inner"] is not None]
        return replace(result, observed=inner)


def _correct(shard: Batch, section: CorrectionSection) -> tuple[Batch, dict[str, float], float]:
    """Return a corrected dp shard, its sums for the figures, and the largest |Δ|."""
    engine = shard["old_log_probs"]
    rollout = shard["rollout_log_probs"]
    given = ratios(engine, rollout, shard["mask"], shard.cu_seqlens)
    sums = mismatch_sums(given, engine, rollout)
    if section.enabled:
        shard, corrected = apply(shard, given, section)
        sums |= corrected
    return shard, {name: float(value) for name, value in sums.items()}, largest_of(given)


def check_own_loss(algorithm: AlgorithmSection) -> None:
    """Raise ``ConfigError`` for a loss that is no sum over tokens, before a model is loaded.

    The built-in losses are known to be sums. Any other, and a built-in one with options, is
    computed on a few drawn numbers.
    """
    if algorithm.loss in LOSSES.built_in and not algorithm.loss_options:
        return
    loss = policy_loss(algorithm)
    for finding in loss_findings(loss.policy_term, loss.traits, quick=True):
        raise ConfigError(
            "algorithm.loss",
            f"{algorithm.loss}: {finding.what}",
            why=finding.why,
            remedy=f"{finding.remedy}; engine_trainer.testing.check_loss finds it in a test",
        )


def policy_loss(algorithm: AlgorithmSection, teaching: Teaching | None = None) -> PolicyLoss:
    """Return the loss that the configuration describes. Raises ``ConfigError``.

    ``teaching`` is the divergence to the teacher, or None without a teacher or for the log-probs of
    its sampled tokens.
    """
    one_update = algorithm.mini_batches == algorithm.epochs == 1
    kl = algorithm.kl
    teacher = algorithm.teacher
    return PolicyLoss(
        kind=absolute_target(algorithm.loss),
        options=dict(algorithm.loss_options),
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        kl_coef=kl.coefficient if kl.where == "loss" else 0.0,
        kl_estimator=kl.chosen,
        kl_importance=kl.importance,
        kl_bound=kl.bound,
        policy_coef=1.0 if teacher is None else teacher.reward_weight,
        teacher_coef=0.0 if teacher is None else teacher.coefficient,
        teaching=teaching,
        entropy_coef=algorithm.entropy_coefficient,
        entropy=True,
        on_policy=one_update and algorithm.old_log_probs == "engine",
        corrected=algorithm.correction.enabled,
        sequence_mask=algorithm.sequence_mask,
    )


def _document(
    row: int,
    index_in_group: int,
    group: Group,
    completion: ScoredCompletion,
    drop_cut: bool,
    oldest: int,
    versions: bool = False,
) -> TrainingDocument:
    """Return the training document of a completion."""
    before = [0.0] * len(group.prompt.tokens)
    # A tool's tokens carry no loss.
    weights = completion.loss_weights
    if weights is None:
        weights = [1.0] * len(completion.tokens)
    # DAPO's overlong filter: the end of a completion that was cut has not been scored, so that
    # none of it counts.
    if drop_cut and not completion.finished:
        weights = [0.0] * len(weights)
    stale = is_stale(completion, oldest)
    if any(stale):
        weights = [0.0 if old else weight for old, weight in zip(stale, weights, strict=True)]
    return TrainingDocument(
        group=row,
        index_in_group=index_in_group,
        tokens=[*group.prompt.tokens, *completion.tokens],
        mask=before + weights,
        rollout_log_probs=before + completion.log_probs,
        weight_versions=[0] * len(before) + completion.weight_versions if versions else None,
        images=group.prompt.images,
    )


def _with_experts(
    documents: Sequence[TrainingDocument], groups: Sequence[Group]
) -> list[TrainingDocument]:
    """Return the documents with the experts that the rollout recorded.

    Raises ``RolloutError`` where it has recorded none at all.
    """
    found = {d.index: groups[d.group].completions[d.index_in_group] for d in documents}
    given = [c.routed_experts for c in found.values() if c.routed_experts is not None]
    if not given:
        raise RolloutError(
            f"no experts were recorded for {len(documents)} completions",
            where="rollout.routed_experts: replay",
            why="the rollout returned completions without routed_experts",
            remedy="use rollout.name=local or vllm, or rollout.routed_experts=off",
        )
    return [
        replace(
            d,
            routed_experts=pad_experts(found[d.index].routed_experts, len(d.tokens), given[0]),
        )
        for d in documents
    ]


def _replayed_figures(documents: Sequence[TrainingDocument]) -> dict[str, float]:
    """Return ``rollout/replayed``, the fraction of tokens whose experts are replayed.

    It is empty where none are. The last token of a completion, which no log-prob depends on, has
    none.
    """
    given = [d.routed_experts for d in documents if d.routed_experts is not None]
    if not given:
        return {}
    known = sum(int((one >= 0).flatten(1).any(1).sum()) for one in given)
    return {"rollout/replayed": known / max(1, sum(len(one) for one in given))}


def _figures(outputs: Sequence[TrainOutput]) -> dict[str, float]:
    applied = [o for o in outputs if o.skipped is None]
    figures = {
        "train/updates": float(len(applied)),
        "train/skipped": float(len(outputs) - len(applied)),
    }
    if not outputs:
        return figures
    sums: dict[str, float] = {}
    for output in outputs:
        for name, value in output.metrics.items():
            sums[name] = sums.get(name, 0.0) + value
    tokens = max(sums.pop("tokens", 0.0), 1.0)
    per_token = {
        f"train/{n}": v / tokens
        for n, v in sums.items()
        if not n.startswith(("mismatch", "correction", "weight", "policy_loss"))
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

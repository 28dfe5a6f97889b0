"""The parts below ``algorithm``, which turn completions and rewards into an update.

Every field has a reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from engine_api.config import (
    LoraConfig,
    ModelSource,
    Parallelism,
    ScheduleConfig,
)
from engine_api.losses import Aggregation
from engine_trainer.config.checks import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    FRACTION,
    Refusal,
    refuse,
    require,
)
from engine_trainer.config.named import check_options
from engine_trainer.config.sections import (
    EngineSection,
    MemorySection,
    OptimizerSection,
    PrecisionSection,
)
from engine_trainer.config.teacher import TeacherSection
from engine_trainer.extensions.built_in import ADVANTAGES, LOSSES
from engine_trainer.extensions.traits import AdvantageTraits, LossTraits

# Options of losses and advantages that have keys of their own.
LOSS_KEYS = ("clip_low", "clip_high", "dual_clip")
ADVANTAGE_KEYS = ("gamma", "lam")
# Default distance from 1 at which a ratio is clipped.
CLIP = 0.2
# Default of the largest k3 of a token, in nats, as in verl and NeMo-RL.
KL_BOUND = 10.0


@dataclass(frozen=True, kw_only=True)
class KLSection:
    """The penalty on the KL to the reference model, which is the model as the run began.

    With ``engine.lora`` the reference is the policy with its adapter off, and without it a second
    copy of the weights. The expected gradient of every choice is in docs/algorithms.md.
    """

    coefficient: float = 0.0
    """Factor of the KL, at least 0, in units of reward or of loss per nat. 0 loads no reference
    model.
    """

    estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of a token's KL (Schulman 2020). Null is k1 in the reward and k3 in the loss.

    The reward accepts only k1, since the expected gradient of k2 and k3 there is not that of the
    KL.
    """

    where: Literal["loss", "reward"] = "loss"
    """Place of the KL: a term that is added to the loss, with a gradient, or a number that is
    subtracted from the reward.

    With ``algorithm.advantage: gae`` or ``reinforce_pp`` it is subtracted from the reward of each
    token, and with any other advantage its sum from the reward of the completion.
    """

    importance: bool = True
    """True multiplies a KL in the loss by each token's importance ratio (and by the weight of
    ``algorithm.correction``), which makes its expected gradient that of the KL.

    False is the bare estimator, as in the GRPO paper (arXiv:2402.03300, eq. 4), in verl, and in TRL
    with ``use_bias_correction_kl=False``: k3 then pulls by the gradient of KL(reference ‖ policy).
    """

    bound: float | None = KL_BOUND
    """Largest k3 of a token in the loss, in nats, above which the token has no KL gradient. Null is
    no bound.

    The default is that of verl and NeMo-RL. The bare k3 has a slope of exp(-d), which is 3,000
    where the log-ratio d to the reference is -8.
    """

    target: float | None = None
    """KL of a completion in nats that the coefficient is adapted to after each step
    (arXiv:1909.08593, section 2.2), which needs ``where: reward``. Null keeps the coefficient
    constant.
    """

    gain: float = 0.1
    """Factor K, between 0 and 5, of the relative error of the KL (clipped to ±0.2) by which the
    coefficient changes after a step with ``target``: β becomes β (1 + K error).
    """

    def __post_init__(self) -> None:
        require("algorithm.kl", self, {"coefficient": AT_LEAST_0})
        refuse("algorithm.kl", _wrong_kl(self))

    @property
    def chosen(self) -> Literal["k1", "k2", "k3"]:
        """Estimator that is used: ``estimator``, or the default of ``where`` if it is null."""
        if self.estimator is not None:
            return self.estimator
        return "k1" if self.where == "reward" else "k3"


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingSection:
    """The replacement of groups whose rewards are all equal (DAPO, arXiv:2503.14476, section 3.2).

    Such a group has no advantage. Rewards are compared before the penalty of
    ``algorithm.overlong``.
    """

    enabled: bool = False
    """True replaces groups whose rewards are all equal by the groups of new prompts."""

    max_rounds: int = 4
    """Largest number of rounds of generation in a step, the first one included. After it the step
    takes the groups that it has, which may be fewer than ``algorithm.prompts_per_step``.
    """

    def __post_init__(self) -> None:
        require("algorithm.dynamic_sampling", self, {"max_rounds": AT_LEAST_1})


@dataclass(frozen=True, kw_only=True)
class OverlongSection:
    """The treatment of completions near or at ``rollout.max_new_tokens`` (DAPO, section 3.4)."""

    buffer: int = 0
    """Number of tokens below ``rollout.max_new_tokens`` at which the penalty begins. 0 is no
    penalty.
    """

    penalty: float = 1.0
    """Amount, at least 0, that is subtracted from the reward at ``rollout.max_new_tokens``. It
    falls linearly to 0 over the tokens of ``buffer``.

    The paper's is 1 on rewards of 1 and -1, half of their distance. On rewards of 1 and 0 that is
    0.5.
    """

    filter: bool = False
    """True leaves completions that did not end by themselves out of the loss. Their rewards still
    count in their group.
    """

    def __post_init__(self) -> None:
        require("algorithm.overlong", self, {"buffer": AT_LEAST_0, "penalty": AT_LEAST_0})


# Bounds of rejection by the level of the ratio: verl's presets decoupled_seq_is_rs and
# decoupled_geo_rs (0.9.1).
REJECT_BOUNDS: Mapping[str, tuple[float, float]] = {
    "token": (0.5, 2.0),
    "sequence": (0.5, 2.0),
    "geometric": (0.999, 1.001),
}


@dataclass(frozen=True, kw_only=True)
class CorrectionSection:
    """Importance weights and rejection for differences between the rollout and the engine.

    A ratio is the engine's probability over the rollout's. Weights multiply the policy term, and a
    KL in the loss with ``algorithm.kl.importance``. Rejected tokens and completions carry no loss.
    Weights and rejection are independent of each other (docs/rollout-correction.md).
    """

    weight: Literal["auto", "none", "token", "sequence", "icepop"] = "auto"
    """Weight of a token: the ratio of the token, or of its completion (``sequence``), at most
    ``cap``, or IcePop's weight, which is the ratio of the token between ``low`` and ``high`` and 0
    elsewhere.

    ``auto`` is ``token`` with any rollout except ``local``, since the log-probs of a different
    implementation are those of a different policy even for the same weights. It is ``none`` with
    ``local`` and with ``algorithm.old_log_probs: rollout``, with which any weight or rejection is
    refused.
    """

    cap: float = 2.0
    """Largest weight that ``token`` and ``sequence`` give, at least 1. 2 is the value of Yao et al.
    and verl, TRL's is 3.
    """

    low: float = 0.5
    """Ratio in [0, 1] below which ``icepop`` gives the weight 0."""

    high: float = 5.0
    """Ratio of at least 1 above which ``icepop`` gives the weight 0."""

    reject: Literal["none", "token", "sequence", "geometric"] = "none"
    """Ratio that decides about rejection: of the token, which is then rejected alone, or of the
    completion. ``geometric`` is the exponential of the completion's mean log-ratio.
    """

    reject_low: float | None = None
    """Ratio in [0, 1] below which ``reject`` rejects. Null is 0.5, or 0.999 with ``reject:
    geometric``.
    """

    reject_high: float | None = None
    """Ratio of at least 1 above which ``reject`` rejects. Null is 2, or 1.001 with ``reject:
    geometric``.
    """

    def __post_init__(self) -> None:
        require("algorithm.correction", self, {"cap": AT_LEAST_1})
        refuse("algorithm.correction", _wrong_bounds(self))

    @property
    def weighted(self) -> bool:
        """True if there are weights.

        An ``auto`` that is not resolved yet counts as none.
        """
        return self.weight not in ("auto", "none")

    @property
    def enabled(self) -> bool:
        """True if there are weights or rejection."""
        return self.weighted or self.reject != "none"

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest ratio that rejection keeps."""
        low, high = REJECT_BOUNDS.get(self.reject, (0.0, math.inf))
        return (
            low if self.reject_low is None else self.reject_low,
            high if self.reject_high is None else self.reject_high,
        )

    def resolved(self, *, rollout: str, old_log_probs: str) -> CorrectionSection:
        """Return the section with ``auto`` replaced by its meaning for the rollout.

        It stays for a rollout that is ``auto`` itself.
        """
        if self.weight != "auto" or rollout == "auto":
            return self
        return replace(
            self, weight="none" if rollout == "local" or old_log_probs == "rollout" else "token"
        )


@dataclass(frozen=True, kw_only=True)
class CriticSection:
    """The critic of PPO, a value model on an engine of its own in the processes of the policy."""

    model: ModelSource | None = None
    """Model that the critic starts from. Null is ``engine.model`` with a new value head."""

    backend: str | None = None
    """Name of the engine that runs the critic. Null is ``engine.backend``."""

    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    """Optimizer of the critic.

    Its learning rate of 1e-5, ten times the policy's, is verl's: the value head is new.
    """

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over the critic's updates of the run."""

    parallelism: Parallelism | None = None
    """Parallel layout of the critic, on all ranks of the policy. Null is
    ``engine.parallelism``.
    """

    precision: PrecisionSection | None = None
    """Dtypes of the critic. Null is ``engine.precision``."""

    memory: MemorySection | None = None
    """Memory settings of the critic. Null is ``engine.memory``."""

    lora: LoraConfig | None = None
    """LoRA adapter of the critic. Null trains all of its weights, also with ``engine.lora``."""

    options: Mapping[str, Any] | None = None
    """Options of the critic's engine. Null is ``engine.options`` if both have the same backend, and
    no options if not.
    """

    value_clip: float | None = 0.5
    """Distance from the value before the step's updates at which PPO clips the value loss, in units
    of reward, above 0. Null is no clip.

    0.5 is the value of verl and OpenRLHF. A new value head begins at 0 and has to reach the mean
    reward, which takes several steps with 0.2.
    """

    epochs: int = 1
    """Number of passes over the completions of a step, each in ``algorithm.mini_batches`` updates
    of the critic.
    """

    def __post_init__(self) -> None:
        require("algorithm.critic", self, {"epochs": AT_LEAST_1, "value_clip": ABOVE_0})

    def engine(self, actor: EngineSection) -> EngineSection:
        """Return the whole section of the critic's engine.

        ``actor`` is the policy's section.
        """
        backend = self.backend or actor.backend
        options = actor.options if backend == actor.backend else {}
        return replace(
            actor,
            model_type="value_model",
            model=self.model or actor.model,
            backend=backend,
            optimizer=self.optimizer,
            schedule=self.schedule,
            parallelism=self.parallelism or actor.parallelism,
            lora=self.lora,
            precision=self.precision or actor.precision,
            memory=self.memory or actor.memory,
            options=options if self.options is None else self.options,
        )


@dataclass(frozen=True, kw_only=True)
class AlgorithmSection:
    """The algorithm that turns completions and rewards into updates (docs/algorithms.md)."""

    loss: str = "ppo"
    """Policy loss: a built-in name, that of an installed package (entry points of
    ``engine_trainer.losses``), or a function of your own as ``file.py:function``.

    Built in are ``ppo`` (PPO's clipped loss), ``gspo`` (with the ratio of the sequence),
    ``gspo_token`` (GSPO for advantages that differ by token), ``cispo`` (which bounds the ratio as
    a weight), ``sapo`` (with a soft gate in place of the clip), ``gmpo`` (with the geometric mean
    of clipped ratios), and ``dppo_tv`` and ``dppo_kl`` (which mask tokens by the divergence of
    their probability).
    """

    loss_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of the loss, by the names of its parameters. A loss that has parameters ``clip_low``,
    ``clip_high`` or ``dual_clip`` gets them from the keys of these names.
    """

    advantage: str = "grpo"
    """Estimator of the advantages: a built-in name, that of an installed package (entry points of
    ``engine_trainer.advantages``), or a function of your own as ``file.py:function``.

    ``grpo``, ``dr_grpo`` (without the division by the group's standard deviation), ``rloo`` and
    ``reinforce_pp_baseline`` compare the completions of a prompt, and give all tokens of a
    completion the same advantage. So do ``grpo_batch``, which divides by the standard deviation
    over the whole step, and ``gdpo``, which normalizes each reward of a weighted sum by itself.
    ``gae``, which needs ``critic``, ``reinforce_pp`` and ``otb`` (the optimal token baseline) give
    each token its own.
    """

    advantage_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of the advantage, by the names of its parameters. An advantage that has parameters
    ``gamma`` or ``lam`` gets them from the keys of these names.
    """

    gamma: float = 1.0
    """Discount factor in [0, 1] of ``gae`` and ``reinforce_pp``. The other advantages need 1, since
    they compare whole completions.
    """

    lam: float = 1.0
    """λ in [0, 1] of ``gae``. The other advantages need 1."""

    whiten: bool | None = None
    """True normalizes advantages to mean 0 and standard deviation 1 over all tokens of a step. Null
    is true for ``gae``, ``reinforce_pp`` and ``reinforce_pp_baseline``, and false for the other
    advantages.
    """

    critic: CriticSection | None = None
    """Critic of ``gae``, which needs one. Null is the only value for the other advantages."""

    clip_low: float = CLIP
    """Distance in [0, 1] below 1 at which the ratio of the policy to its old log-probs is clipped.

    GSPO's is 3e-4. With ``cispo``, 1.0 is no bound from below.
    """

    clip_high: float = CLIP
    """Distance, at least 0, above 1 at which the ratio is clipped.

    DAPO's clip-higher is 0.28, GSPO's is 4e-4.
    """

    dual_clip: float | None = None
    """Bound c > 1 on the loss -A r of a token with a negative advantage A, which is then at most
    -A c (arXiv:1912.09729). It is accepted with ``loss: ppo`` only, and null is no bound.
    """

    sequence_mask: float | None = None
    """Mean of log(rollout / policy) over a completion's tokens, in nats and at least 0, above which
    a completion with a negative advantage is left out of the policy's loss. Null is no mask.

    It is DeepSeek-V3.2's off-policy sequence mask (arXiv:2512.02556), with any ``loss``. A KL or an
    entropy bonus in the loss stays.
    """

    aggregation: Aggregation = "token-mean"
    """Weights of an update's tokens, and divisor of their sum.

    ``token-mean``, the default of DAPO and verl, divides by the number of tokens.
    ``seq-mean-token-mean``, the GRPO paper's, gives each completion the same weight and divides by
    their number, and GSPO needs it. ``seq-mean-token-sum`` divides by the number of completions,
    and ``seq-mean-token-sum-norm``, Dr. GRPO's, by that number times ``aggregation_length``.
    """

    aggregation_length: int | None = None
    """Constant of ``seq-mean-token-sum-norm`` in tokens. Null is ``rollout.max_new_tokens``, as in
    TRL.
    """

    kl: KLSection = field(default_factory=KLSection)
    """Penalty on the KL to the reference model. The default has none."""

    teacher: TeacherSection | None = None
    """Teacher that the policy learns from on its own completions (on-policy distillation). Null
    learns from rewards alone.
    """

    entropy_coefficient: float = 0.0
    """Factor of the entropy bonus, at least 0. The loss is lowered by it times the entropy of each
    token's distribution in nats, so that a larger factor keeps the policy more random. 0 is no
    bonus.
    """

    prompts_per_step: int = 16
    """Number of prompts of a step over all ranks, each with ``rollout.n`` completions."""

    mini_batches: int = 1
    """Number of parts that the groups of a step are divided into, at most one for each group. Each
    part is one optimizer update in each of the ``epochs``.
    """

    epochs: int = 1
    """Number of passes of the policy over the completions of a step."""

    old_log_probs: Literal["engine", "rollout"] = "engine"
    """Source of the old log-probs that the policy's ratio is taken against: the engine before the
    step's updates, or the rollout, whose difference to the engine is then a part of the ratio.
    """

    correction: CorrectionSection = field(default_factory=CorrectionSection)
    """Correction for the difference between the log-probs of the rollout and of the engine."""

    dynamic_sampling: DynamicSamplingSection = field(default_factory=DynamicSamplingSection)
    """Replacement of groups whose rewards are all equal, off by default."""

    overlong: OverlongSection = field(default_factory=OverlongSection)
    """Treatment of completions near or at the length limit. The default does nothing."""

    def __post_init__(self) -> None:
        require(
            "algorithm",
            self,
            {
                "clip_high": AT_LEAST_0,
                "entropy_coefficient": AT_LEAST_0,
                "gamma": FRACTION,
                "lam": FRACTION,
                "prompts_per_step": AT_LEAST_1,
                "mini_batches": AT_LEAST_1,
                "epochs": AT_LEAST_1,
                "aggregation_length": AT_LEAST_1,
                "sequence_mask": AT_LEAST_0,
            },
        )
        check_options(LOSSES, self.loss, self.loss_options, LOSS_KEYS)
        check_options(ADVANTAGES, self.advantage, self.advantage_options, ADVANTAGE_KEYS)
        refuse("algorithm", _wrong_choices(self))

    @property
    def whitened(self) -> bool:
        """True if advantages are normalized over the whole step."""
        return self.advantage_traits.whiten if self.whiten is None else self.whiten

    @property
    def by_token(self) -> bool:
        """True if advantages differ within a completion.

        If not, they compare the completions of a group.
        """
        return self.advantage_traits.level != "completion"

    @property
    def loss_traits(self) -> LossTraits:
        """Traits of the loss (``engine_trainer.extensions.traits``)."""
        return LOSSES.traits(self.loss)

    @property
    def advantage_traits(self) -> AdvantageTraits:
        """Traits of the advantage (``engine_trainer.extensions.traits``)."""
        return ADVANTAGES.traits(self.advantage)

    @property
    def reads_rewards(self) -> bool:
        """True if the policy learns from rewards, and not from a teacher alone."""
        return self.teacher is None or self.teacher.reward_weight > 0

    @property
    def reads_reference(self) -> bool:
        """True if a KL or the loss reads the log-probs of the reference model."""
        return self.kl.coefficient > 0 or "ref_log_probs" in self.loss_traits.needs


def _wrong_kl(section: KLSection) -> Iterator[Refusal]:
    """Yield a refusal for each combination of values that a KL section may not have."""
    in_reward, estimator = section.where == "reward", section.chosen
    yield (
        in_reward and estimator != "k1",
        "estimator",
        f"expected k1 with where: reward, got {estimator}",
        (
            f"the expected gradient of {estimator} hardly pulls towards the reference "
            "and may push away, see docs/algorithms.md"
        ),
        "use estimator: k1 (or null), or where: loss",
    )
    yield (
        not in_reward and not section.importance and estimator == "k1",
        "estimator",
        "expected k2 or k3 with where: loss and importance: false, got k1",
        (
            "the bare k1 has the gradient of the log-probs alone: "
            "its expectation is 0, whatever the reference is"
        ),
        "use importance: true, estimator: k2 or k3, or where: reward",
    )
    yield (
        in_reward and not section.importance,
        "importance",
        "expected true with where: reward, got false",
        "a KL in the reward is a number without a gradient, nothing reads it there",
        "leave it out, or use where: loss",
    )
    bound = section.bound
    yield (
        bound is not None and not bound > 0,
        "bound",
        f"expected a number above 0, got {bound}",
        "",
        f"give nats ({KL_BOUND}), or null for no bound",
    )
    yield (
        bound != KL_BOUND and (in_reward or estimator != "k3"),
        "bound",
        f"nothing reads {bound} with where: {section.where} and estimator {estimator}",
        "it is about the exponential in k3, in the loss",
        f"leave it at {KL_BOUND}, or use k3 in the loss",
    )
    target = section.target
    yield (
        target is not None and not (target > 0 and 0 < section.gain < 5),
        "target",
        f"expected a target above 0 and a gain between 0 and 5, got {target} and {section.gain}",
        "",
        "give a target above 0, and a gain between 0 and 5 (0.1)",
    )
    yield (
        target is not None and (not in_reward or section.coefficient == 0),
        "target",
        f"expected null without a KL in the reward, got {target}",
        "the coefficient is adapted from the KL that the rewards were lowered by",
        "set kl.where: reward and a first kl.coefficient above 0 (0.1), or target: null",
    )


def _wrong_bounds(section: CorrectionSection) -> Iterator[Refusal]:
    """Yield a refusal for each bound of a ratio that excludes 1."""
    bounds = {
        "low": FRACTION,
        "high": AT_LEAST_1,
        "reject_low": FRACTION,
        "reject_high": AT_LEAST_1,
    }
    for name, interval in bounds.items():
        value = getattr(section, name)
        yield (
            value is not None and not interval.holds(value),
            name,
            f"expected {interval.words}, got {value}",
            "a ratio of 1, where nothing needs correction, must lie between the bounds",
            f"give {interval.words}",
        )


def _wrong_choices(section: AlgorithmSection) -> Iterator[Refusal]:
    """Yield a refusal for each combination of values that the algorithm may not have."""
    loss, advantage, dual_clip = section.loss, section.advantage, section.dual_clip
    traits, credit = section.loss_traits, section.advantage_traits
    yield (
        not FRACTION.holds(section.clip_low),
        "clip_low",
        f"expected {FRACTION.words}, got {section.clip_low}",
        "no ratio is below 1 - clip_low if that is negative",
        "give a number in [0, 1]; 1.0 is no bound from below",
    )
    yield (
        section.mini_batches > section.prompts_per_step,
        "mini_batches",
        f"expected at most the {section.prompts_per_step} of algorithm.prompts_per_step, got "
        + str(section.mini_batches),
        "each part needs a group, and the learning rate's schedule counts an update for each part",
        f"use {section.prompts_per_step}, or more prompts a step",
    )
    for name in ("clip_low", "clip_high"):
        value = getattr(section, name)
        yield (
            value != CLIP and not LOSSES.reads(loss, name),
            name,
            f"nothing reads {value} with loss {loss}",
            f"it has no parameter {name}",
            f"leave it at {CLIP}",
        )
    yield (
        dual_clip is not None and not dual_clip > 1,
        "dual_clip",
        f"expected a number above 1, got {dual_clip}",
        "",
        "use 3.0, or null for none",
    )
    yield (
        dual_clip is not None and not LOSSES.reads(loss, "dual_clip"),
        "dual_clip",
        f"expected null with loss {loss}, got {dual_clip}",
        "it bounds PPO's clipped term",
        "set dual_clip: null, or loss: ppo",
    )
    yield (
        section.gamma != 1 and not ADVANTAGES.reads(advantage, "gamma"),
        "gamma",
        f"expected 1 with advantage {advantage}, got {section.gamma}",
        "it compares whole completions, nothing is discounted"
        if credit.level == "completion"
        else "it has no parameter gamma",
        "set gamma: 1.0, or advantage: gae or reinforce_pp",
    )
    yield (
        section.lam != 1 and not ADVANTAGES.reads(advantage, "lam"),
        "lam",
        f"expected 1 with advantage {advantage}, got {section.lam}",
        "only gae has a λ",
        "set lam: 1.0, or advantage: gae",
    )
    yield (
        credit.critic and section.critic is None,
        "critic",
        f"expected a section with advantage {advantage}, got null",
        f"{advantage} needs values",
        (
            "write `critic: {optimizer: {lr: 1.0e-5}}`, "
            "or take an advantage without a critic (grpo, reinforce_pp)"
        ),
    )
    yield (
        section.critic is not None and not credit.critic,
        "critic",
        f"expected null with advantage {advantage}, got a section",
        "nothing reads it",
        "set advantage: gae, or critic: null",
    )
    unread = {
        "critic": section.critic is not None,
        "dynamic_sampling.enabled": section.dynamic_sampling.enabled,
        "kl.where": section.kl.where == "reward" and section.kl.coefficient > 0,
        "overlong.buffer": section.overlong.buffer > 0,
    }
    for name, given in unread.items():
        yield (
            given and not section.reads_rewards,
            name,
            "nothing reads it with algorithm.teacher.reward_weight 0",
            "the policy learns from the teacher alone",
            "set algorithm.teacher.reward_weight above 0, or leave it out",
        )
    yield (
        traits.whole_sequences and section.by_token,
        "loss",
        f"expected a loss of tokens with advantage {advantage}, got {loss}",
        f"the ratio and the advantage of {loss} are those of a whole sequence",
        "use loss: gspo_token",
    )
    yield (
        traits.aggregation not in (None, section.aggregation),
        "aggregation",
        f"expected {traits.aggregation} with loss {loss}, got {section.aggregation}",
        "its objective is a mean over sequences (docs/algorithms.md)",
        f"set aggregation: {traits.aggregation}",
    )
    yield (
        section.aggregation_length is not None and section.aggregation != "seq-mean-token-sum-norm",
        "aggregation_length",
        f"nothing reads {section.aggregation_length} with aggregation {section.aggregation}",
        "it is the constant that sums are divided by",
        "set aggregation: seq-mean-token-sum-norm, or leave it out",
    )
    yield (
        section.correction.enabled and section.old_log_probs == "rollout",
        "correction",
        "expected neither weights nor rejection with algorithm.old_log_probs: rollout",
        "the policy's own ratio is then taken against the rollout and corrects for it already",
        "use old_log_probs: engine, or weight: none and reject: none",
    )

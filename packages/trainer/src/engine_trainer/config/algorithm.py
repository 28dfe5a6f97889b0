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
    Memory,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    Precision,
    ScheduleConfig,
)
from engine_api.errors import ConfigError
from engine_api.losses import Aggregation
from engine_trainer.config.sections import EngineSection, at_least

Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"]
# Advantages that differ within a completion. All other advantages compare a group's completions.
BY_TOKEN = ("reinforce_pp", "gae")
# Advantages that are normalized over the whole step by default.
WHITENED = ("reinforce_pp", "reinforce_pp_baseline", "gae")
# Default of the largest k3 of a token, in nats, as in verl and NeMo-RL.
KL_BOUND = 10.0


@dataclass(frozen=True, kw_only=True)
class KLSection:
    """The penalty on the KL to the reference model.

    The reference is the model as it was when the run began; with LoRA it is the model with the
    adapter off. In the reward, the KL is subtracted from each token's reward if the advantage
    differs by token (gae, reinforce_pp). If not, its sum is subtracted from the completion's
    reward. The expected gradient of every choice is in docs/algorithms.md.
    """

    coefficient: float = 0.0
    """Factor of the KL in nats; 0 loads no reference model."""

    estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of a token's KL (Schulman 2020); null is k1 in the reward and k3 in the
    loss.

    In the reward only k1 is accepted, since the expected gradient of k2 and k3 there is not
    that of the KL.
    """

    where: Literal["loss", "reward"] = "loss"
    """Place of the KL: a term of the loss with a gradient, or a number that lowers the reward."""

    importance: bool = True
    """True multiplies a KL in the loss by each token's importance ratio, which makes its
    expected gradient that of the KL.

    False is the bare estimator, as in the GRPO paper (arXiv:2402.03300, eq. 4), verl, and
    TRL with ``use_bias_correction_kl=False``: k3 then pulls by the gradient of KL(reference
    ‖ policy).
    """

    bound: float | None = KL_BOUND
    """Largest k3 of a token in the loss, in nats, above which there is no gradient; null is
    no bound.

    The default is that of verl and NeMo-RL. The bare k3 has a slope of exp(-d), which is
    3,000 where the log-ratio d to the reference is -8.
    """

    target: float | None = None
    """KL of a completion in nats that the coefficient is adapted to (arXiv:1909.08593,
    section 2.2); null keeps the coefficient constant.
    """

    gain: float = 0.1
    """Factor of the error (clipped to a fifth) in each adaptation of the coefficient to
    ``target``; K in the paper.
    """

    def __post_init__(self) -> None:
        at_least("algorithm.kl", self, 0, "coefficient")
        _refuse("algorithm.kl", _wrong_kl(self))

    @property
    def chosen(self) -> Literal["k1", "k2", "k3"]:
        """Estimator that is used: ``estimator``, or the default of ``where`` if it is null."""
        if self.estimator is not None:
            return self.estimator
        return "k1" if self.where == "reward" else "k3"


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingSection:
    """The replacement of groups whose rewards are all equal by new prompts.

    The method is that of DAPO (arXiv:2503.14476, section 3.2).
    """

    enabled: bool = False
    """True replaces groups whose rewards are all equal by the groups of new prompts."""

    max_rounds: int = 4
    """Largest number of rounds of generation in a step, after which the step takes the
    groups it has.
    """

    def __post_init__(self) -> None:
        at_least("algorithm.dynamic_sampling", self, 1, "max_rounds")


@dataclass(frozen=True, kw_only=True)
class OverlongSection:
    """The treatment of completions at the length limit (DAPO, section 3.4).

    It is a soft penalty over the last ``buffer`` tokens, or no loss.
    """

    buffer: int = 0
    """Number of tokens below ``rollout.max_new_tokens`` at which the penalty begins; 0 is no
    penalty.
    """

    penalty: float = 1.0
    """Amount subtracted from the reward at the length limit; it falls linearly to 0 below
    the limit.

    The paper's is 1 on rewards of 1 and -1, half of their distance. On rewards of 1 and 0
    that is 0.5.
    """

    filter: bool = False
    """True leaves completions that were cut at the length limit out of the loss."""

    def __post_init__(self) -> None:
        at_least("algorithm.overlong", self, 0, "buffer", "penalty")


# Bounds of rejection by the level of the ratio: verl's presets decoupled_seq_is_rs and
# decoupled_geo_rs (0.9.1).
REJECT_BOUNDS: Mapping[str, tuple[float, float]] = {
    "token": (0.5, 2.0),
    "sequence": (0.5, 2.0),
    "geometric": (0.999, 1.001),
}


@dataclass(frozen=True, kw_only=True)
class CorrectionSection:
    """Importance weights and rejection for differences between rollout and engine.

    They are described in docs/rollout-correction.md. A ratio is the engine's probability over the
    rollout's. Weights multiply the policy term, and rejected tokens and completions carry no loss.
    The two are separate.
    """

    weight: Literal["auto", "none", "token", "sequence", "icepop"] = "auto"
    """Weight of a token's policy term: the ratio of the token or of its completion, at most
    ``cap``, or IcePop's weight.

    ``auto`` is ``token`` where an implementation other than the engine generates (any
    rollout but ``local``), since its log-probs are those of a different policy even for the
    same weights; TRL corrects by default, too. ``auto`` is ``none`` with the ``local``
    rollout and with ``algorithm.old_log_probs: rollout``.
    """

    cap: float = 2.0
    """Largest weight that ``token`` and ``sequence`` give; 2 is the value of Yao et al. and
    verl, TRL's is 3.
    """

    low: float = 0.5
    """Token ratio below which ``icepop`` gives the weight 0."""

    high: float = 5.0
    """Token ratio above which ``icepop`` gives the weight 0."""

    reject: Literal["none", "token", "sequence", "geometric"] = "none"
    """Ratio that decides about rejection; ``geometric`` is exp of a completion's mean
    log-ratio.
    """

    reject_low: float | None = None
    """Ratio below which tokens or completions are rejected; null is 0.5, or 0.999 with
    ``reject: geometric``.
    """

    reject_high: float | None = None
    """Ratio above which tokens or completions are rejected; null is 2, or 1.001 with
    ``reject: geometric``.
    """

    def __post_init__(self) -> None:
        at_least("algorithm.correction", self, 1, "cap", "high")
        at_least("algorithm.correction", self, 0, "low")
        for name, least in (("reject_low", 0), ("reject_high", 1)):
            if getattr(self, name) is not None:
                at_least("algorithm.correction", self, least, name)
        for name in ("low", "reject_low"):
            value = getattr(self, name)
            if value is not None and value > 1:
                raise ConfigError(
                    f"algorithm.correction.{name}",
                    f"expected a number in [0, 1], got {value}, which is above 1",
                    why="a ratio of 1, where nothing needs correction, would lie outside",
                    remedy="give a number in [0, 1]",
                )

    @property
    def weighted(self) -> bool:
        """True if there are weights; an ``auto`` that is not resolved yet counts as none."""
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
        """Return the section with ``auto`` replaced by its meaning for the rollout."""
        if self.weight != "auto":
            return self
        return replace(
            self, weight="none" if rollout == "local" or old_log_probs == "rollout" else "token"
        )


@dataclass(frozen=True, kw_only=True)
class CriticSection:
    """The critic of PPO, a value model on an engine of its own.

    Null in ``model``, ``backend``, ``parallelism``, ``precision`` or ``memory`` is the setting of
    the policy's engine.
    """

    model: ModelSource | None = None
    """Model that the critic starts from; null is ``engine.model`` with a new value head."""

    backend: str | None = None
    """Name of the engine plug-in that runs the critic; null is ``engine.backend``."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the critic.

    Its learning rate of 1e-5, ten times the policy's, is verl's: the value head is new.
    """

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning-rate schedule of the critic; a ``total_steps`` of null is the number of steps
    of the run.
    """

    parallelism: Parallelism | None = None
    """Parallel layout of the critic; null is ``engine.parallelism``."""

    precision: Precision | None = None
    """Number formats of the critic; null is ``engine.precision``."""

    memory: Memory | None = None
    """Memory settings of the critic; null is ``engine.memory``."""

    lora: LoraConfig | None = None
    """LoRA adapter of the critic; null trains all of its weights."""

    options: Mapping[str, Any] | None = None
    """Options of the critic's engine plug-in; null is ``engine.options`` if both use the
    same backend, and no options if not.
    """

    value_clip: float | None = 0.5
    """Largest change of a value within a step's updates, in the unit of rewards; null is no
    clip.

    0.5 is the value of verl and OpenRLHF. A new value head begins at 0 and has to reach the
    mean reward, which takes several steps with 0.2.
    """

    epochs: int = 1
    """Number of passes over the completions of a step, each in ``algorithm.mini_batches``
    updates.
    """

    def __post_init__(self) -> None:
        at_least("algorithm.critic", self, 1, "epochs")
        if self.value_clip is not None and not self.value_clip > 0:
            raise ConfigError(
                "algorithm.critic.value_clip",
                f"expected a number above 0, got {self.value_clip}",
                remedy="give a number above 0, or null",
            )

    def engine(self, actor: EngineSection) -> EngineSection:
        """Return the whole section of the critic's engine; ``actor`` is the policy's section."""
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
    """The settings that turn completions and rewards into an update.

    The estimators and losses are in ``engine_trainer.algorithms``.
    """

    loss: Literal["ppo", "gspo", "gspo_token", "cispo"] = "ppo"
    """Policy loss: PPO's clipped loss, GSPO over sequences, GSPO over tokens, or CISPO."""

    advantage: Advantage = "grpo"
    """Advantage estimator; ``dr_grpo`` is ``grpo`` without the division by the group's
    standard deviation.
    """

    gamma: float = 1.0
    """Discount factor in [0, 1] of ``gae`` and ``reinforce_pp``; other advantages compare
    whole completions and need 1.
    """

    lam: float = 1.0
    """λ in [0, 1] of ``gae``; other advantages need 1."""

    whiten: bool | None = None
    """True normalizes advantages over all tokens of a step; null does so for ``gae``,
    ``reinforce_pp`` and ``reinforce_pp_baseline`` only.
    """

    critic: CriticSection | None = None
    """Critic of ``gae``, which needs one; null for every other advantage."""

    clip_low: float = 0.2
    """Distance below 1 at which the ratio is clipped.

    GSPO's is 3e-4. With ``cispo``, 1.0 is no bound from below.
    """

    clip_high: float = 0.2
    """Distance above 1 at which the ratio is clipped.

    DAPO's clip-higher is 0.28, GSPO's is 4e-4.
    """

    dual_clip: float | None = None
    """Bound c > 1 of PPO's loss for negative advantages (arXiv:1912.09729), read by ``loss:
    ppo`` only; null is no bound.
    """

    aggregation: Aggregation = "token-mean"
    """Divisor of a step's sum over tokens.

    ``token-mean``, the default of DAPO and verl, divides by the number of tokens of the
    step. ``seq-mean-token-mean`` is the GRPO paper's. ``seq-mean-token-sum-norm`` is Dr.
    GRPO's and divides by the number of completions times a constant.
    """

    aggregation_length: int | None = None
    """Constant of ``seq-mean-token-sum-norm`` in tokens; null is ``rollout.max_new_tokens``,
    as in TRL.
    """

    kl: KLSection = field(default_factory=KLSection)
    """Penalty on the KL to the reference model; the default has none."""

    entropy_coefficient: float = 0.0
    """Factor of the entropy bonus in the loss; 0 is no bonus."""

    prompts_per_step: int = 16
    """Number of prompts of a step, each with ``rollout.n`` completions."""

    mini_batches: int = 1
    """Number of optimizer updates in an epoch over the completions of a step."""

    epochs: int = 1
    """Number of passes over the completions of a step."""

    old_log_probs: Literal["engine", "rollout"] = "engine"
    """Source of the log-probs that the policy's ratio is taken against: the engine before
    the step's updates, or the rollout.
    """

    correction: CorrectionSection = field(default_factory=CorrectionSection)
    """Correction for the difference between the log-probs of the rollout and of the engine."""

    dynamic_sampling: DynamicSamplingSection = field(default_factory=DynamicSamplingSection)
    """Replacement of groups whose rewards are all equal; off by default."""

    overlong: OverlongSection = field(default_factory=OverlongSection)
    """Treatment of completions at the length limit; the default does nothing."""

    def __post_init__(self) -> None:
        at_least("algorithm", self, 0, "clip_low", "clip_high", "entropy_coefficient")
        at_least("algorithm", self, 1, "prompts_per_step", "mini_batches", "epochs")
        if self.aggregation_length is not None:
            at_least("algorithm", self, 1, "aggregation_length")
        _refuse("algorithm", _wrong_choices(self))

    @property
    def whitened(self) -> bool:
        """True if advantages are normalized over the whole step."""
        return self.advantage in WHITENED if self.whiten is None else self.whiten

    @property
    def by_token(self) -> bool:
        """True if advantages differ within a completion.

        If not, they compare the completions of a group.
        """
        return self.advantage in BY_TOKEN


# The parts are: true if it is wrong, then the key and the texts what, why and remedy of the error.
Refusal = tuple[bool, str, str, str, str]


def _refuse(section: str, refusals: Iterator[Refusal]) -> None:
    """Raise ``ConfigError`` for the first refusal whose condition holds."""
    for wrong, name, what, why, remedy in refusals:
        if wrong:
            raise ConfigError(f"{section}.{name}", what, why=why, remedy=remedy)


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
        "use importance: true, another estimator, or where: reward",
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
        f"{target} nats with gain {section.gain}",
        "",
        "give a target above 0, and a gain between 0 and 5 (0.1)",
    )
    yield (
        target is not None and (not in_reward or section.coefficient == 0),
        "target",
        "needs a KL in the reward",
        "the coefficient is adapted from the KL that the rewards were given",
        "set kl.where: reward and a first kl.coefficient above 0 (0.1), or target: null",
    )


def _wrong_choices(section: AlgorithmSection) -> Iterator[Refusal]:
    """Yield a refusal for each combination of values that the algorithm may not have."""
    loss, advantage, dual_clip = section.loss, section.advantage, section.dual_clip
    yield (
        section.clip_low > 1,
        "clip_low",
        f"{section.clip_low} is above 1",
        "no ratio is below 1 - clip_low then",
        "give a number in [0, 1]; 1.0 is no bound from below",
    )
    yield (
        dual_clip is not None and not dual_clip > 1,
        "dual_clip",
        f"{dual_clip} is not above 1",
        "",
        "use 3.0, or null for none",
    )
    yield (
        dual_clip is not None and loss != "ppo",
        "dual_clip",
        f"{dual_clip} with loss {loss}",
        "it bounds PPO's clipped term",
        "set dual_clip: null, or loss: ppo",
    )
    yield (
        not 0 <= section.gamma <= 1,
        "gamma",
        f"{section.gamma} is no discount",
        "",
        "give a number in [0, 1]",
    )
    yield not 0 <= section.lam <= 1, "lam", f"{section.lam} is no λ", "", "give a number in [0, 1]"
    yield (
        section.gamma != 1 and not section.by_token,
        "gamma",
        f"{section.gamma} with advantage {advantage}",
        "it compares whole completions, nothing is discounted",
        "set gamma: 1.0, or advantage: gae or reinforce_pp",
    )
    yield (
        section.lam != 1 and advantage != "gae",
        "lam",
        f"{section.lam} with advantage {advantage}",
        "only gae has a λ",
        "set lam: 1.0, or advantage: gae",
    )
    yield (
        advantage == "gae" and section.critic is None,
        "critic",
        "missing",
        "gae needs values",
        (
            "write `critic: {optimizer: {lr: 1.0e-5}}`, "
            "or take an advantage without a critic (grpo, reinforce_pp)"
        ),
    )
    yield (
        section.critic is not None and advantage != "gae",
        "critic",
        f"nothing reads it with advantage {advantage}",
        "",
        "set advantage: gae, or critic: null",
    )
    yield (
        loss == "gspo" and section.by_token,
        "loss",
        f"gspo with advantage {advantage}",
        "its ratio and its advantage are of a whole sequence",
        "use loss: gspo_token",
    )
    yield (
        loss.startswith("gspo") and section.aggregation != "seq-mean-token-mean",
        "aggregation",
        f"{section.aggregation} with loss {loss}",
        "GSPO's objective is a mean over sequences (arXiv:2507.18071, eq. 5)",
        "set aggregation: seq-mean-token-mean",
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
        "cannot be used with algorithm.old_log_probs: rollout",
        "the policy's own ratio is then taken against the rollout and corrects for it already",
        "use old_log_probs: engine, or weight: none and reject: none",
    )

"""How completions and rewards become an update: the parts below ``algorithm``. Every field has a reader."""

from __future__ import annotations

from collections.abc import Mapping
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
from engine_trainer.sections import EngineSection, at_least

Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"]
BY_TOKEN = (
    "reinforce_pp",
    "gae",
)  # advantages that differ within a completion; the others compare a group's completions
WHITENED = ("reinforce_pp", "reinforce_pp_baseline", "gae")


@dataclass(frozen=True, kw_only=True)
class KLSection:
    """KL to the reference, which is the model as the run began (with LoRA: the adapter off).

    In the reward it is taken from each token's reward where the advantage is one of tokens (gae, reinforce_pp), else its sum
    from the completion's. With a target the coefficient follows it (arXiv:1909.08593, section 2.2).
    """

    coefficient: float = 0.0  # 0: no reference model is loaded
    estimator: Literal["k1", "k2", "k3"] = "k3"  # Schulman 2020, "Approximating KL divergence"
    where: Literal["loss", "reward"] = "loss"
    target: float | None = None  # nats a completion; null: the coefficient stays
    gain: float = 0.1  # with a target: the paper's K, at most a fifth of it a step

    def __post_init__(self) -> None:
        at_least("algorithm.kl", self, 0, "coefficient")
        if self.target is None:
            return
        if not self.target > 0 or not 0 < self.gain < 5:
            raise ConfigError("algorithm.kl.target", f"{self.target} nats with gain {self.gain}",
                              remedy="give a target above 0, and a gain between 0 and 5 (0.1)")  # fmt: skip
        if self.where != "reward" or self.coefficient == 0:
            raise ConfigError("algorithm.kl.target", "needs a KL in the reward",
                              why="the coefficient is adapted from the KL that the rewards were given",
                              remedy="set kl.where: reward and a first kl.coefficient above 0 (0.1), or target: null")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingSection:
    """Groups whose rewards are all equal are replaced by new prompts (DAPO, arXiv:2503.14476, section 3.2)."""

    enabled: bool = False
    max_rounds: int = 4  # of generation a step; then the step takes what there is

    def __post_init__(self) -> None:
        at_least("algorithm.dynamic_sampling", self, 1, "max_rounds")


@dataclass(frozen=True, kw_only=True)
class OverlongSection:
    """Completions at the length limit (DAPO, section 3.4): a soft penalty over the last ``buffer`` tokens, or no loss."""

    buffer: int = 0  # tokens below rollout.max_new_tokens where the penalty begins; 0: none
    penalty: float = 1.0  # taken from the reward at the limit, linearly less below it
    filter: bool = False  # completions that were cut carry no loss

    def __post_init__(self) -> None:
        at_least("algorithm.overlong", self, 0, "buffer", "penalty")


@dataclass(frozen=True, kw_only=True)
class CorrectionSection:
    """Importance weights and rejection where the rollout's log-probs are not the engine's (docs/rollout-correction.md).

    A ratio is the engine's probability over the rollout's. Weights multiply the policy term; what is rejected carries
    no loss. The two are separate.
    """

    weight: Literal["none", "token", "sequence", "icepop"] = "none"  # token, sequence: truncated at cap
    cap: float = 2.0  # of weight token and sequence
    low: float = 0.5  # of weight icepop: a token ratio below it has the weight 0
    high: float = 5.0  # … and one above it
    reject: Literal["none", "token", "sequence", "geometric"] = "none"  # geometric: the mean log-ratio of a sequence
    reject_low: float = 0.5  # a token or a sequence whose ratio lies below it is rejected
    reject_high: float = 2.0

    def __post_init__(self) -> None:
        at_least("algorithm.correction", self, 1, "cap", "high", "reject_high")
        at_least("algorithm.correction", self, 0, "low", "reject_low")
        for name in ("low", "reject_low"):
            if getattr(self, name) > 1:
                raise ConfigError(f"algorithm.correction.{name}", f"{getattr(self, name)} is above 1",
                                  why="a ratio of 1, where nothing needs correction, would lie outside",
                                  remedy="give a number in [0, 1]")  # fmt: skip

    @property
    def enabled(self) -> bool:
        """Whether anything is corrected."""
        return self.weight != "none" or self.reject != "none"


@dataclass(frozen=True, kw_only=True)
class CriticSection:
    """The critic of PPO: a value model on an engine of its own. Null: as the policy's engine has it."""

    model: ModelSource | None = None  # null: engine.model, with a new head
    backend: str | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)  # total_steps null: the run's
    parallelism: Parallelism | None = None
    precision: Precision | None = None
    memory: Memory | None = None
    lora: LoraConfig | None = None  # null: all of its weights are trained
    options: Mapping[str, Any] | None = None  # the plug-in's own; null: the policy's, if the backend is the same
    value_clip: float | None = 0.2  # about the values before the update, in the unit of rewards; null: none
    epochs: int = 1  # over the step's completions, in algorithm.mini_batches updates each

    def __post_init__(self) -> None:
        at_least("algorithm.critic", self, 1, "epochs")
        if self.value_clip is not None and not self.value_clip > 0:
            raise ConfigError("algorithm.critic.value_clip", f"{self.value_clip} is not above 0",
                              remedy="give a number above 0, or null")  # fmt: skip

    def engine(self, actor: EngineSection) -> EngineSection:
        """The whole section of the critic's engine; ``actor`` is the policy's."""
        backend = self.backend or actor.backend
        options = actor.options if backend == actor.backend else {}
        return replace(
            actor, model_type="value_model", model=self.model or actor.model, backend=backend, optimizer=self.optimizer,
            schedule=self.schedule, parallelism=self.parallelism or actor.parallelism, lora=self.lora,
            precision=self.precision or actor.precision, memory=self.memory or actor.memory,
            options=options if self.options is None else self.options,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AlgorithmSection:
    """How completions and rewards become an update; the estimators and losses are in ``engine_trainer.algorithms``."""

    loss: Literal["ppo", "gspo", "gspo_token", "cispo"] = "ppo"
    advantage: Advantage = "grpo"  # dr_grpo: not divided by the group's standard deviation
    gamma: float = 1.0  # discount, of gae and reinforce_pp
    lam: float = 1.0  # λ of gae
    whiten: bool | None = None  # advantages over all of the step's tokens; null: gae and reinforce_pp(_baseline) do
    critic: CriticSection | None = None  # of gae
    clip_low: float = 0.2  # GSPO's: 3e-4; cispo: 1.0 is no bound from below
    clip_high: float = 0.2  # DAPO's clip-higher: 0.28; GSPO's: 4e-4
    dual_clip: float | None = None  # of ppo; c > 1 (arXiv:1912.09729); null: off
    aggregation: Aggregation = "token-mean"
    kl: KLSection = field(default_factory=KLSection)
    entropy_coefficient: float = 0.0
    prompts_per_step: int = 16
    mini_batches: int = 1  # updates an epoch over the step's completions
    epochs: int = 1
    old_log_probs: Literal["engine", "rollout"] = "engine"  # whose log-probs the ratio is taken against
    correction: CorrectionSection = field(default_factory=CorrectionSection)
    dynamic_sampling: DynamicSamplingSection = field(default_factory=DynamicSamplingSection)
    overlong: OverlongSection = field(default_factory=OverlongSection)

    def __post_init__(self) -> None:
        at_least("algorithm", self, 0, "clip_low", "clip_high", "entropy_coefficient")
        at_least("algorithm", self, 1, "prompts_per_step", "mini_batches", "epochs")
        _check_choices(self)
        if self.correction.enabled and self.old_log_probs == "rollout":
            raise ConfigError("algorithm.correction", "cannot be used with algorithm.old_log_probs: rollout",
                              why="the policy's own ratio is then taken against the rollout and corrects for it already",
                              remedy="use old_log_probs: engine, or weight: none and reject: none")  # fmt: skip

    @property
    def whitened(self) -> bool:
        """Whether advantages are normalized over the whole step."""
        return self.advantage in WHITENED if self.whiten is None else self.whiten

    @property
    def by_token(self) -> bool:
        """Whether advantages differ within a completion; else they compare the completions of a group."""
        return self.advantage in BY_TOKEN


def _check_choices(section: AlgorithmSection) -> None:
    """Raise ``ConfigError`` for what does not go together."""
    refused = [
        (section.clip_low > 1, "clip_low", f"{section.clip_low} is above 1", "no ratio is below 1 - clip_low then",
         "give a number in [0, 1]; 1.0 is no bound from below"),
        (section.dual_clip is not None and not section.dual_clip > 1, "dual_clip", f"{section.dual_clip} is not above 1",
         "", "use 3.0, or null for none"),
        (section.dual_clip is not None and section.loss != "ppo", "dual_clip", f"{section.dual_clip} with loss {section.loss}",
         "it bounds PPO's clipped term", "set dual_clip: null, or loss: ppo"),
        (not 0 <= section.gamma <= 1, "gamma", f"{section.gamma} is no discount", "", "give a number in [0, 1]"),
        (not 0 <= section.lam <= 1, "lam", f"{section.lam} is no λ", "", "give a number in [0, 1]"),
        (section.gamma != 1 and not section.by_token, "gamma", f"{section.gamma} with advantage {section.advantage}",
         "it compares whole completions, nothing is discounted", "set gamma: 1.0, or advantage: gae or reinforce_pp"),
        (section.lam != 1 and section.advantage != "gae", "lam", f"{section.lam} with advantage {section.advantage}",
         "only gae has a λ", "set lam: 1.0, or advantage: gae"),
        (section.advantage == "gae" and section.critic is None, "critic", "missing", "gae needs values",
         "write `critic: {optimizer: {lr: 1.0e-5}}`, or take an advantage without a critic (grpo, reinforce_pp)"),
        (section.critic is not None and section.advantage != "gae", "critic", f"nothing reads it with advantage {section.advantage}",
         "", "set advantage: gae, or critic: null"),
        (section.loss == "gspo" and section.by_token, "loss", f"gspo with advantage {section.advantage}",
         "its ratio and its advantage are of a whole sequence", "use loss: gspo_token"),
        (section.loss.startswith("gspo") and section.aggregation != "seq-mean-token-mean", "aggregation",
         f"{section.aggregation} with loss {section.loss}", "GSPO's objective is a mean over sequences (arXiv:2507.18071, eq. 5)",
         "set aggregation: seq-mean-token-mean"),
    ]  # fmt: skip
    for wrong, name, what, why, remedy in refused:
        if wrong:
            raise ConfigError(f"algorithm.{name}", what, why=why, remedy=remedy)

"""The configurations of ``engine-train sft`` and ``engine-train rl``, and RL's own parts.

Every field has a reader; an unknown key or a value of a wrong type is refused by name (``binding``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine_api.errors import ConfigError
from engine_api.losses import Aggregation
from engine_trainer.sections import (
    AgentSection,
    ColumnsSection,
    DataSection,
    EngineSection,
    EvalSection,
    EvalSet,
    GymDataset,
    GymSection,
    OverlapSection,
    RaySection,
    RewardSection,
    RolloutSection,
    RunSection,
    at_least,
)

__all__ = [
    "AgentSection", "AlgorithmSection", "ColumnsSection", "CorrectionSection", "DataSection", "DynamicSamplingSection", "EngineSection", "EvalSection",
    "EvalSet", "GymDataset", "GymSection", "KLSection", "OverlapSection", "OverlongSection", "RLConfig", "RaySection", "RewardSection", "RolloutSection",
    "RunSection", "SFTConfig",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """``engine-train sft``."""

    engine: EngineSection
    data: DataSection
    run: RunSection
    batch_size: int = 64  # documents a step, over all ranks
    eval: EvalSection | None = None
    rollout: RolloutSection = field(default_factory=RolloutSection)  # only to measure accuracy
    reward: RewardSection | None = None  # with eval: accuracy beside the loss

    def __post_init__(self) -> None:
        at_least("", self, 1, "batch_size")
        _check_eval(self.eval, self.data)


@dataclass(frozen=True, kw_only=True)
class KLSection:
    """KL to the reference, which is the model as the run began (with LoRA: the adapter off)."""

    coefficient: float = 0.0  # 0: no reference model is loaded
    estimator: Literal["k1", "k2", "k3"] = "k3"  # Schulman 2020, "Approximating KL divergence"
    where: Literal["loss", "reward"] = "loss"

    def __post_init__(self) -> None:
        at_least("algorithm.kl", self, 0, "coefficient")


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
class AlgorithmSection:
    """How completions and rewards become an update."""

    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"  # dr_grpo: not divided by the group's standard deviation
    clip_low: float = 0.2
    clip_high: float = 0.2  # DAPO's clip-higher: 0.28
    dual_clip: float | None = None  # c > 1 (arXiv:1912.09729); null: off
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
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ConfigError(
                "algorithm.dual_clip", f"{self.dual_clip} is not above 1", remedy="use 3.0, or null for none"
            )
        if self.correction.enabled and self.old_log_probs == "rollout":
            raise ConfigError("algorithm.correction", "cannot be used with algorithm.old_log_probs: rollout",
                              why="the policy's own ratio is then taken against the rollout and corrects for it already",
                              remedy="use old_log_probs: engine, or weight: none and reject: none")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """``engine-train rl``."""

    engine: EngineSection
    data: DataSection
    run: RunSection
    reward: RewardSection
    rollout: RolloutSection = field(default_factory=RolloutSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    agent: AgentSection | None = None  # conversations with tools; null: one completion
    eval: EvalSection | None = None
    launcher: Literal["none", "ray"] = "none"  # none: this process, or the ranks of torchrun
    ray: RaySection = field(default_factory=RaySection)
    overlap: OverlapSection = field(default_factory=OverlapSection)

    def __post_init__(self) -> None:
        _check_eval(self.eval, self.data)
        if self.rollout.n < 2:
            raise ConfigError("rollout.n", f"{self.rollout.n} completion a prompt", why="a group is compared with itself",
                              remedy="draw at least 2")  # fmt: skip
        if self.algorithm.overlong.buffer > self.rollout.max_new_tokens:
            raise ConfigError("algorithm.overlong.buffer", f"{self.algorithm.overlong.buffer} is above rollout.max_new_tokens",
                              remedy=f"give at most {self.rollout.max_new_tokens}")  # fmt: skip
        _check_overlap(self)
        if self.rollout.temperature == 0:
            raise ConfigError("rollout.temperature", "0 is greedy", why="a group of equal completions teaches nothing",
                              remedy="use 1.0; eval.temperature may be 0")  # fmt: skip


def _check_overlap(config: RLConfig) -> None:
    if config.overlap.mode == "none":
        return
    if config.overlap.mode == "full" and config.agent is not None:
        raise ConfigError("overlap.mode", "full does not go with an agent", why="a conversation is not continued after a sync",
                          remedy="overlap.mode: one_step_off or none")  # fmt: skip
    if config.launcher != "ray" or config.ray.rollouts is None:
        raise ConfigError("overlap.mode", f"{config.overlap.mode} needs replicas of their own",
                          why="beside an engine a rollout waits while it trains", remedy="launcher: ray and ray.rollouts: 1 or more")  # fmt: skip
    if config.algorithm.old_log_probs == "engine" and not config.algorithm.correction.enabled:
        raise ConfigError("overlap.mode", f"{config.overlap.mode} needs a correction", why="older weights made the completions",
                          remedy="algorithm.correction.weight: token, or algorithm.old_log_probs: rollout")  # fmt: skip


def _check_eval(section: EvalSection | None, data: DataSection) -> None:
    if section is not None:
        section.all_sets(data)

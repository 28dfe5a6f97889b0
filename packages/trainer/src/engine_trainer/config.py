"""The configurations of ``engine-train sft``, ``rl``, ``dpo`` and ``rm``.

Every field has a reader; an unknown key or a value of a wrong type is refused by name (``binding``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from engine_api.errors import ConfigError
from engine_trainer.algorithm_sections import (
    AlgorithmSection,
    CorrectionSection,
    CriticSection,
    DynamicSamplingSection,
    KLSection,
    OverlongSection,
)
from engine_trainer.eval_sections import EvalSection, EvalSet, HeldoutSection, check_evaluation
from engine_trainer.sections import (
    AgentSection,
    ColumnsSection,
    DataSection,
    EngineSection,
    GymDataset,
    GymSection,
    OverlapSection,
    PolicyEngineSection,
    PolicyOptimizer,
    RaySection,
    RewardSection,
    RolloutSection,
    RunSection,
    at_least,
)

__all__ = [
    "AgentSection",
    "AlgorithmSection",
    "ColumnsSection",
    "Config",
    "CorrectionSection",
    "CriticSection",
    "DPOConfig",
    "DPOSection",
    "DataSection",
    "DynamicSamplingSection",
    "EngineSection",
    "EvalSection",
    "EvalSet",
    "GymDataset",
    "GymSection",
    "HeldoutSection",
    "KLSection",
    "OverlapSection",
    "OverlongSection",
    "PolicyEngineSection",
    "PolicyOptimizer",
    "RLConfig",
    "RaySection",
    "RewardModelConfig",
    "RewardSection",
    "RolloutSection",
    "RunSection",
    "SFTConfig",
]


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
        _check_accuracy(self.eval, self.reward)
        if self.eval is not None:
            check_evaluation(self.eval, self.data, loss=True)


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """``engine-train rl``."""

    engine: PolicyEngineSection
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
        if self.eval is not None:
            check_evaluation(self.eval, self.data, loss=False)
        if self.rollout.n < 2 and (
            not self.algorithm.by_token or self.algorithm.dynamic_sampling.enabled
        ):
            raise ConfigError(
                "rollout.n",
                f"{self.rollout.n} completion a prompt",
                why="a group is compared with itself",
                remedy="draw at least 2, or use advantage: gae or reinforce_pp without dynamic sampling",
            )
        if self.algorithm.overlong.buffer > self.rollout.max_new_tokens:
            raise ConfigError(
                "algorithm.overlong.buffer",
                f"{self.algorithm.overlong.buffer} is above rollout.max_new_tokens",
                remedy=f"give at most {self.rollout.max_new_tokens}",
            )
        correction = self.algorithm.correction.resolved(
            rollout=self.rollout.name, old_log_probs=self.algorithm.old_log_probs
        )
        object.__setattr__(self, "algorithm", replace(self.algorithm, correction=correction))
        _check_overlap(self)
        if self.rollout.temperature == 0:
            raise ConfigError(
                "rollout.temperature",
                "0 is greedy",
                why="a group of equal completions teaches nothing",
                remedy="use 1.0; eval.temperature may be 0",
            )


def _check_accuracy(section: EvalSection | None, reward: RewardSection | None) -> None:
    """Raise ``ConfigError`` for a reward that judges nothing, or problems that nothing judges."""
    if reward is None:
        if section is not None and section.sets:
            raise ConfigError(
                "eval.sets",
                "without a reward",
                why="their problems are answered and judged",
                remedy="name a reward, or use eval.source alone for the loss",
            )
        if section is not None and section.samples > 1:
            raise ConfigError(
                "eval.samples",
                f"{section.samples} without a reward",
                why="nothing is answered, only the loss is measured",
                remedy="name a reward for the accuracy, or leave it out",
            )
    elif section is None:
        raise ConfigError(
            "reward",
            "nothing reads it without eval",
            why="SFT learns from responses; a reward measures accuracy",
            remedy="name held-out problems (eval.source), or set reward: null",
        )
    elif not section.samples and not section.sets:
        raise ConfigError(
            "reward",
            "nothing reads it with eval.samples: 0",
            why="only the loss is measured",
            remedy="set eval.samples to 1 or more, or reward: null",
        )


def _check_overlap(config: RLConfig) -> None:
    if config.overlap.mode == "none":
        return
    if config.launcher != "ray" or config.ray.rollouts is None:
        raise ConfigError(
            "overlap.mode",
            f"{config.overlap.mode} needs replicas of their own",
            why="beside an engine a rollout waits while it trains",
            remedy="launcher: ray and ray.rollouts: 1 or more",
        )
    if config.algorithm.old_log_probs == "engine" and not config.algorithm.correction.enabled:
        raise ConfigError(
            "overlap.mode",
            f"{config.overlap.mode} needs a correction",
            why="older weights made the completions",
            remedy="algorithm.correction.weight: token, or algorithm.old_log_probs: rollout",
        )


@dataclass(frozen=True, kw_only=True)
class DPOSection:
    """Direct preference optimization (arXiv:2305.18290); the losses are in ``engine_trainer.algorithms.preference``."""

    beta: float = 0.1  # nats⁻¹: how dear it is to leave the reference
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    reference: Literal["precomputed", "engine"] = (
        "precomputed"  # once, before the first step; or by a second engine each step
    )

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ConfigError(
                "dpo.beta", f"{self.beta} is not above 0", remedy="give a number above 0 (0.1)"
            )


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """``engine-train rm``: a value model that scores the chosen document of a pair above the rejected one."""

    engine: EngineSection
    data: DataSection
    run: RunSection
    batch_size: int = 64  # pairs a step, over all ranks
    eval: HeldoutSection | None = None

    def __post_init__(self) -> None:
        _check_pairs(self, "value_model")


@dataclass(frozen=True, kw_only=True)
class DPOConfig:
    """``engine-train dpo``."""

    engine: PolicyEngineSection
    data: DataSection
    run: RunSection
    batch_size: int = 64  # pairs a step, over all ranks
    dpo: DPOSection = field(default_factory=DPOSection)
    eval: HeldoutSection | None = None

    def __post_init__(self) -> None:
        _check_pairs(self, "language_model")


Config = SFTConfig | RLConfig | DPOConfig | RewardModelConfig


def _check_pairs(config: DPOConfig | RewardModelConfig, model_type: str) -> None:
    at_least("", config, 1, "batch_size")
    engine, data = config.engine, config.data
    if engine.model_type != model_type:
        raise ConfigError(
            "engine.model_type",
            f"{engine.model_type!r}",
            why=f"this trains a {model_type}",
            remedy=f"set engine.model_type: {model_type}",
        )
    if engine.lora is not None and engine.lora.dropout > 0:
        raise ConfigError(
            "engine.lora.dropout",
            f"{engine.lora.dropout} with pairs",
            why="the slopes of the loss are taken in one forward pass and used in another",
            remedy="set it to 0",
        )
    if data.reasoning_gym is not None:
        raise ConfigError(
            "data.reasoning_gym",
            "gives no pairs",
            remedy="name a file with chosen and rejected in data.source",
        )
    for name in ("messages", "response", "answer"):
        if getattr(data.columns, name) is not None:
            raise ConfigError(
                f"data.columns.{name}",
                "nothing reads it for pairs",
                remedy="columns are named prompt, chosen and rejected; data.columns.prompt renames the first",
            )

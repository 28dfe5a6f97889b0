"""The configuration of ``engine-train rl``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from engine_api.errors import ConfigError
from engine_trainer.config.algorithm import AlgorithmSection
from engine_trainer.config.evaluation import EvalSection, check_evaluation
from engine_trainer.config.sections import (
    AgentSection,
    DataSection,
    OverlapSection,
    PolicyEngineSection,
    RaySection,
    RewardSection,
    RolloutSection,
    RunSection,
)


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """The configuration of ``engine-train rl``."""

    engine: PolicyEngineSection
    """Engine of the policy."""

    data: DataSection
    """Prompts to train on."""

    run: RunSection
    """Length of the run and the files it writes."""

    reward: RewardSection
    """Reward that scores the completions."""

    rollout: RolloutSection = field(default_factory=RolloutSection)
    """Rollout that generates the completions, and its sampling."""

    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    """Advantage, loss and correction that turn completions into an update."""

    agent: AgentSection | None = None
    """Conversations with tools; null generates one completion for each sample."""

    eval: EvalSection | None = None
    """Held-out problems to measure; null measures none."""

    launcher: Literal["none", "ray"] = "none"
    """Way in which the processes start: ``none`` uses this process or the ranks of torchrun,
    ``ray`` the workers of a cluster.
    """

    ray: RaySection = field(default_factory=RaySection)
    """Cluster and workers of ``launcher: ray``."""

    overlap: OverlapSection = field(default_factory=OverlapSection)
    """Overlap of generation and training; off by default."""

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
                remedy="draw at least 2, "
                "or use advantage: gae or reinforce_pp without dynamic sampling",
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

"""The configuration of ``engine-train sft``."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_api.errors import ConfigError
from engine_trainer.config.evaluation import EvalSection, check_evaluation
from engine_trainer.config.sections import (
    DataSection,
    EngineSection,
    RewardSection,
    RolloutSection,
    RunSection,
    at_least,
)


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """The configuration of ``engine-train sft``."""

    engine: EngineSection
    """Engine of the model to train."""

    data: DataSection
    """Documents to train on."""

    run: RunSection
    """Length of the run and the files it writes."""

    batch_size: int = 64
    """Number of documents in a step, over all ranks."""

    eval: EvalSection | None = None
    """Held-out problems to measure; null measures none."""

    rollout: RolloutSection = field(default_factory=RolloutSection)
    """Rollout of the evaluation, read only to measure accuracy."""

    reward: RewardSection | None = None
    """Reward that measures accuracy in addition to the loss, which needs ``eval``; null
    measures the loss only.
    """

    def __post_init__(self) -> None:
        at_least("", self, 1, "batch_size")
        _check_accuracy(self.eval, self.reward)
        if self.eval is not None:
            check_evaluation(self.eval, self.data, loss=True)


def _check_accuracy(section: EvalSection | None, reward: RewardSection | None) -> None:
    """Raise ``ConfigError`` for a reward that scores nothing, or problems that nothing scores."""
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

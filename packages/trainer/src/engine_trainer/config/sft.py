"""The configuration of ``engine-train sft``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine_trainer.config.checks import AT_LEAST_1, Refusal, refuse, require
from engine_trainer.config.evaluation import EvalSection, check_evaluation
from engine_trainer.config.sections import (
    DataSection,
    EngineSection,
    RewardSection,
    RolloutSection,
    RunSection,
)


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """The configuration of ``engine-train sft``."""

    engine: EngineSection
    """Engine of the model to train."""

    data: DataSection
    """Documents to train on."""

    run: RunSection
    """Length of the run, and the files that it writes."""

    batch_size: int = 64
    """Number of documents in a step, over all ranks, at least 1."""

    eval: EvalSection | None = None
    """Held-out documents whose loss is measured, and with ``reward`` the problems in them, whose
    accuracy is measured, too. Null measures neither.
    """

    rollout: RolloutSection = field(default_factory=RolloutSection)
    """Rollout that generates completions of the held-out problems, read only with ``reward``."""

    reward: RewardSection | None = None
    """Reward that measures the accuracy on held-out problems, which needs ``eval``. Null measures
    the loss only.
    """

    def __post_init__(self) -> None:
        require("", self, {"batch_size": AT_LEAST_1})
        refuse("", _wrong_accuracy(self.eval, self.reward))
        if self.eval is not None:
            check_evaluation(self.eval, self.data, loss=True)


def _wrong_accuracy(section: EvalSection | None, reward: RewardSection | None) -> Iterator[Refusal]:
    """Yield a refusal of a reward that scores nothing, and of problems that nothing scores."""
    sets = 0 if section is None else len(section.sets)
    samples = 0 if section is None else section.samples
    yield (
        reward is None and sets > 0,
        "eval.sets",
        f"expected none without a reward, got {sets}",
        "a set by name is measured by its accuracy, which needs completions and their scores",
        "name a reward, or use eval.source alone for the loss",
    )
    yield (
        reward is None and samples > 1,
        "eval.samples",
        f"expected at most 1 without a reward, got {samples}",
        "no completions are generated, only the loss is measured",
        "name a reward for the accuracy, or leave it out",
    )
    yield (
        reward is not None and section is None,
        "reward",
        "nothing reads it without eval",
        "SFT learns from responses; a reward measures accuracy",
        "name held-out problems (eval.source), or set reward: null",
    )
    yield (
        reward is not None and not samples and not sets,
        "reward",
        "nothing reads it with eval.samples: 0",
        "only the loss is measured",
        "set eval.samples to 1 or more, or reward: null",
    )

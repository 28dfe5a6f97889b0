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
    """The configuration of ``engine-train sft``, which ``engine-train eval`` reads, too."""

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

    With ``reward`` a set may have problems without responses, of which only the accuracy is
    measured.
    """

    rollout: RolloutSection = field(default_factory=RolloutSection)
    """Rollout that generates completions of the held-out problems, read only with ``reward``."""

    reward: RewardSection | None = None
    """Reward that measures the accuracy on held-out problems, which needs ``eval``. Null measures
    the loss only.
    """

    def __post_init__(self) -> None:
        require("", self, {"batch_size": AT_LEAST_1})
        refuse("", _wrong_accuracy(self))
        if self.eval is not None:
            check_evaluation(self.eval, self.data, loss=True)


def _wrong_accuracy(config: SFTConfig) -> Iterator[Refusal]:
    """Yield a refusal of a reward that scores nothing, and of completions that nothing scores."""
    section, reward = config.eval, config.reward
    samples = {} if section is None else _samples(section, config.data)
    for key, count in samples.items():
        yield (
            reward is None and count > 1,
            key,
            f"expected at most 1 without a reward, got {count}",
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
        reward is not None and section is not None and not any(samples.values()),
        "reward",
        "nothing reads it with eval.samples: 0",
        "only the loss is measured",
        "set eval.samples to 1 or more, or reward: null",
    )


def _samples(section: EvalSection, data: DataSection) -> dict[str, int]:
    """Return the number of completions of a problem in each set, by the key that gives it."""
    found = {} if section.own_set(data) is None else {"eval.samples": section.samples}
    for name, one in section.sets.items():
        key = "eval.samples" if one.samples is None else f"eval.sets.{name}.samples"
        found[key] = section.samples if one.samples is None else one.samples
    return found

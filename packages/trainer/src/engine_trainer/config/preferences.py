"""The configuration of ``engine-train dpo`` and ``engine-train rm``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine_api.errors import ConfigError
from engine_trainer.config.evaluation import HeldoutSection
from engine_trainer.config.sections import (
    DataSection,
    EngineSection,
    PolicyEngineSection,
    RunSection,
    at_least,
)


@dataclass(frozen=True, kw_only=True)
class DPOSection:
    """Direct preference optimization (arXiv:2305.18290).

    The losses are in ``engine_trainer.algorithms.preference``.
    """

    beta: float = 0.1
    """Strength of the pull towards the reference model, in nats⁻¹, above 0."""

    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """Loss over the difference of the log-ratios of a pair (see
    ``engine_trainer.algorithms.preference``).
    """

    reference: Literal["precomputed", "engine"] = "precomputed"
    """Source of the reference's log-probs: ``precomputed`` once before the first step, or a
    second ``engine`` at each step.
    """

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ConfigError(
                "dpo.beta", f"{self.beta} is not above 0", remedy="give a number above 0 (0.1)"
            )


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """The configuration of ``engine-train rm``.

    It trains a value model that scores the chosen document of a pair above the rejected one.
    """

    engine: EngineSection
    """Engine of the reward model, whose ``model_type`` must be ``value_model``."""

    data: DataSection
    """Pairs to train on."""

    run: RunSection
    """Length of the run and the files it writes."""

    batch_size: int = 64
    """Number of pairs in a step, over all ranks."""

    eval: HeldoutSection | None = None
    """Held-out pairs to measure; null measures none."""

    def __post_init__(self) -> None:
        _check_pairs(self, "value_model")


@dataclass(frozen=True, kw_only=True)
class DPOConfig:
    """The configuration of ``engine-train dpo``."""

    engine: PolicyEngineSection
    """Engine of the policy."""

    data: DataSection
    """Pairs to train on."""

    run: RunSection
    """Length of the run and the files it writes."""

    batch_size: int = 64
    """Number of pairs in a step, over all ranks."""

    dpo: DPOSection = field(default_factory=DPOSection)
    """Settings of the DPO loss."""

    eval: HeldoutSection | None = None
    """Held-out pairs to measure; null measures none."""

    def __post_init__(self) -> None:
        _check_pairs(self, "language_model")


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
                remedy="columns are named prompt, chosen and rejected; "
                "data.columns.prompt renames the first",
            )

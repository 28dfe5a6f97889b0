"""The configuration of ``engine-train dpo`` and ``engine-train rm``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine_trainer.config.checks import ABOVE_0, AT_LEAST_0, AT_LEAST_1, Refusal, refuse, require
from engine_trainer.config.evaluation import HeldoutSection
from engine_trainer.config.named import check_options
from engine_trainer.config.sections import (
    DataSection,
    EngineSection,
    PolicyEngineSection,
    RunSection,
)
from engine_trainer.extensions.built_in import PAIR_LOSSES


@dataclass(frozen=True, kw_only=True)
class DPOSection:
    """Direct preference optimization (arXiv:2305.18290).

    The margin of a pair is the difference of its two responses' log-ratios to the reference model,
    each summed over the assistant's tokens.
    """

    beta: float = 0.1
    """Strength β of the pull towards the reference model, in nats⁻¹, above 0."""

    loss: str = "sigmoid"
    """Loss of a pair: a built-in name, that of an installed package (entry points of
    ``engine_trainer.pair_losses``), or a function of your own as ``file.py:function``.

    With the margin h, built in are -log σ(β h) (``sigmoid``; with ``label_smoothing`` conservative
    DPO), ``robust`` (without the bias of wrong labels), max(0, 1 - β h) (``hinge``), (h - 1 / (2
    β))² (``ipo``), ``sigmoid_norm`` (h of means over tokens), and without a reference model
    ``simpo`` and ``orpo``.
    """

    loss_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of the loss, by the names of its parameters. A loss that has a parameter ``beta``
    gets it from the key of this name.
    """

    sft_coefficient: float = 0.0
    """Factor, at least 0, of the chosen response's mean negative log-prob a token, which is added
    to the loss (RPO, arXiv:2404.19733). 0 adds nothing.
    """

    reference: Literal["precomputed", "engine"] = "precomputed"
    """Source of the log-probs of the reference, which is the model as the run began.

    ``precomputed`` takes them once, when the run starts or is resumed. ``engine`` takes them in
    each step, from a second engine, or from the policy with its adapter (``engine.lora``) off. A
    loss without a reference reads none.
    """

    def __post_init__(self) -> None:
        require("dpo", self, {"beta": ABOVE_0, "sft_coefficient": AT_LEAST_0})
        check_options(PAIR_LOSSES, self.loss, self.loss_options, ("beta",))
        refuse("dpo", _wrong_loss(self))

    @property
    def reads_reference(self) -> bool:
        """True if the loss reads the log-probs of the reference."""
        return PAIR_LOSSES.traits(self.loss).reference


@dataclass(frozen=True, kw_only=True)
class RewardModelSection:
    """The loss of a reward model, -log σ of the difference of a pair's scores."""

    margin: str | None = None
    """Column with the distance that a pair's scores should have, a number (Llama 2,
    arXiv:2307.09288, eq. 2). It is subtracted from the difference. Null asks for none.
    """

    center: float = 0.0
    """Factor, at least 0, of the square of the sum of a pair's scores, which is added to the loss
    and keeps the mean score near 0 (arXiv:2312.09244). 0 adds nothing; 0.01 is the paper's.

    The head's bias learns from it, too, and the saved classifier has none. The log says by how much
    its scores are lower.
    """

    def __post_init__(self) -> None:
        require("rm", self, {"center": AT_LEAST_0})


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """The configuration of ``engine-train rm``.

    It trains a value model that scores the chosen document of a pair above the rejected one.
    """

    engine: EngineSection
    """Engine of the reward model, whose ``model_type`` is ``value_model``."""

    data: DataSection
    """Pairs to train on."""

    run: RunSection
    """Length of the run, and the files that it writes."""

    batch_size: int = 64
    """Number of pairs in a step, over all ranks, at least 1."""

    rm: RewardModelSection = field(default_factory=RewardModelSection)
    """Loss of a pair."""

    eval: HeldoutSection | None = None
    """Held-out pairs to measure. Null measures none."""

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
    """Length of the run, and the files that it writes."""

    batch_size: int = 64
    """Number of pairs in a step, over all ranks, at least 1."""

    dpo: DPOSection = field(default_factory=DPOSection)
    """Loss of a pair, and its reference model."""

    eval: HeldoutSection | None = None
    """Held-out pairs to measure. Null measures none."""

    def __post_init__(self) -> None:
        _check_pairs(self, "language_model")


def _wrong_loss(section: DPOSection) -> Iterator[Refusal]:
    """Yield a refusal for each value that nothing reads with the loss."""
    yield (
        section.beta != DPOSection.beta and not PAIR_LOSSES.reads(section.loss, "beta"),
        "beta",
        f"nothing reads {section.beta} with loss {section.loss}",
        "it has no parameter beta",
        f"leave it at {DPOSection.beta}",
    )
    yield (
        section.reference == "engine" and not section.reads_reference,
        "reference",
        f"expected precomputed with loss {section.loss}, got engine",
        "the loss reads no reference, a second engine would hold memory in vain",
        "leave it out",
    )


def _check_pairs(config: DPOConfig | RewardModelConfig, model_type: str) -> None:
    require("", config, {"batch_size": AT_LEAST_1})
    refuse("", _wrong_pairs(config, model_type))


def _wrong_pairs(config: DPOConfig | RewardModelConfig, model_type: str) -> Iterator[Refusal]:
    """Yield a refusal for each combination of values that a run over pairs may not have."""
    engine, data = config.engine, config.data
    yield (
        engine.model_type != model_type,
        "engine.model_type",
        f"expected {model_type}, got {engine.model_type!r}",
        f"this trains a {model_type}",
        f"set engine.model_type: {model_type}",
    )
    dropout = 0.0 if engine.lora is None else engine.lora.dropout
    yield (
        dropout > 0,
        "engine.lora.dropout",
        f"expected 0 with pairs, got {dropout}",
        "the slopes of the loss are taken in one forward pass and used in another",
        "set it to 0",
    )
    yield (
        data.reasoning_gym is not None,
        "data.reasoning_gym",
        "expected null with pairs, got a section",
        "generated problems have no chosen and rejected responses",
        "name a file with chosen and rejected in data.source",
    )
    for name in ("messages", "response", "answer"):
        column = getattr(data.columns, name)
        yield (
            column is not None,
            f"data.columns.{name}",
            f"expected null with pairs, got {column!r:.100}",
            "nothing reads it for pairs",
            "columns are named prompt, chosen and rejected; data.columns.prompt renames the first",
        )

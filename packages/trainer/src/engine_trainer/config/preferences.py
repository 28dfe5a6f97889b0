"""The configurations of ``engine-train dpo``, ``engine-train kto`` and ``engine-train rm``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine_trainer.config.checks import ABOVE_0, AT_LEAST_0, AT_LEAST_1, Refusal, refuse, require
from engine_trainer.config.evaluation import HeldoutSection, LabelledEvalSection
from engine_trainer.config.named import check_options
from engine_trainer.config.sections import (
    DataSection,
    EngineSection,
    PolicyEngineSection,
    RunSection,
    wrong_balance,
)
from engine_trainer.extensions.built_in import PAIR_LOSSES, UNPAIRED_LOSSES


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
class KTOSection:
    """Kahneman-Tversky optimization (arXiv:2402.01306): completions labelled desirable or not.

    A row's log-ratio to the reference model is summed over the tokens of its completion.
    """

    beta: float = 0.1
    """Strength β of the pull towards the reference model, in nats⁻¹, above 0."""

    loss: str = "kto"
    """Loss of a row: a built-in name, that of an installed package (entry points of
    ``engine_trainer.unpaired_losses``), or a function of your own as ``file.py:function``.

    With the log-ratio h and the baseline z, built in are σ(β (z - h)) of a desirable row and σ(β
    (h - z)) of an undesirable one (``kto``), and the same with z = 0 (``apo_zero_unpaired``). z is
    the mean log-ratio of the step's prompts with the completions of other rows, at least 0.
    """

    loss_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of the loss, by the names of its parameters. A loss that has a parameter ``beta``
    gets it from the key of this name.
    """

    desirable: float = 1.0
    """Factor, at least 0, of the losses of desirable rows.

    Where one label is rarer, the paper chooses the factors such that the sums of both labels'
    factors are alike, with up to a third more for the desirable rows.
    """

    undesirable: float = 1.0
    """Factor, at least 0, of the losses of undesirable rows."""

    label: str = "label"
    """Column with the label of each row: true (desirable) or false, or 1 or 0."""

    reference: Literal["precomputed", "engine"] = "precomputed"
    """Source of the log-probs of the reference, which is the model as the run began.

    ``precomputed`` takes them once, when the run starts or is resumed. ``engine`` takes them in
    each step, from a second engine, or from the policy with its adapter (``engine.lora``) off.
    """

    def __post_init__(self) -> None:
        require("kto", self, {"beta": ABOVE_0, "desirable": AT_LEAST_0, "undesirable": AT_LEAST_0})
        check_options(UNPAIRED_LOSSES, self.loss, self.loss_options, ("beta",))
        refuse("kto", _wrong_kto(self))

    @property
    def reads_baseline(self) -> bool:
        """True if the loss reads the log-ratios of prompts with other rows' completions."""
        return UNPAIRED_LOSSES.traits(self.loss).baseline


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


@dataclass(frozen=True, kw_only=True)
class KTOConfig:
    """The configuration of ``engine-train kto``."""

    engine: PolicyEngineSection
    """Engine of the policy."""

    data: DataSection
    """Labelled completions to train on."""

    run: RunSection
    """Length of the run, and the files that it writes."""

    batch_size: int = 64
    """Number of rows in a step, over all ranks, at least 1, or 2 with a loss that has a
    baseline.
    """

    kto: KTOSection = field(default_factory=KTOSection)
    """Loss of a row, and its reference model."""

    eval: LabelledEvalSection | None = None
    """Held-out labelled completions to measure. Null measures none."""

    def __post_init__(self) -> None:
        require("", self, {"batch_size": AT_LEAST_1})
        refuse("", _wrong_rows(self))


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


def _wrong_kto(section: KTOSection) -> Iterator[Refusal]:
    """Yield a refusal for each value of the section that cannot be meant."""
    yield (
        section.beta != KTOSection.beta and not UNPAIRED_LOSSES.reads(section.loss, "beta"),
        "beta",
        f"nothing reads {section.beta} with loss {section.loss}",
        "it has no parameter beta",
        f"leave it at {KTOSection.beta}",
    )
    yield (
        section.desirable == section.undesirable == 0,
        "desirable",
        "expected a number above 0 for one of the labels, got 0 for both",
        "every loss would be 0",
        "give kto.desirable or kto.undesirable a number above 0",
    )


def _wrong_rows(config: KTOConfig) -> Iterator[Refusal]:
    """Yield a refusal for each combination of values that a run of KTO may not have."""
    yield from _wrong_engine(config.engine, "language_model", "labelled rows")
    yield wrong_balance(config.engine.options, "kto")
    yield (
        config.batch_size < 2 and config.kto.reads_baseline,
        "batch_size",
        f"expected a number of at least 2 with loss {config.kto.loss}, got {config.batch_size}",
        "the baseline is measured on prompts with the completions of other rows of the step",
        "give at least 2; the estimate gets better with more",
    )
    yield from _wrong_data(
        config.data,
        "labelled rows",
        "prompt, completion and label in data.source",
        ("answer", "images", "videos"),
    )


def _check_pairs(config: DPOConfig | RewardModelConfig, model_type: str) -> None:
    require("", config, {"batch_size": AT_LEAST_1})
    refuse("", _wrong_pairs(config, model_type))


def _wrong_pairs(config: DPOConfig | RewardModelConfig, model_type: str) -> Iterator[Refusal]:
    """Yield a refusal for each combination of values that a run over pairs may not have."""
    yield from _wrong_engine(config.engine, model_type, "pairs")
    yield wrong_balance(config.engine.options, "rm" if model_type == "value_model" else "dpo")
    yield from _wrong_data(
        config.data,
        "pairs",
        "chosen and rejected in data.source",
        ("messages", "response", "answer", "images", "videos"),
        remedy="columns are named prompt, chosen and rejected; data.columns.prompt renames the "
        "first",
    )


def _wrong_engine(engine: EngineSection, model_type: str, noun: str) -> Iterator[Refusal]:
    """Yield a refusal for each value of the engine that does not fit.

    ``noun`` names the rows in the messages.
    """
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
        f"expected 0 with {noun}, got {dropout}",
        "the slopes of the loss are taken in one forward pass and used in another",
        "set it to 0",
    )


def _wrong_data(
    data: DataSection,
    noun: str,
    needed: str,
    unread: tuple[str, ...],
    remedy: str = "leave it out",
) -> Iterator[Refusal]:
    """Yield a refusal for each value of the data that does not fit.

    Args:
        data: the section.
        noun: name of the rows in the messages.
        needed: what a file must have.
        unread: keys of ``data.columns`` that nothing reads.
        remedy: advice for such a key.
    """
    yield (
        data.reasoning_gym is not None,
        "data.reasoning_gym",
        f"expected null with {noun}, got a section",
        "generated problems have no responses with a label or a rank",
        f"name a file with {needed}",
    )
    for name in unread:
        column = getattr(data.columns, name)
        yield (
            column is not None,
            f"data.columns.{name}",
            f"expected null with {noun}, got {column!r:.100}",
            f"nothing reads it for {noun}",
            remedy,
        )
    unused = {
        "on_bad_image": "error",
        "processor_kwargs": {},
        "video_fps": 2.0,
        "video_processor_kwargs": {},
    }
    for name, default in unused.items():
        value = getattr(data, name)
        yield (
            value != default,
            f"data.{name}",
            f"expected {default!r} with {noun}, got {value!r:.100}",
            f"no images are read for {noun}",
            "leave it out",
        )

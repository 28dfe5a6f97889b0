"""The parts that the configurations of the tasks share, each a frozen dataclass.

The parts below ``engine`` are the contract's own dataclasses, so that the settings of an engine
are defined once. Every field has a reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from engine_api.balance import BALANCE_LOSS
from engine_api.config import (
    CheckpointConfig,
    EngineConfig,
    LoraConfig,
    Memory,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    Precision,
    ScheduleConfig,
)
from engine_api.errors import ConfigError
from engine_trainer.config.checks import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    FINITE_ABOVE_0,
    FRACTION,
    FRACTION_ABOVE_0,
    FRAMES_PER_SECOND,
    Refusal,
    refuse,
    require,
)
from engine_trainer.config.combined_reward import COMBINE, parts_of, refuse_limits_without_workers
from engine_trainer.config.engine_keys import POLICY, named_below

AUTO: Literal["auto"] = "auto"
"""Value that the run replaces by its choice for the device (``placement.automatic``)."""

KEPT_ACTIVATIONS = "kept_activations"
"""Name of the share in ``MemorySection``, and of the engine's option that takes it."""


# Frozen fields are only read, and an engine gets these sections with explicit values alone.
@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionSection(Precision):
    """The dtypes of the stored weights, of the computation and of the gradient reduction."""

    compute: Literal["auto", "float32", "bfloat16", "float16", "float8"] = AUTO  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Dtype of forward and backward. ``float8`` is FP8 in matrix products on CUDA, which
    engine-megatron has with Transformer Engine (scales of blocks), and engine-fsdp, engine-veomni,
    engine-torchtitan and engine-automodel have with torchao (scales of rows or of whole matrices).

    ``auto`` is ``bfloat16`` on CUDA and NPUs where the engine declares it, and ``float32``
    elsewhere.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySection(Memory):
    """Settings that trade time for memory."""

    max_tokens: int | Literal["auto"] = 16384  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Largest number of tokens in a micro-batch of a data-parallel rank, before padding. A document
    is never cut, so that the longest one must fit.

    ``auto`` is the largest of 32768, 16384, 8192 and 4096 whose estimated memory fits into the
    device's free memory without recomputation. ``data.max_length`` (in ``rl`` with
    ``rollout.max_new_tokens``) says how long documents are: without it, and with a teacher, less
    than 16384 is not chosen, and longer documents are refused. On a CPU it is 16384, or that
    length.
    """

    logit_chunk: int | Literal["auto"] = AUTO  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Number of tokens whose logits exist at the same time on a rank.

    ``auto`` is the largest multiple of 256 whose logits take at most 1 GiB, and 4096 on a CPU.
    """

    recompute: Literal["auto", "none", "full"] = AUTO  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Activation checkpointing. ``full`` computes each block's activations again in the backward
    pass, ``none`` keeps them.

    ``auto`` is ``none`` where the estimated memory of ``max_tokens`` tokens fits into the device's
    free memory, and ``full`` elsewhere. On a CPU it is ``none``.
    """

    kept_activations: float | Literal["auto"] = AUTO
    """Share of the results of each block's linear layers, from 0 to below 1, that compiled blocks
    keep for the backward pass with ``recompute: full``. Engines with the option of that name have
    it (engine-fsdp, engine-veomni).

    ``auto`` is 0 unless ``recompute: auto`` chose ``full``. It is then the largest multiple of 0.05
    whose estimated memory fits into the device's free memory. It stays 0 for a model with experts,
    with layers that carry a state, with adapters that have dropout, or with attention that is not
    compiled.
    """

    compile: bool | Literal["auto"] = AUTO  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]
    """True compiles each block with ``torch.compile``, which engine-fsdp, engine-veomni,
    engine-torchtitan and engine-automodel have.

    ``auto`` is true on CUDA where the engine, with its options, declares it and trains a model
    without experts, with ``parallelism.tp: 1`` and its weights on the device, and false elsewhere.
    With ``float8``, which is slower than ``bfloat16`` without it, it is also true where the engine
    only infers.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSection(OptimizerConfig):
    """The optimizer and its hyperparameters."""

    decay: Literal["auto", "all", "matrices"] = AUTO  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Weights that ``weight_decay`` applies to.

    ``matrices`` are the weights that are saved with two dimensions or more, biases excepted: no
    norm, no bias and no other vector decays, as in transformers' Trainer (TRL) and Megatron-LM.
    ``all`` is every trained weight, as in verl's FSDP engine. ``auto`` is ``matrices`` with a
    ``weight_decay`` above 0 where the engine declares ``parameter_groups``, and ``all`` elsewhere.
    """


def token_budget(memory: MemorySection, longest: int | None) -> int | None:
    """Return the tokens of a document that fit into a micro-batch, or None where all will fit.

    Args:
        memory: the section of the engine, of which nothing may have been chosen yet.
        longest: the limit of a document (``data.max_length``), which ``auto`` makes room for.
    """
    if memory.max_tokens != AUTO:
        return memory.max_tokens
    return Memory().max_tokens if longest is None else None


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """The engine of the model that is trained or evaluated, with all of its settings."""

    model: ModelSource
    """Model that the engine loads."""

    backend: str = "fsdp2"
    """Name of the engine, such as ``fsdp2`` or ``megatron``. ``python -m engine_api list`` prints
    the names that are installed.
    """

    device: str = "auto"
    """Type of device that the engine computes on: ``cuda``, ``npu`` or ``cpu``.

    ``auto`` takes the first of them that the engine supports and this machine has. A named device
    is never replaced by a different one.
    """

    model_type: str = "language_model"
    """Type of the model. ``rm`` needs ``value_model``, which has a head with one output, and the
    other tasks need ``language_model``.
    """

    optimizer: OptimizerSection | None = field(default_factory=OptimizerSection)
    """Optimizer of the engine. Null builds an engine that only infers, and a training task then
    fails at its first update.
    """

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over the optimizer updates of the run."""

    parallelism: Parallelism = field(default_factory=Parallelism)
    """Division of the model and the data over the ranks."""

    precision: PrecisionSection = field(default_factory=PrecisionSection)
    """Dtypes of weights, computation and gradient reduction."""

    memory: MemorySection = field(default_factory=MemorySection)
    """Settings that trade time for memory."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Settings for writing checkpoints."""

    lora: LoraConfig | None = None
    """LoRA adapter, which is trained instead of the model's weights. Null trains all weights."""

    seed: int | None = None
    """Seed of weights and adapters that are drawn, and on each rank of dropout. Null is
    ``run.seed``.
    """

    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options that only this engine has. An unknown one is refused with the near matches.

    ``balance_loss``, which spreads tokens over experts, is for ``sft`` alone.
    """

    def build(self, *, seed: int, total_steps: int) -> EngineConfig:
        """Build the configuration that ``EngineRegistry.create`` takes.

        ``seed`` and ``total_steps`` replace the values that are null. A value that is still
        ``auto`` becomes the contract's default (see ``placement.automatic``).

        Raises ``ConfigError`` that names the key below ``engine.``.
        """
        schedule = self.schedule
        if schedule.total_steps is None:
            schedule = replace(schedule, total_steps=total_steps)
        optimizer = None
        if self.optimizer is not None:
            optimizer = OptimizerConfig(**_explicit(self.optimizer))
        memory = _explicit(self.memory)
        kept = memory.pop(KEPT_ACTIVATIONS, 0.0)
        options = dict(self.options)
        # Without updates there is no backward pass to keep activations for.
        keeps = kept != 0 and optimizer is not None
        with named_below(POLICY):
            if keeps:
                _check_kept_activations(self, kept)
                options[KEPT_ACTIVATIONS] = kept
            return EngineConfig(
                model=self.model,
                optimizer=optimizer,
                schedule=schedule,
                parallelism=self.parallelism,
                precision=Precision(**_explicit(self.precision)),
                memory=Memory(**memory),
                checkpoint=self.checkpoint,
                lora=self.lora,
                seed=seed if self.seed is None else self.seed,
                options=options or None,
            )


def wrong_balance(options: Mapping[str, Any], task: str, section: str = "engine") -> Refusal:
    """Return the refusal of a balance loss in a task whose loss it would bend.

    ``options`` are those of the engine of ``section``.
    """
    given = options.get(BALANCE_LOSS, 0)
    key = f"{section}.options.{BALANCE_LOSS}"
    return (
        given not in (0, None),
        key,
        f"expected 0 in {task}, got {given!r:.100}",
        "it would bend the gradient of the task's own loss",
        f"set {key}: 0; it is for sft",
    )


def _check_kept_activations(section: EngineSection, kept: float) -> None:
    """Raise ``ConfigError`` for a share of activations that nothing would keep."""
    memory = section.memory
    if not 0 < kept < 1:
        raise ConfigError(
            f"memory.{KEPT_ACTIVATIONS}",
            f"expected a share from 0 to below 1, got {kept:g}",
            remedy="give such a share; recompute: none keeps all",
        )
    other = section.options.get(KEPT_ACTIVATIONS)
    if other is not None:
        raise ConfigError(
            f"memory.{KEPT_ACTIVATIONS}",
            f"expected it here or in options.{KEPT_ACTIVATIONS}, got {kept:g} and {other!r}",
            remedy="leave one of them out",
        )
    # An ``auto`` is checked when it has been replaced.
    if memory.recompute not in (AUTO, "full") or memory.compile not in (AUTO, True):
        compiles = str(memory.compile).lower()
        raise ConfigError(
            f"memory.{KEPT_ACTIVATIONS}",
            f"expected 0 with recompute: {memory.recompute} and compile: {compiles}, got {kept:g}",
            why="compiled blocks alone recompute some of their activations and keep the others",
            remedy=f"set {KEPT_ACTIVATIONS} to 0, or recompute: full and compile: true",
        )


def _explicit(section: PrecisionSection | MemorySection | OptimizerSection) -> dict[str, Any]:
    """Return the values of a section that are not ``auto``, by field."""
    values = {one.name: getattr(section, one.name) for one in fields(section)}
    return {name: value for name, value in values.items() if value != AUTO}


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOptimizer(OptimizerSection):
    """The optimizer and its hyperparameters."""

    lr: float = 1e-6
    """Largest learning rate, at least 0, which the schedule scales.

    1e-6 is the default of TRL's GRPO and DPO, of verl and of OpenRLHF. It is a tenth of the rate
    of ``sft``, at which a policy that is already trained would move too far. Adapters
    (``engine.lora``) usually need 10 to 100 times as much.
    """


@dataclass(frozen=True, kw_only=True)
class PolicyEngineSection(EngineSection):
    """The engine of the model that is trained or evaluated, with all of its settings."""

    optimizer: PolicyOptimizer | None = field(default_factory=PolicyOptimizer)
    """Optimizer of the policy. Null builds an engine that only infers, and a training task then
    fails at its first update. ``engine-train eval`` sets null by itself.
    """


@dataclass(frozen=True, kw_only=True)
class GymDataset:
    """A reasoning-gym task in a mixture."""

    name: str
    """Name of the reasoning-gym task."""

    weight: float = 1.0
    """Weight of the task in the mixture, relative to the weights of the other tasks."""

    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of the task itself, passed to reasoning-gym."""


@dataclass(frozen=True, kw_only=True)
class GymSection:
    """Problems that reasoning-gym generates, in place of files, for ``sft``, ``rl`` and ``eval``.

    A hash of its text decides whether a question is held out, so that no seed or size puts a
    question on both sides.
    """

    datasets: Sequence[GymDataset]
    """Tasks of the mixture."""

    size: int = 4096
    """Number of training questions, at least 1, all different."""

    skip: int = 0
    """Number of training questions to pass over first.

    With the same ``seed``, SFT on the first 4096 questions and RL with ``skip: 4096`` never meet
    the same question.
    """

    heldout_size: int = 512
    """Number of held-out questions, all different, which an evaluation without a ``source``
    measures. ``skip`` does not change them.
    """

    heldout_share: float = 0.1
    """Fraction in [0, 1] of all questions that is held out, chosen by the SHA-256 of the
    question's text.
    """

    seed: int = 0
    """Seed that the questions are generated from. ``run.seed`` does not change them."""

    response: str = "answer"
    """Form of the responses that SFT learns from: ``answer``, or ``worked`` with the steps written
    out. Only the tasks ``chain_sum`` and ``leg_counting`` have steps.
    """

    worked_share: float = 1.0
    """Fraction in [0, 1] of the questions whose response shows its steps with ``response:
    worked``. The remaining responses have the form ``answer``.
    """

    def __post_init__(self) -> None:
        require(
            "data.reasoning_gym",
            self,
            {
                "size": AT_LEAST_1,
                "skip": AT_LEAST_0,
                "heldout_size": AT_LEAST_0,
                "heldout_share": FRACTION,
                "worked_share": FRACTION,
            },
        )


@dataclass(frozen=True, kw_only=True)
class ColumnsSection:
    """The names of the columns to read, where they are not among the usual names.

    A dot in a name reaches into a nested column. ``dpo`` and ``rm`` accept only ``prompt`` here,
    since their responses are always in the columns ``chosen`` and ``rejected``. The label of
    ``kto`` is named in its own section.
    """

    messages: str | None = None
    """Column with a conversation as a list of ``{role, content}`` or ``{from, value}``, in place of
    ``prompt`` and ``response``. Null is ``messages``, where the rows have it and ``prompt`` is
    null, or in rows without a prompt ``conversations`` or ``conversation``.
    """

    prompt: str | None = None
    """Column with the prompt, as text or as messages. Null is the first of ``prompt``,
    ``question``, ``problem``, ``Problem``, ``instruction`` and ``Question`` that the rows have.
    """

    response: str | None = None
    """Column with the response to the prompt, read by ``sft`` and ``kto``. Null is the first of
    ``response``, ``completion``, ``solution``, ``output``, ``Solution`` and ``answer`` that the
    rows have.
    """

    answer: str | None = None
    """Column with the ground truth that a reward compares with. Null is the first of
    ``reward_model.ground_truth``, ``ground_truth``, ``answer``, ``Answer``, ``solution`` and
    ``Solution`` that the rows have.
    """

    images: str | None = None
    """Column with the images of a row, read by ``sft`` and ``rl``. Null is ``images`` or ``image``,
    where the rows have it.

    It has one image or a list of them. An image is a path relative to the folder of the data file,
    ``data:image/…;base64,…``, bytes, or a mapping ``{bytes, path}``.
    """

    videos: str | None = None
    """Column with the videos of a row, read by ``sft`` and ``rl``. Null is ``videos`` or ``video``,
    where the rows have it.

    It has one video or a list of them. A video is ``{"frames": […], "fps": 2.0}``, each frame as an
    image is written, or an animated GIF, PNG or WebP, written as an image. Inside a list of videos
    it may be the list of its frames alone.
    """

    def __post_init__(self) -> None:
        both = self.messages is not None and (self.prompt is not None or self.response is not None)
        refuse(
            "data.columns",
            [
                (
                    both,
                    "messages",
                    "expected one of the two, messages or prompt and response, got both",
                    "a row is a conversation, or a prompt with a response",
                    "set data.columns.messages: null, or the other two to null",
                )
            ],
        )


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The rows to train on, and their conversion to tokens.

    Held-out rows (``eval``) are converted in the same way.
    """

    source: str | Sequence[str] | None = None
    """File (.jsonl, .json, .csv, .parquet or .arrow, the first three also with .gz), folder of such
    files, folder that ``save_to_disk`` of Hugging Face ``datasets`` wrote, name on the hub
    (``hf://datasets/owner/name``), or a list of these.

    A .json file is a list of rows, and the first row of a .csv file names the columns. In a folder
    they are read only where there are no files of the other kinds. Null needs ``reasoning_gym``,
    which ``dpo``, ``kto`` and ``rm`` refuse.
    """

    reasoning_gym: GymSection | None = None
    """Generated problems in place of ``source``. Null reads ``source``."""

    split: str | None = None
    """Split of the source. Null reads all of it, and is refused where a folder has several splits.

    In a folder, the files of a split have its name (train.jsonl, train-00000-of-00002.parquet) or
    lie in a folder of that name.
    """

    columns: ColumnsSection = field(default_factory=ColumnsSection)
    """Names of the columns to read."""

    tokenizer: str | None = None
    """Folder or hub id of the tokenizer, and of the processor of images. Null is
    ``engine.model.path``.
    """

    chat_template: str | None = None
    """Jinja text or path of a .jinja file. Null is the tokenizer's own template.

    Where there is none, a row must be one prompt with one response. A rendering may use 10 s of
    processor time and 1 GiB of memory.
    """

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Variables that are passed to the chat template, such as ``enable_thinking``."""

    system_prompt: str | None = None
    """System message for rows that begin with none, which needs a chat template. Null adds no
    message.
    """

    prompt_template: str = "{prompt}"
    """Text around the last user turn, which takes the place of ``{prompt}``."""

    train_on: Literal["all", "last"] = "all"
    """Assistant turns that carry loss in ``sft``, ``dpo`` and ``kto``: all of them, or the last one
    only.

    A chat template that drops thoughts from earlier turns needs ``last``. Messages in a prompt
    column never carry loss.
    """

    max_length: int | None = None
    """Largest number of tokens of a document (``sft``, ``kto``), of a prompt (``rl``), or of each
    document of a pair (``dpo``, ``rm``).

    Null leaves the limit to the model's context, of which a prompt must leave
    ``rollout.max_new_tokens``, and of documents to ``engine.memory.max_tokens``. The lowest limit
    counts.
    """

    on_too_long: Literal["error", "drop", "truncate"] = "error"
    """Treatment of a row above the limit: raise an error, drop the row, or truncate it.

    A truncated document keeps its beginning, a truncated prompt its end. Pairs and labelled rows
    are never truncated, so that ``truncate`` is an error for them. A document is never truncated
    inside its images, but dropped.
    """

    on_bad_image: Literal["error", "drop"] = "error"
    """Treatment of a row whose images or videos cannot be used: raise an error, or drop the row and
    count it (``data/bad_images``).

    An image whose header is right is decoded where its step begins. There, ``drop`` leaves the
    document of ``sft`` or the prompt of ``rl`` out of its step (``train/bad_images``), and a
    held-out row out of its measurement (``eval/bad_images``).
    """

    processor_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of the model's image processor in place of its own, such as ``size``, which are
    saved with the model. Read only for rows with images.
    """

    video_fps: float = 2.0
    """Frames in a second of a video whose row gives no ``fps``, from 0.001 to 1000.

    All frames of a list are shown, so far apart. Of an animated file as many are taken. A video has
    at most as many frames as the model's video processor takes, or 768.
    """

    video_processor_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of the model's video processor in place of its own, such as ``size``, which are
    saved with the model. Read only for rows with videos.
    """

    shuffle: bool = True
    """True shuffles the rows, in a new order for each pass over them. False keeps their order."""

    seed: int | None = None
    """Seed of the order of the rows. Null is ``run.seed``."""

    def __post_init__(self) -> None:
        require("data", self, {"max_length": AT_LEAST_1, "video_fps": FRAMES_PER_SECOND})
        refuse("data", _wrong_data(self))


def _wrong_data(section: DataSection) -> Iterator[Refusal]:
    """Yield a refusal for each combination of values that the data may not have."""
    given = "both" if section.source else "neither"
    yield (
        (not section.source) == (section.reasoning_gym is None),
        "source",
        f"give data.source or data.reasoning_gym, one of the two, got {given}",
        "",
        "data.source: a .jsonl, .json, .csv or .parquet file, a folder, hf://datasets/owner/name",
    )
    yield (
        section.split is not None and section.source is None,
        "split",
        f"expected null without data.source, got {section.split!r:.100}",
        "generated problems have no files",
        "set data.split=null",
    )
    yield (
        "{prompt}" not in section.prompt_template,
        "prompt_template",
        f"expected a text with {{prompt}}, got {section.prompt_template!r:.200}",
        "",
        "write {prompt} where the question goes",
    )


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """The length of a run, its folder, and the files that it writes and keeps.

    ``engine-train eval`` reads only ``output_dir``, ``resume``, ``seed`` and ``timeout_s``, but a
    length must be given.
    """

    output_dir: str
    """Folder that the run writes checkpoints, logs and reports to. No two runs may write to it at
    the same time.
    """

    steps: int | None = None
    """Number of steps of the run. Null needs ``epochs``, and one of the two must be null.

    A step of ``sft``, ``dpo``, ``kto`` and ``rm`` is one optimizer update on ``batch_size`` rows. A
    step of ``rl`` generates for ``algorithm.prompts_per_step`` prompts and makes
    ``algorithm.epochs`` × ``algorithm.mini_batches`` updates.
    """

    epochs: float | None = None
    """Number of passes over the data, rounded down to whole steps, of which there is at least one.
    Null needs ``steps``.

    Prompts that ``algorithm.dynamic_sampling`` draws in addition are not counted.
    """

    seed: int = 0
    """Seed of the order of the data, of weights and adapters that are drawn, of sampling, and on
    each rank of dropout and of the numbers that user code draws from the global generators of
    Python, NumPy and torch.

    Reward functions in processes of their own (``reward.workers``) are not seeded. Generated
    problems have ``data.reasoning_gym.seed``.
    """

    log_every: int = 1
    """Number of steps from one logged step to the next. Steps with an evaluation and the last step
    are always logged.
    """

    save_minutes: float = 10.0
    """Minutes from the start of one save to the next checkpoint, which is saved after the step that
    runs then. 0 saves none by time.

    In addition to these, and to those of ``save_every``, a run that Ctrl-C or SIGTERM stops saves
    a checkpoint, and so does a run that fails, if the weights are those of its last complete step
    and all ranks can take part.
    """

    save_every: int = 0
    """Number of steps from one checkpoint to the next. 0 saves none by number."""

    save_last: bool = True
    """True saves a checkpoint after the last step."""

    keep: int = 2
    """Number of newest checkpoints to keep. 0 keeps all."""

    resume: str = "auto"
    """Checkpoint to continue from: ``auto``, ``never``, or a checkpoint's folder.

    ``auto`` continues from the newest checkpoint of ``output_dir``, or begins where there is none.
    ``never`` begins, and refuses an ``output_dir`` that has checkpoints. Model, adapter, data,
    ``batch_size`` and ``run.seed`` must be those of the checkpoint.

    ``engine-train eval`` measures a checkpoint that is named here, and ``engine.model`` as it is
    with ``auto`` and ``never``. In addition it accepts the folder of a run.
    """

    save_hf: bool = True
    """True writes the trained model, with its adapter merged, and the tokenizer as a Hugging Face
    folder to ``output_dir/hf`` after the last step.
    """

    hf_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the weights in ``output_dir/hf``. Null is ``engine.precision.compute``, and bfloat16
    for ``float8``. ``engine-train export`` writes a checkpoint in any of them.
    """

    push_to_hub: str | None = None
    """Repository on the Hugging Face Hub, ``owner/name``, that ``output_dir/hf`` is pushed to after
    the last step. Null pushes nothing.

    It is created before the first step, private, where there is none. The token is that of
    ``HF_TOKEN`` or of ``hf auth login``.
    """

    keep_best: str | None = None
    """Figure of the evaluations, such as ``eval/accuracy``, whose best step keeps its checkpoint.
    Null keeps none.

    A checkpoint is saved after each evaluation with a better figure, ``checkpoints/best`` names it,
    and ``keep`` does not count it. Lower is better for a loss and a perplexity, and higher for any
    other figure. ``output_dir/hf`` is the model of the last step: ``engine-train export
    OUTPUT_DIR/checkpoints/best DIR`` writes the best one.
    """

    patience: int | None = None
    """Number of evaluations in a row without a better ``keep_best`` after which the run ends. Null
    never ends it early.
    """

    tensorboard: bool = True
    """True writes metrics for TensorBoard to ``output_dir/tensorboard``. ``metrics.jsonl`` has the
    same metrics in any case.
    """

    wandb: str | None = None
    """Project on Weights & Biases that metrics, samples of evaluations and configuration are sent
    to. Null sends nothing.
    """

    trackio: str | None = None
    """Project of trackio that metrics, samples of evaluations and configuration are logged to.
    trackio keeps them on this machine, unless its environment variables name a server. Null logs
    nothing.
    """

    rollouts: int | Literal["all", "none"] = 64
    """Completions of each step that ``rl`` keeps in ``output_dir/rollouts``, one Parquet file per
    step, with the numbers that were used for each token: ``all``, ``none``, or a number of at
    least 1.

    A number keeps whole groups from all parts of the step, the last of which may be cut. A token
    takes about 30 bytes before compression. The default keeps 64 completions, which are a few
    megabytes per step where completions have thousands of tokens. Other tasks keep none.
    """

    record_experts: bool = True
    """True keeps with ``rollouts: all`` the experts of each token, where
    ``rollout.routed_experts`` is ``replay``, without which ``engine-train replay`` cannot make a
    step again.

    They are most of such a file: a token takes as many bits as layers × experts a token × log₂ of
    the experts, 337 bytes with 48 layers and 8 of 128 experts. A number of ``rollouts`` keeps none.
    """

    show_samples: int = 3
    """Number of completions of each evaluation that are shown in the terminal, shortened, and whole
    in TensorBoard, Weights & Biases and trackio. All evaluations show the same problems. 0 shows
    none.
    """

    progress: bool = True
    """True shows a progress bar in the terminal, with the current phase. Where standard error is no
    terminal, it prints a line every ten seconds instead.
    """

    report: bool = True
    """True writes ``report.html`` to ``output_dir`` when the run ends. It is one page with curves,
    samples, held-out problems, the environment and the configuration.
    """

    profile_steps: Sequence[int] = field(default_factory=list[int])
    """Numbers of the steps, from 1, to record with torch's profiler. Each process writes its trace
    of step 5 to ``output_dir/profile/step-000005``.
    """

    timeout_s: float = 3600.0
    """Seconds that a live rank may keep other ranks waiting between calls of the engine, after
    which the run ends with ``RankFailure``.

    The limit bounds how much longer one rank may generate, score or read than another. Inside
    calls of the engine, and for a rank that is stopped, ``engine.options.timeout_s`` holds. A rank
    whose process has ended is noticed within seconds. ``launcher: ray`` reads ``ray.timeout_s``
    instead.
    """

    def __post_init__(self) -> None:
        refuse("run", [*_wrong_length(self), *_wrong_best(self), _wrong_rollouts(self)])
        require(
            "run",
            self,
            {
                "log_every": AT_LEAST_1,
                "save_minutes": AT_LEAST_0,
                "save_every": AT_LEAST_0,
                "keep": AT_LEAST_0,
                "patience": AT_LEAST_1,
                "show_samples": AT_LEAST_0,
                "timeout_s": FINITE_ABOVE_0,
            },
        )

    def total_steps(self, samples: int, batch_size: int, *, key: str, data: DataSection) -> int:
        """Return the number of steps of the whole run.

        ``epochs`` counts whole batches only, and at least one.

        Args:
            samples: the number of samples of ``data``, without those that were dropped.
            batch_size: the number of samples of a step.
            key: the configuration's key of ``batch_size``, for errors.
            data: the section of the data, for errors.

        Raises ``ConfigError`` for fewer samples than a batch, which would have some of them twice.
        """
        if samples < batch_size:
            raise ConfigError(
                "data.source",
                f"{samples} rows of {data.source or 'data.reasoning_gym'} are left, "
                f"but a step takes {batch_size}",
                why="rows that data.on_too_long or data.on_bad_image drops do not count",
                remedy=f"give more rows, or a smaller {key}",
            )
        if self.steps is not None:
            return self.steps
        return max(1, int((self.epochs or 0) * samples) // batch_size)


def _wrong_rollouts(section: RunSection) -> Refusal:
    """Return the refusal of a number of completions below 1."""
    return (
        isinstance(section.rollouts, int) and section.rollouts < 1,
        "rollouts",
        f"expected all, none or {AT_LEAST_1.words}, got {section.rollouts}",
        "",
        "run.rollouts=none keeps no completions",
    )


def _wrong_length(section: RunSection) -> Iterator[Refusal]:
    """Yield a refusal for each length that a run may not have."""
    given = "neither" if section.steps is None else "both"
    yield (
        (section.steps is None) == (section.epochs is None),
        "steps",
        f"give run.steps or run.epochs, one of the two, got {given}",
        "",
        "set run.steps: 100, and run.epochs: null",
    )
    for name, length in (("steps", section.steps), ("epochs", section.epochs)):
        yield (
            length is not None and not FINITE_ABOVE_0.holds(length),
            name,
            f"expected {FINITE_ABOVE_0.words}, got {length}",
            "",
            "give a number above 0; `engine-train eval` measures a model without training it",
        )


def _wrong_best(section: RunSection) -> Iterator[Refusal]:
    """Yield a refusal for each setting about the best step that has no effect."""
    metric = section.keep_best
    yield (
        metric is not None and not metric.startswith("eval/"),
        "keep_best",
        f"expected a figure of an evaluation, got {metric!r}",
        "",
        "name one that begins with eval/, such as eval/accuracy or eval/loss",
    )
    yield (
        section.push_to_hub is not None and not section.save_hf,
        "push_to_hub",
        f"{section.push_to_hub!r}, but run.save_hf is false",
        "it is the folder output_dir/hf that is pushed",
        "set run.save_hf: true, or run.push_to_hub: null",
    )
    yield (
        section.patience is not None and metric is None,
        "patience",
        f"{section.patience}, but run.keep_best is null",
        "the run must know which figure should become better",
        "set run.keep_best: eval/accuracy, or run.patience: null",
    )


@dataclass(frozen=True, kw_only=True)
class RolloutSection:
    """The rollout, which generates completions for training and for evaluations."""

    name: str = AUTO
    """Name of the rollout. ``local`` generates with transformers and a copy of the weights in the
    trainer's process, ``vllm`` and ``sglang`` serve the model with these servers.

    ``auto`` is ``vllm`` where it is installed and supports the rollout's device, else ``sglang``,
    else ``local``; on a CPU ``local`` comes first. A rollout that lacks what this section asks for
    is passed over. With ``options.url`` it is ``vllm-server``, else ``sglang-server``.
    """

    device: str = "auto"
    """Type of device that the rollout computes on: ``cuda``, ``npu`` or ``cpu``. ``auto`` is the
    device of the engine.
    """

    n: int = 8
    """Number of completions of a prompt in training. Evaluations have ``eval.samples``.

    It is at least 2, except with ``algorithm.advantage: gae`` or ``reinforce_pp`` and without
    ``algorithm.dynamic_sampling``, where no completions are compared with each other.
    """

    max_new_tokens: int = 256
    """Largest number of tokens of a completion, or with ``agent`` of a whole conversation after its
    prompt, in training and in evaluations.
    """

    temperature: float = 1.0
    """Divisor of the logits in training, both where tokens are sampled and where the engine
    computes their log-probs. Evaluations have ``eval.temperature``.

    ``rl`` refuses 0, which is greedy decoding: equal completions teach nothing.
    """

    top_p: float = 1.0
    """Fraction in (0, 1] of the probability mass that tokens are sampled from, the most probable
    ones first, in training and in evaluations. 1 keeps all tokens.

    Log-probs are those before this truncation and that of ``top_k``.
    """

    top_k: int = 0
    """Number of most probable tokens to sample from, in training and in evaluations. 0 keeps all
    tokens.
    """

    batch_size: int = 64
    """Number of completions that a replica generates at the same time. More are faster, and need
    more memory.

    ``local`` generates all completions of a prompt together, also where that is more.
    """

    quantization: Literal["none", "fp8"] = "none"
    """Number format of the rollout's weights: that of its dtype, or ``fp8``, which is blockwise
    e4m3 and served by ``vllm`` and ``sglang``.
    """

    lora: Literal["merged", "adapter"] = "merged"
    """Form in which the adapter of ``engine.lora`` reaches the rollout: ``merged`` into the
    weights, or as ``adapter``, which ``vllm`` serves.

    With ``adapter`` a sync brings the base weights only where the rollout does not have them: once
    with ``sleep: false``, and again after each sleep. It is refused with ``ray.rollouts``.
    """

    routed_experts: Literal["off", "replay"] = "off"
    """Experts of a mixture that serve the tokens in the engine. With ``off`` the engine's routers
    select them, and with ``replay`` they are those that the rollout recorded, in old log-probs and
    in updates.

    The weights of the experts are those of the engine's own routers, which learn. ``local`` and
    ``vllm`` record, and the engine must declare ``router_replay``, as ``fsdp2`` does. The reference
    model and the critic select their own. It is refused with ``engine.memory.share_prefixes``.
    """

    sleep: bool = True
    """True frees the memory of the rollout's weights and caches while it does not generate.

    Replicas of ``ray.rollouts`` never sleep, because they share no device with an engine.
    """

    offload_engine: bool = False
    """True moves the weights and the optimizer's state of policy, reference and critic to the host
    while the rollout generates.

    The engine must declare ``offload``, as ``fsdp2`` does. It is refused with ``ray.rollouts``, and
    has no effect on an engine that computes on the CPU.
    """

    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options that only this rollout has. An unknown one is refused.

    ``dtype`` is one of every rollout: ``float32``, ``bfloat16`` or ``float16``, by default the
    engine's ``precision.compute`` (``bfloat16`` where that is ``float8``).
    """

    def __post_init__(self) -> None:
        require(
            "rollout",
            self,
            {
                "n": AT_LEAST_1,
                "max_new_tokens": AT_LEAST_1,
                "batch_size": AT_LEAST_1,
                "temperature": AT_LEAST_0,
                "top_k": AT_LEAST_0,
                "top_p": FRACTION_ABOVE_0,
            },
        )


@dataclass(frozen=True, kw_only=True)
class RaySection:
    """The cluster and the workers of ``launcher: ray``."""

    address: str | None = None
    """Address of the Ray cluster, ``host:port``, or ``auto`` for the one that this node belongs to.
    Null starts a cluster on this machine for this run only.
    """

    engines: int = 1
    """Number of ranks of the engines, each in a process of its own that holds one rank of policy,
    reference and critic.
    """

    rollouts: int | None = None
    """Number of replicas of the rollout in processes of their own. Null colocates one with each
    rank of the engine, time-shared with it.
    """

    gpus_per_worker: float | None = None
    """Number of GPUs (or NPUs) of each worker. Null is 1.

    It is not read where ``engine.device`` is ``cpu``, or is ``auto`` and the cluster has no
    accelerator.
    """

    cpus_per_worker: float = 1.0
    """Number of processors of each worker."""

    timeout_s: float = 1800.0
    """Seconds that a call of a worker may take. A worker that is silent for longer counts as
    lost.
    """

    start_timeout_s: float = 120.0
    """Seconds until the cluster has free resources for the workers, and again until the workers
    have started.
    """

    restarts: int = 3
    """Largest number of restarts from the last checkpoint after a worker or a node was lost. One
    more loss ends the run.
    """

    elastic: bool = False
    """True replaces a lost replica of ``rollouts`` while the run goes on. The other replicas take
    its prompts, and a new one joins with the current weights. False starts all workers again from
    the last checkpoint, as a lost worker of the engines always does.

    After more than ``restarts`` losses of the same replica without work in between, it is not
    replaced any more. A run without any replica ends.
    """

    imports: Sequence[str] = field(default_factory=list[str])
    """Modules that each worker imports first, which register engines, rollouts or rewards in their
    process.
    """

    log_workers: bool = False
    """True shows the output of the workers, which is always in Ray's session folder."""

    def __post_init__(self) -> None:
        require(
            "ray",
            self,
            {
                "engines": AT_LEAST_1,
                "cpus_per_worker": AT_LEAST_0,
                "restarts": AT_LEAST_0,
                "timeout_s": ABOVE_0,
                "start_timeout_s": ABOVE_0,
                "rollouts": AT_LEAST_1,
                "gpus_per_worker": AT_LEAST_0,
            },
        )


@dataclass(frozen=True, kw_only=True)
class OverlapSection:
    """The overlap of generation with training.

    It needs replicas of their own (``launcher: ray`` and ``ray.rollouts``), and a correction for
    older weights (``algorithm.correction``, or ``algorithm.old_log_probs: rollout``).
    """

    mode: Literal["none", "one_step_off", "full"] = "none"
    """Work that overlaps. With ``none`` a step generates, then trains.

    With ``one_step_off`` the completions of a step are generated while the previous step is trained
    on. With ``full`` replicas stop only for a weight sync, and completions that began before it
    continue after it with the new weights.
    """

    in_flight: bool | Literal["auto"] = AUTO
    """Updates of the weights in the middle of completions, in the mode ``full``. True pauses the
    rollout between two tokens for each weight sync, and false generates slices of
    ``slice_tokens``.

    ``auto`` is true for a rollout that takes weights while it generates with all that the run asks
    of it, as ``vllm`` does, and false for others and with an agent. The log names the choice and
    its reason.
    """

    max_staleness: int = 1
    """Number of steps that the weights behind a token may be older than the policy. An older token
    carries no loss, and is counted in ``rollout/stale_tokens``.

    In the mode ``full`` it also bounds the groups that are begun ahead of the step that takes them.
    """

    slice_tokens: int = 64
    """Number of tokens of a completion after which a weight sync may interrupt it, in the mode
    ``full`` where ``in_flight`` is false. Fewer tokens shorten the wait for a sync, and cost more
    calls.
    """

    def __post_init__(self) -> None:
        require("overlap", self, {"max_staleness": AT_LEAST_1, "slice_tokens": AT_LEAST_1})


@dataclass(frozen=True, kw_only=True)
class RewardSection:
    """The reward, a function that scores completions, given by name or as a user's own function.

    A user's own function takes an ``engine_trainer.rewards.Sample`` and returns a number. Calls of
    an ``async def`` run concurrently.
    """

    name: str | None = None
    """Name of a reward: ``math``, ``gsm8k``, ``exact``, ``reasoning_gym``, ``reward_model`` for the
    score of a trained model, ``combine`` for a weighted sum of several, or one of the entry-point
    group ``engine_trainer.rewards``.

    Null needs ``function``.
    """

    function: str | None = None
    """User's own function in place of ``name``, as ``path/to/file.py:name`` or
    ``package.module:name``. Null needs ``name``.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the function, or of the factory that ``name`` stands for. ``combine`` has one,
    the list ``rewards``. ``reward_model`` needs ``path``, and has ``device``, ``dtype``,
    ``batch_size``, ``revision`` and ``trust_remote_code``.
    """

    timeout_s: float | None = 10.0
    """Seconds that a call may take, after which it counts 0. Null sets no limit.

    The process of a plain function that takes longer is killed and replaced, whatever the function
    does. A coroutine is cancelled. One that blocks its event loop is interrupted two seconds later,
    and its process is killed after two more. Imports inside the function count. Slow imports belong
    at the top of the file, which each process loads once and outside of the clock, within two
    minutes. A limit needs ``workers`` above 0.
    """

    workers: int = 1
    """Largest number of processes that score completions, for each replica of the rollout.

    They load the function's file in place of the process of the replica. With 0 that process itself
    calls the function, for a function that needs its memory or its device. Nothing can then end a
    call, so that ``timeout_s`` must be null.
    """

    concurrency: int = 64
    """Number of calls of an ``async def`` function that run at the same time in each process. A
    plain function is called for one completion after the other.
    """

    max_failures: int = 0
    """Number of calls of a run that may raise, return no finite number, or end their process, and
    count 0. One more ends the run.
    """

    max_timeouts: int | None = 64
    """Number of calls of a reward in a row on a replica that may exceed ``timeout_s``. One more
    ends the run, and null sets no limit.
    """

    def __post_init__(self) -> None:
        require(
            "reward",
            self,
            {
                "workers": AT_LEAST_0,
                "max_failures": AT_LEAST_0,
                "concurrency": AT_LEAST_1,
                "max_timeouts": AT_LEAST_0,
                "timeout_s": ABOVE_0,
            },
        )
        refuse("reward", _wrong_reward(self))
        limits = {self.name or self.function or "": self.timeout_s}
        if self.name == COMBINE:
            limits = {part.title: part.timeout_s for part in parts_of(self.kwargs, self.timeout_s)}
        if self.workers == 0:
            refuse_limits_without_workers(limits)


def _wrong_reward(section: RewardSection) -> Iterator[Refusal]:
    """Yield a refusal of a reward that is given twice, and of one that is not given."""
    name, function = section.name, section.function
    choice = "give reward.name or reward.function, one of the two"
    yield (
        name is None and function is None,
        "name",
        f"{choice}, got neither",
        "",
        "reward.name: math, or reward.function: rewards.py:score",
    )
    # A recipe may name one reward, and the command line a different one.
    yield (
        name is not None and function is not None,
        "name",
        f"{choice}, got both",
        "",
        f"reward.name: null for {function}, or reward.function: null for {name}",
    )


@dataclass(frozen=True, kw_only=True)
class AgentSection:
    """Conversations of several turns with tools, each in place of a completion.

    ``rollout.max_new_tokens`` then limits the whole conversation after the prompt, the output of
    tools included. A conversation that meets a limit ends there, unfinished.
    """

    function: str
    """``async def`` function that leads a conversation, as ``path/to/file.py:name`` or
    ``package.module:name``. It takes an ``engine_trainer.agent.Episode``.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the function, in addition to the episode."""

    max_turns: int = 8
    """Largest number of the model's turns in a conversation."""

    max_turn_tokens: int | None = None
    """Largest number of the model's tokens in a turn. Null is the number of tokens that are
    left.
    """

    timeout_s: float | None = 300.0
    """Seconds of the function's own time in a conversation, tools included and the model's time
    excluded. Null sets no limit.
    """

    concurrency: int = 64
    """Number of conversations that a replica of the rollout leads at the same time."""

    max_failures: int = 0
    """Number of conversations of a run in which the function may raise. One more ends the run."""

    def __post_init__(self) -> None:
        require(
            "agent",
            self,
            {
                "max_turns": AT_LEAST_1,
                "concurrency": AT_LEAST_1,
                "max_failures": AT_LEAST_0,
                "max_turn_tokens": AT_LEAST_1,
                "timeout_s": ABOVE_0,
            },
        )


def positive_option(rollout: RolloutSection, name: str, default: int = 1) -> int:
    """Return an option of the rollout that the trainer reads, too.

    Raises ``ConfigError`` for a value that is not a positive integer.
    """
    value: object = rollout.options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        key = f"rollout.options.{name}"
        raise ConfigError(
            key,
            f"expected a positive integer, got {value!r:.100}",
            remedy="give an integer of at least 1",
        )
    return value

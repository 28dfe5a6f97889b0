"""The configuration that is the same for every engine, as one frozen dataclass per concern.

Options that only one engine knows belong to its plug-in's own options dataclass
(``EngineConfig.options``). Every field has a reader; a value that an engine cannot honour is
refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from engine_api.errors import ConfigError

DType = Literal["float32", "bfloat16", "float16", "float8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """The source of the model: a Hugging Face folder or hub id."""

    path: str
    """Folder in Hugging Face format, or hub id; it has no default."""

    revision: str | None = None
    """Branch, tag or commit of the hub id; None takes the hub's default branch."""

    init: Literal["pretrained", "random"] = "pretrained"
    """Origin of the weights: the folder's own, or drawn from ``seed`` after only ``config.json``
    is read (*random*)."""

    trust_remote_code: bool = False
    """Permission to run Python code that comes with the model; off because it runs unchecked."""

    attention: str = "auto"
    """Name of the engine's attention kernel for packed documents; *auto* lets the engine choose by
    device and dtype. The engine's documentation lists the names."""

    config_overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keys of the model's ``config.json`` with values that replace those in the file; none by
    default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer and its hyperparameters."""

    name: str = "adamw"
    """Optimizer: ``adamw`` (fused where the device has it), or the import path of a torch optimizer
    such as ``torch.optim.SGD``."""

    lr: float = 1e-5
    """Largest learning rate; the schedule scales it. 1e-5 suits supervised fine-tuning."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's first and second moment per step, with the defaults of
    ``torch.optim.AdamW``; only ``adamw`` reads them."""

    eps: float = 1e-8
    """Term that AdamW adds to the denominator, with the default of ``torch.optim.AdamW``; only
    ``adamw`` reads it."""

    weight_decay: float = 0.0
    """Decoupled decay of every trained weight, norms and biases included, scaled by the learning
    rate; 0 is no decay.

    It is ``torch.optim.AdamW`` over one group, as in verl's FSDP engine. transformers' Trainer
    (TRL) and Megatron-LM leave norms and biases out. By the contract an engine has no parameter
    groups, so that the same configuration gives the same weights on each engine. At the learning
    rates of post-training the difference is small (a rate of 1e-6 and a decay of 0.1 take a
    ten-thousandth off a norm in 1,000 steps).
    """

    clip_norm: float | None = 1.0
    """Largest global 2-norm of the gradient, to which larger gradients are scaled; None turns
    clipping off."""

    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of the optimizer's constructor by name; none by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """The learning rate over optimizer steps.

    See ``engine_api.schedule.lr_factor``.
    """

    name: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up; *constant* needs no length of the run."""

    warmup_steps: int = 0
    """Number of optimizer steps over which the learning rate rises linearly to ``lr``; 0 is no
    warm-up."""

    total_steps: int | None = None
    """Number of optimizer steps, warm-up included, after which the learning rate stays at its
    minimum; *linear* and *cosine* need it, *constant* leaves it None."""

    min_ratio: float = 0.0
    """Learning rate at ``total_steps`` as a fraction of ``lr``, in [0, 1]; 0 decays to zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """Sizes of each kind of parallelism, whose product without ``ep`` is the world size.

    Experts are spread over ranks that are data or sequence parallel for all other weights, so
    ``ep`` divides the number of those ranks.
    """

    dp_shard: int = -1
    """Number of data-parallel ranks that share one copy of the training state; -1 is the world size
    divided by the other sizes, so that the defaults fit every world."""

    dp_replicate: int = 1
    """Number of copies of the sharded training state; above 1 it is hybrid sharding (HSDP)."""

    tp: int = 1
    """Number of tensor-parallel ranks; 1 turns tensor parallelism off."""

    pp: int = 1
    """Number of pipeline stages; 1 turns pipeline parallelism off."""

    cp: int = 1
    """Number of context-parallel ranks; 1 turns context parallelism off."""

    ep: int = 1
    """Number of expert-parallel ranks; 1 turns expert parallelism off."""

    ulysses: int = 1
    """Number of Ulysses sequence-parallel ranks; 1 turns Ulysses off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Dtypes of the stored weights, of the computation and of the gradient reduction.

    All defaults are float32, the widest of the choices.
    """

    master: DType = "float32"
    """Dtype in which the weights are stored and the optimizer updates them."""

    compute: DType = "float32"
    """Dtype of forward and backward."""

    reduce: DType = "float32"
    """Dtype in which gradients are summed over ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Settings that trade time for memory."""

    max_tokens: int = 16384
    """Token budget of a micro-batch on one data-parallel rank; a single document must fit in it."""

    pad_to_multiple: int = 1
    """Number of tokens to a multiple of which micro-batches are padded, for steadier shapes; 1 is
    no padding."""

    logit_chunk: int = 4096
    """Number of tokens whose logits exist at the same time."""

    recompute: Literal["none", "full"] = "none"
    """Activation checkpointing: *full* recomputes each block in the backward pass, *none* keeps all
    activations."""

    compile: bool = False
    """Switch for ``torch.compile`` of each block."""

    offload_params: bool = False
    """Switch that keeps weights, gradients and optimizer state on the CPU and streams them to the
    device block by block; off because it is slower."""

    offload_optimizer: bool = False
    """Switch that keeps the optimizer state on the CPU between steps; off because it is slower."""

    reshard_after_forward: bool = True
    """Switch that frees the gathered weights of a block after its forward pass and gathers them
    again in the backward pass; on because it needs less memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Settings for writing checkpoints."""

    async_save: bool = False
    """Switch that writes checkpoints in a thread, so that ``save_checkpoint`` returns a handle that
    is not yet done; off because the thread needs a copy of the state on the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): W + alpha/rank · B A."""

    rank: int = 16
    """Rank of the matrices A and B, at least 1."""

    alpha: float = 32.0
    """Numerator of the adapter's scale ``alpha / rank``; the default gives a scale of 2."""

    dropout: float = 0.0
    """Probability of dropping an input of the adapter in training, in [0, 1); 0 is no dropout."""

    target_modules: Sequence[str] | str = "all-linear"
    """Layers that get an adapter, as PEFT reads them: a list of module names, a pattern, or
    *all-linear* for all linear layers except the output layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The configuration of an engine, complete except for the data."""

    model: ModelSource
    """Source of the model; it has no default."""

    optimizer: OptimizerConfig | None = field(default_factory=OptimizerConfig)
    """Optimizer and its hyperparameters; None makes an engine for inference only."""

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over optimizer steps; constant by default."""

    parallelism: Parallelism = field(default_factory=Parallelism)
    """Sizes of each kind of parallelism; by default all ranks are sharded data parallel."""

    precision: Precision = field(default_factory=Precision)
    """Dtypes of storage, computation and gradient reduction; all float32 by default."""

    memory: Memory = field(default_factory=Memory)
    """Settings that trade time for memory."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Settings for writing checkpoints."""

    lora: LoraConfig | None = None
    """Low-rank adapter, which then trains instead of the base weights; None trains all weights."""

    seed: int = 0
    """Seed of random weights, of adapters, and of every generator that training draws from
    (dropout), by rank."""

    options: Any = None
    """Instance of the plug-in's own options dataclass, or a mapping with its fields; None takes the
    defaults of that dataclass."""

    def __post_init__(self) -> None:
        _check_positive("memory", self.memory, ("max_tokens", "pad_to_multiple", "logit_chunk"))
        _check_positive(
            "parallelism", self.parallelism, ("dp_replicate", "tp", "pp", "cp", "ep", "ulysses")
        )
        if self.parallelism.dp_shard != -1:
            _check_positive("parallelism", self.parallelism, ("dp_shard",))
        for section in ("model", "schedule", "precision", "memory"):
            _check_choices(section, getattr(self, section))
        _check_schedule(self.schedule)
        if self.optimizer:
            _check_optimizer(self.optimizer)
        if self.lora and self.lora.rank < 1:
            raise ConfigError(
                "lora.rank",
                f"expected an integer >= 1, got {self.lora.rank}",
                remedy="give an integer >= 1, or lora: null",
            )
        if self.lora and not 0 <= self.lora.dropout < 1:
            raise ConfigError(
                "lora.dropout",
                f"expected a probability in [0, 1), got {self.lora.dropout}",
                remedy="give a number from 0 up to, but not including, 1",
            )


def build_options(options: Any, cls: type[Any]) -> Any:
    """Turn a mapping (or None, or a ready object) into the plug-in's options dataclass.

    Raises ``ConfigError`` for an unknown key, with the near matches.
    """
    if isinstance(options, cls):
        return options
    if options is None:
        return cls()
    if not isinstance(options, Mapping):
        raise ConfigError(
            "options", f"{type(options).__name__} given", remedy=f"give a mapping or {cls.__name__}"
        )
    known = [f.name for f in fields(cls)]
    given = cast("Mapping[str, Any]", options)
    for key in given:
        if key not in known:
            raise ConfigError(f"options.{key}", "unknown key", remedy=near_matches(str(key), known))
        _check_option(str(key), given[key], get_type_hints(cls)[key])
    return cls(**given)


def _check_option(name: str, value: object, hint: Any) -> None:
    """Raise ``ConfigError`` for an option of a type other than the annotated one.

    A boolean is not accepted as a number.
    """
    fits: dict[Any, tuple[type, ...]] = {
        bool: (bool,),
        int: (int,),
        float: (int, float),
        str: (str,),
    }
    if hint in fits and type(value) not in fits[hint]:
        raise ConfigError(
            f"options.{name}",
            f"{value!r} is a {type(value).__name__}",
            remedy=f"give a value of type {hint.__name__}",
        )


def near_matches(name: str, known: Sequence[str]) -> str:
    """Return a remedy text with the near matches of ``name``, or with all known names."""
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known: {', '.join(sorted(known)) or 'none'}"


def _check_positive(section: str, part: object, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(part, name)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{section}.{name}",
                f"{value!r} is not a positive integer",
                remedy="give an integer >= 1",
            )


def _check_choices(section: str, part: object) -> None:
    for name, hint in get_type_hints(type(part)).items():
        value = getattr(part, name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            remedy = near_matches(str(value), get_args(hint))
            raise ConfigError(f"{section}.{name}", f"{value!r} is not a choice", remedy=remedy)


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    if not optimizer.lr >= 0:
        raise ConfigError(
            "optimizer.lr", f"{optimizer.lr} is not a learning rate", remedy="give a number >= 0"
        )
    if optimizer.clip_norm is not None and not optimizer.clip_norm > 0:
        raise ConfigError(
            "optimizer.clip_norm",
            f"{optimizer.clip_norm} is not a positive norm",
            why="gradients would vanish or change sign",
            remedy="give a number > 0; null turns clipping off",
        )
    given = [
        name
        for name in ("betas", "eps")
        if getattr(optimizer, name) != getattr(OptimizerConfig(), name)
    ]
    if given and optimizer.name != "adamw":
        raise ConfigError(
            f"optimizer.{given[0]}",
            f"belongs to adamw, the optimizer is {optimizer.name}",
            remedy=f"put it under optimizer.kwargs: {{{given[0]}: …}}",
        )


def _check_schedule(schedule: ScheduleConfig) -> None:
    if schedule.warmup_steps < 0:
        raise ConfigError(
            "schedule.warmup_steps", f"{schedule.warmup_steps} is negative", remedy="give 0 or more"
        )
    if not 0 <= schedule.min_ratio <= 1:
        raise ConfigError(
            "schedule.min_ratio",
            f"expected a fraction of the learning rate in [0, 1], got {schedule.min_ratio}",
            remedy="give 0 to 1",
        )
    if schedule.name == "constant" and schedule.min_ratio:
        raise ConfigError(
            "schedule.min_ratio",
            f"{schedule.min_ratio} given, but a constant schedule never falls",
            remedy="schedule.name: linear or cosine, or leave it out",
        )
    if schedule.name != "constant" and not schedule.total_steps:
        raise ConfigError(
            "schedule.total_steps",
            "missing",
            why=f"schedule {schedule.name} needs the step at which it ends",
            remedy="set it to the number of optimizer steps of the run",
        )

"""The configuration that is the same for every engine: one frozen dataclass a concern.

What only one engine knows stands in its plug-in's own options dataclass
(``EngineConfig.options``). Every field has a reader; a value that an engine
cannot honour is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from engine_api.errors import ConfigError

DType = Literal["float32", "bfloat16", "float16", "float8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """Where the model comes from: a Hugging Face folder or hub id."""

    path: str
    revision: str | None = None
    init: Literal["pretrained", "random"] = (
        "pretrained"  # random: only config.json is read, weights from the seed
    )
    trust_remote_code: bool = False
    attention: str = "auto"  # the engine's kernel for packed documents; see its documentation
    config_overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """``adamw`` (fused where the device has it) or any optimizer by path, ``torch.optim.SGD``."""

    name: str = "adamw"
    lr: float = 1e-5
    """Largest learning rate; the schedule scales it. 1e-5 suits supervised fine-tuning."""

    betas: tuple[float, float] = (0.9, 0.999)  # adamw only
    eps: float = 1e-8  # adamw only
    weight_decay: float = 0.0
    """Decoupled decay of every trained weight, norms and biases too, scaled by the rate; 0 is none.

    It is ``torch.optim.AdamW`` over one group, as in verl's FSDP engine. transformers' Trainer
    (TRL) and Megatron-LM leave norms and biases out. By the contract an engine has no parameter
    groups, so that the same configuration gives the same weights on each; at the rates of
    post-training the difference is small (a rate of 1e-6 and a decay of 0.1 take a ten-thousandth
    off a norm in 1,000 steps).
    """

    clip_norm: float | None = 1.0  # global 2-norm; None: no clipping
    kwargs: Mapping[str, Any] = field(
        default_factory=dict[str, Any]
    )  # passed to the optimizer's constructor


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Learning rate over optimizer steps; see ``engine_api.schedule.lr_factor``."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None  # needed by linear and cosine
    min_ratio: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """Sizes of each kind of parallelism; their product without ``ep`` is the world.

    Experts are spread over ranks that are data or sequence parallel for all other weights, so ``ep`` divides those.
    """

    dp_shard: int = -1  # -1: what the others leave of the world
    dp_replicate: int = 1  # above 1: hybrid sharding (HSDP)
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    ulysses: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Dtypes of the stored weights, of the computation and of the gradient reduction."""

    master: DType = "float32"
    compute: DType = "float32"
    reduce: DType = "float32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What trades time for memory."""

    max_tokens: int = 16384  # token budget of a micro-batch on one data-parallel rank
    pad_to_multiple: int = (
        1  # pad micro-batches to a multiple of this many tokens (steadier shapes)
    )
    logit_chunk: int = 4096  # tokens whose logits exist at the same time
    recompute: Literal["none", "full"] = "none"  # activation checkpointing of each block
    compile: bool = False  # torch.compile of each block
    offload_params: bool = (
        False  # weights, gradients and optimizer live on the CPU, streamed block by block
    )
    offload_optimizer: bool = False  # optimizer state lives on the CPU between steps
    reshard_after_forward: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """How checkpoints are written."""

    async_save: bool = (
        False  # write in a thread; save_checkpoint returns a handle that is not yet done
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): W + alpha/rank · B A."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: Sequence[str] | str = "all-linear"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything that an engine needs, apart from the data."""

    model: ModelSource
    optimizer: OptimizerConfig | None = field(
        default_factory=OptimizerConfig
    )  # None: inference only
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallelism: Parallelism = field(default_factory=Parallelism)
    precision: Precision = field(default_factory=Precision)
    memory: Memory = field(default_factory=Memory)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    lora: LoraConfig | None = None
    seed: int = 0
    """Seed of random weights, of adapters, and of every generator that training draws from (dropout), by rank."""
    options: Any = None  # the plug-in's own options dataclass, or a mapping with its fields

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
                f"{self.lora.rank} is not a rank",
                remedy="give an integer >= 1, or lora: null",
            )
        if self.lora and not 0 <= self.lora.dropout < 1:
            raise ConfigError(
                "lora.dropout",
                f"{self.lora.dropout} is no probability below 1",
                remedy="give 0 to 1",
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
    """Numbers, strings and switches must be what they say; a switch is no number."""
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
    """A remedy sentence: what was probably meant, or everything that there is."""
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=3, cutoff=0.6)
    return (
        f"did you mean {' or '.join(close)}?"
        if close
        else f"known: {', '.join(sorted(known)) or 'none'}"
    )


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
            why="gradients would vanish or turn round",
            remedy="null turns clipping off",
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
            f"{schedule.min_ratio} is no share of the learning rate",
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
            why=f"schedule {schedule.name} ends somewhere",
            remedy="set it",
        )

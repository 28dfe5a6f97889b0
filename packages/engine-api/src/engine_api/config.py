"""The configuration that is the same for every engine, as one frozen dataclass per concern.

Options that only one engine knows belong to its plug-in's own options dataclass
(``EngineConfig.options``). Every field has a reader; a value that an engine cannot honour is
refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from engine_api.errors import ConfigError

DType = Literal["float32", "bfloat16", "float16", "float8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """The source of a model: a Hugging Face folder or hub id."""

    path: str
    """Folder in Hugging Face format, or hub id."""

    revision: str | None = None
    """Branch, tag or commit of the hub id. Null is the hub's default branch, and the only value for
    a folder.
    """

    init: Literal["pretrained", "random"] = "pretrained"
    """Origin of the weights: ``pretrained`` reads them from the folder, ``random`` draws them from
    the seed and reads ``config.json`` only.
    """

    trust_remote_code: bool = False
    """True runs Python code that comes with the model. It is off because the code runs
    unchecked, and an engine that has its own model refuses it.
    """

    attention: str = "auto"
    """Name of the engine's attention kernel for packed documents.

    ``auto`` lets the engine choose by device and dtype. engine-fsdp has ``sdpa``, ``varlen`` and
    ``cudnn``, engine-megatron ``sdpa``.
    """

    config_overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keys of the model's ``config.json`` with values that replace those in the file. A key that
    the model does not have, or that would have no effect, is refused.
    """

    freeze: Sequence[str] = field(default_factory=list[str])
    """Parts of the model that are not trained. ``vision`` is a vision-language model's tower with
    its projector, which engine-fsdp has. An empty list trains all of it.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer and its hyperparameters."""

    name: str = "adamw"
    """Optimizer: ``adamw`` (fused where the device has it), or the import path of a torch optimizer
    such as ``torch.optim.SGD``.
    """

    lr: float = 1e-5
    """Largest learning rate, at least 0, which the schedule scales. 1e-5 suits supervised
    fine-tuning.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's first and second moment per step, with the defaults of
    ``torch.optim.AdamW``. Only ``adamw`` reads them. Other optimizers take theirs from ``kwargs``.
    """

    eps: float = 1e-8
    """Term that AdamW adds to the denominator, with the default of ``torch.optim.AdamW``. Only
    ``adamw`` reads it. Other optimizers take theirs from ``kwargs``.
    """

    weight_decay: float = 0.0
    """Decoupled decay of the weights that ``decay`` names, scaled by the learning rate. 0 is no
    decay. Optimizers other than ``adamw`` receive it as their ``weight_decay``.
    """

    decay: Literal["all", "matrices"] = "all"
    """Weights that ``weight_decay`` applies to (since contract 1.4).

    ``matrices`` are the weights that are saved with two dimensions or more, biases excepted: no
    norm, no bias and no other vector decays, as in transformers' Trainer (TRL) and Megatron-LM. The
    engine must declare ``parameter_groups``. ``all`` is every trained weight, as in verl's FSDP
    engine. At the learning rates of post-training the difference is small (a rate of 1e-6 and a
    decay of 0.1 take a ten-thousandth off a norm in 1,000 steps).
    """

    part_lr: Mapping[str, float] = field(default_factory=dict[str, float])
    """Largest learning rate of a part of the model, at least 0, which the schedule scales as it
    scales ``lr`` (since contract 1.4). ``vision`` is a vision-language model's tower with its
    projector. Weights of no named part have ``lr``. The engine must declare ``parameter_groups``.
    """

    clip_norm: float | None = 1.0
    """Largest global 2-norm of the gradient, above 0, to which larger gradients are scaled. Null
    turns clipping off.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of the optimizer's constructor, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """The learning rate over optimizer steps, of which those that were skipped do not count."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up. ``constant`` needs no length of the run."""

    warmup_steps: int = 0
    """Number of optimizer steps over which the learning rate rises linearly to ``lr``. 0 is no
    warm-up.
    """

    total_steps: int | None = None
    """Number of optimizer steps, warm-up included, after which the learning rate stays at its
    minimum. Only ``linear`` and ``cosine`` read it.

    ``engine-train`` replaces null by the number of updates of the run. In ``rl`` that is its steps
    times ``algorithm.mini_batches`` times ``algorithm.epochs``, or for the critic its own
    ``epochs``. An engine that is created directly needs a number.
    """

    min_ratio: float = 0.0
    """Learning rate at ``total_steps`` as a fraction of ``lr``, in [0, 1]. 0 decays to zero, and is
    the only value for ``constant``.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """The sizes of each kind of parallelism, whose product without ``ep`` is the number of ranks.

    A size above 1 is refused by an engine that does not have that kind.
    """

    dp_shard: int = -1
    """Number of data-parallel ranks that divide one copy of the training state among themselves.
    -1 is the number of ranks divided by the other sizes, so that the defaults fit every world.
    """

    dp_replicate: int = 1
    """Number of copies of the training state, each divided over ``dp_shard`` ranks. Above 1 it is
    hybrid sharding (HSDP), which engine-fsdp, engine-torchtitan and engine-automodel have.
    """

    tp: int = 1
    """Number of tensor-parallel ranks, which engine-megatron, engine-torchtitan and
    engine-automodel have. 1 turns it off.
    """

    pp: int = 1
    """Number of pipeline stages, which engine-megatron and engine-torchtitan have.

    1 turns the pipeline off.
    """

    cp: int = 1
    """Number of context-parallel ranks, which engine-megatron, engine-torchtitan and
    engine-automodel have. 1 turns it off.
    """

    ep: int = 1
    """Number of ranks that the experts of a mixture are spread over, which engine-fsdp,
    engine-megatron, engine-torchtitan and engine-automodel have. 1 turns it off.

    They are ranks that are data or sequence parallel for all other weights, so that ``ep`` adds no
    ranks and divides their number.
    """

    ulysses: int = 1
    """Number of Ulysses sequence-parallel ranks, which engine-fsdp has. They divide the tokens of a
    micro-batch, in attention its heads, and the training state. 1 turns it off.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The dtypes of the stored weights, of the computation and of the gradient reduction.

    All defaults are float32, the widest of the choices. An engine refuses what it does not have.
    """

    master: DType = "float32"
    """Dtype in which the weights are stored and the optimizer updates them."""

    compute: DType = "float32"
    """Dtype of forward and backward. ``float8`` is FP8 in matrix products on CUDA, which
    engine-megatron has with Transformer Engine (scales of blocks), and engine-fsdp, engine-veomni,
    engine-torchtitan and engine-automodel have with torchao (scales of rows or of whole matrices).
    """

    reduce: DType = "float32"
    """Dtype in which gradients are summed over ranks. engine-megatron accepts float32 only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Settings that trade time for memory."""

    max_tokens: int = 16384
    """Largest number of tokens in a micro-batch of a data-parallel rank, before padding. A document
    is never cut, so that the longest one must fit.
    """

    max_patches: int | None = None
    """Largest number of rows of pixels (patches, or whole images where the model takes those) in a
    micro-batch of a data-parallel rank, in addition to ``max_tokens``. A document is never cut.
    Null is no such bound, and text has no rows.
    """

    pad_to_multiple: int = 1
    """Number to a multiple of which each rank's tokens of a micro-batch are padded, for fewer
    different shapes. 1 pads no more than parallelism and FP8 need.
    """

    logit_chunk: int = 4096
    """Number of tokens whose logits exist at the same time on a rank."""

    recompute: Literal["none", "full"] = "none"
    """Activation checkpointing. ``full`` computes each block's activations again in the backward
    pass, ``none`` keeps them.
    """

    compile: bool = False
    """True compiles each block with ``torch.compile``, which engine-fsdp, engine-veomni,
    engine-torchtitan and engine-automodel have.
    """

    share_prefixes: bool = False
    """True computes the tokens at which several documents of a micro-batch begin alike once instead
    of once for each document, which engine-fsdp and engine-veomni have (since contract 1.4).

    In ``rl`` the completions of a prompt share it, so that an update on 8 completions of 512 tokens
    to a prompt of 2,048 computes 6,144 tokens instead of 20,480. ``max_tokens`` counts the tokens
    that are computed. It is off because it gains nothing where documents begin differently, and
    because layers with windows, caps of scores, sinks or linear attention refuse it. It excludes
    ``router_replay``, since equal tokens may have been served by different experts, and losses that
    need a divergence to a teacher, which may have seen different prompts.
    """

    offload_params: bool = False
    """True keeps weights, gradients and optimizer state on the CPU, and streams the weights to the
    device block by block, which engine-fsdp has. It is off because it is slower.
    """

    offload_optimizer: bool = False
    """True keeps the optimizer's state on the CPU between steps, which engine-fsdp has. It is off
    because it is slower.
    """

    reshard_after_forward: bool = True
    """True frees the gathered weights of a block after its forward pass, and gathers them again in
    the backward pass. It is on because it needs less memory.

    Only engines that shard weights, such as engine-fsdp, read it.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Settings for writing checkpoints."""

    async_save: bool = False
    """True writes checkpoints in a thread while training continues, which engine-fsdp has. It is
    off because the thread needs a copy of the training state on the CPU.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """A low-rank adapter (arXiv:2106.09685), W + alpha / rank · B A.

    Engines with the capability ``lora`` have it.
    """

    rank: int = 16
    """Rank of the matrices A and B, at least 1."""

    alpha: float = 32.0
    """Numerator of the adapter's scale ``alpha / rank``. The defaults give a scale of 2."""

    dropout: float = 0.0
    """Probability in [0, 1) of dropping an input of the adapter in training. 0 is no dropout."""

    target_modules: Sequence[str] | str = "all-linear"
    """Layers that get an adapter, as PEFT reads them: a list of module names, a pattern, or
    ``all-linear`` for all linear layers except the output layer.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The configuration of an engine, complete except for the data."""

    model: ModelSource
    """Model that the engine loads."""

    optimizer: OptimizerConfig | None = field(default_factory=OptimizerConfig)
    """Optimizer of the engine. Null makes an engine for inference only."""

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over optimizer steps, constant by default."""

    parallelism: Parallelism = field(default_factory=Parallelism)
    """Sizes of each kind of parallelism. By default all ranks are sharded data parallel."""

    precision: Precision = field(default_factory=Precision)
    """Dtypes of storage, computation and gradient reduction, all float32 by default."""

    memory: Memory = field(default_factory=Memory)
    """Settings that trade time for memory."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Settings for writing checkpoints."""

    lora: LoraConfig | None = None
    """Low-rank adapter, which is trained instead of the model's weights. Null trains all
    weights.
    """

    router_replay: bool = False
    """True lets a batch's field ``routed_experts`` select the experts of each token, in log-probs
    and in training (since contract 1.4). Without it a batch with that field is refused.

    ``engine-train rl`` sets it for the policy by ``rollout.routed_experts``.
    """

    seed: int = 0
    """Seed of random weights and adapters, and by rank of every generator that training draws from
    (dropout).
    """

    options: Any = None
    """Instance of the plug-in's own options dataclass, or a mapping with its fields. Null takes the
    defaults of that dataclass.
    """

    def __post_init__(self) -> None:
        declared = get_type_hints(EngineConfig)
        for section in ("model", "schedule", "precision", "memory"):
            _check_choices(section, getattr(self, section), declared[section])
        if self.optimizer is not None:
            _check_choices("optimizer", self.optimizer, OptimizerConfig)
        for wrong, name, what, why, remedy in _refusals(self):
            if wrong:
                raise ConfigError(name, what, why=why, remedy=remedy)


def flatten_config(config: EngineConfig, world_size: int) -> dict[str, Any]:
    """Return what a configuration asks of an engine, by dotted key (see ``Engine.resolved``).

    ``parallelism.dp_shard`` is a number of ranks also where it is -1.
    """
    found: dict[str, Any] = {"model.attention": config.model.attention}
    for section in ("parallelism", "precision", "memory", "checkpoint"):
        part = getattr(config, section)
        found |= {f"{section}.{one.name}": getattr(part, one.name) for one in fields(part)}
    if config.parallelism.dp_shard == -1:
        sizes = config.parallelism
        others = sizes.dp_replicate * sizes.tp * sizes.pp * sizes.cp * sizes.ulysses
        found["parallelism.dp_shard"] = world_size // others
    return found


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
            "options",
            f"expected a mapping or {cls.__name__}, got {type(options).__name__}",
            remedy="give a mapping with the options",
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

    A boolean is not accepted as a number, and null only where the annotation has ``None``.
    """
    fits: dict[Any, tuple[type, ...]] = {
        bool: (bool,),
        int: (int,),
        float: (int, float),
        str: (str,),
        type(None): (type(None),),
    }
    hints = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    # Annotations of other kinds are checked by the options' own class.
    if any(one not in fits for one in hints):
        return
    if not any(type(value) in fits[one] for one in hints):
        names = " or ".join("null" if one is type(None) else one.__name__ for one in hints)
        raise ConfigError(
            f"options.{name}",
            f"expected a value of type {names}, got {value!r} ({type(value).__name__})",
            remedy="correct the value",
        )


def near_matches(name: str, known: Sequence[str], *, listed: bool = False) -> str:
    """Return a remedy text with the near matches of ``name``, or with all known names.

    ``listed`` says that the error lists the known names already.
    """
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    if listed:
        return "choose one of them"
    return f"known: {', '.join(sorted(known)) or 'none'}"


def check_choice(key: str, value: object, choices: Sequence[str]) -> None:
    """Raise ``ConfigError`` for a value that is not one of the choices."""
    if value not in choices:
        raise ConfigError(
            key,
            f"expected one of {', '.join(choices)}, got {value!r}",
            remedy=near_matches(str(value), choices, listed=True),
        )


def _check_choices(section: str, part: object, declared: type) -> None:
    # A derived section of a caller may have values that only the caller knows.
    for name, hint in get_type_hints(declared).items():
        if get_origin(hint) is Literal:
            check_choice(f"{section}.{name}", getattr(part, name), get_args(hint))
        elif hint is bool and not isinstance(getattr(part, name), bool):
            raise ConfigError(
                f"{section}.{name}",
                f"expected true or false, got {getattr(part, name)!r}",
                remedy="give one of the two; engine-train chooses where a value is auto",
            )


# The parts are: true if it is wrong, then the key and the texts what, why and remedy of the error.
_Refusal = tuple[bool, str, str, str, str]


def _refusals(config: EngineConfig) -> Iterator[_Refusal]:
    """Yield a refusal for each value and combination of values that no engine may have."""
    yield from _wrong_sizes(config)
    yield from _wrong_schedule(config.schedule)
    yield from _wrong_parts(config.model.freeze)
    if config.optimizer is not None:
        yield from _wrong_optimizer(config.optimizer)
        yield from _wrong_rates(config.optimizer.part_lr, config.optimizer.lr, config)
    if config.lora is not None:
        yield (
            config.lora.rank < 1,
            "lora.rank",
            f"expected an integer of at least 1, got {config.lora.rank}",
            "",
            "give an integer of at least 1, or lora: null",
        )
        yield (
            not 0 <= config.lora.dropout < 1,
            "lora.dropout",
            f"expected a probability in [0, 1), got {config.lora.dropout}",
            "",
            "give a number from 0 up to, but not including, 1",
        )
    yield (
        config.memory.share_prefixes and config.router_replay,
        "memory.share_prefixes",
        "expected false with router_replay: true, got true",
        "equal tokens may have been served by different experts, and cannot be computed once",
        "set memory.share_prefixes: false, or router_replay: false",
    )


_PARTS = ("vision",)


def _wrong_parts(freeze: object) -> Iterator[_Refusal]:
    """Yield a refusal for ``model.freeze`` unless it is a list of known parts."""
    is_list = isinstance(freeze, Sequence) and not isinstance(freeze, str)
    given = cast("Sequence[object]", freeze) if is_list else ()
    yield (
        not is_list or any(part not in _PARTS for part in given),
        "model.freeze",
        f"expected a list of parts of {', '.join(_PARTS)}, got {freeze!r}",
        "",
        "give [vision], or leave it out",
    )


def _wrong_sizes(config: EngineConfig) -> Iterator[_Refusal]:
    """Yield a refusal for each number of tokens or ranks that is not a positive integer."""
    sizes = {
        "memory": ("max_tokens", "max_patches", "pad_to_multiple", "logit_chunk"),
        "parallelism": ("dp_shard", "dp_replicate", "tp", "pp", "cp", "ep", "ulysses"),
    }
    for section, names in sizes.items():
        for name in names:
            value = getattr(getattr(config, section), name)
            expected = "an integer of at least 1"
            automatic = False
            if name == "dp_shard":
                expected += ", or -1"
                automatic = value == -1
            if name == "max_patches":
                expected += ", or null"
                automatic = value is None
            yield (
                not automatic and (not isinstance(value, int) or value < 1),
                f"{section}.{name}",
                f"expected {expected}, got {value!r}",
                "",
                f"give {expected}",
            )


def _wrong_optimizer(optimizer: OptimizerConfig) -> Iterator[_Refusal]:
    """Yield a refusal for each value that no optimizer may have."""
    yield (
        not optimizer.lr >= 0,
        "optimizer.lr",
        f"expected a number of at least 0, got {optimizer.lr}",
        "",
        "give a number of at least 0",
    )
    yield (
        optimizer.clip_norm is not None and not optimizer.clip_norm > 0,
        "optimizer.clip_norm",
        f"expected a number above 0, got {optimizer.clip_norm}",
        "gradients would vanish or change sign",
        "give a number above 0, or null, which turns clipping off",
    )
    yield (
        not all(0 <= beta < 1 for beta in optimizer.betas),
        "optimizer.betas",
        f"expected two numbers in [0, 1), got {optimizer.betas}",
        "a running mean that forgets nothing, or grows, has no correction of its start",
        "give numbers from 0 up to, but not including, 1",
    )
    defaults = OptimizerConfig()
    for name in ("betas", "eps"):
        value, default = getattr(optimizer, name), getattr(defaults, name)
        yield (
            optimizer.name != "adamw" and value != default,
            f"optimizer.{name}",
            f"expected the default {default} with optimizer {optimizer.name}, got {value}",
            "only adamw reads it",
            f"put it under optimizer.kwargs: {{{name}: …}}",
        )


def _wrong_rates(given: object, lr: float, config: EngineConfig) -> Iterator[_Refusal]:
    """Yield a refusal for each value that the learning rates of parts may not have."""
    is_mapping = isinstance(given, Mapping)
    rates = cast("Mapping[object, object]", given if is_mapping else {})
    yield (
        not is_mapping or any(part not in _PARTS for part in rates),
        "optimizer.part_lr",
        f"expected a rate of each of some parts ({', '.join(_PARTS)}), got {given!r}",
        "",
        "give {vision: RATE}, or leave it out",
    )
    yield (
        not all(
            isinstance(rate, (int, float)) and not isinstance(rate, bool) and 0 <= rate < math.inf
            for rate in rates.values()
        ),
        "optimizer.part_lr",
        f"expected finite numbers of at least 0, got {given!r}",
        "",
        "give a number of at least 0; model.freeze leaves a part as it is",
    )
    yield (
        bool(rates) and lr == 0,
        "optimizer.part_lr",
        "expected optimizer.lr above 0, got 0",
        "the schedule scales lr, and a part's rate with it",
        "give optimizer.lr a number above 0, or leave part_lr out",
    )
    frozen = [part for part in rates if part in config.model.freeze]
    yield (
        bool(frozen),
        "optimizer.part_lr",
        f"expected parts that are trained, got {frozen}",
        "model.freeze names them, too",
        "leave them out of one of the two",
    )
    yield (
        bool(rates) and config.lora is not None,
        "optimizer.part_lr",
        f"expected no rate of a part with lora, got {given!r}",
        "adapters are the text model's, and a tower stays as it is",
        "leave part_lr out, or set lora: null",
    )


def _wrong_schedule(schedule: ScheduleConfig) -> Iterator[_Refusal]:
    """Yield a refusal for each combination of values that a schedule may not have."""
    yield (
        schedule.warmup_steps < 0,
        "schedule.warmup_steps",
        f"expected a number of at least 0, got {schedule.warmup_steps}",
        "",
        "give 0 or more",
    )
    yield (
        not 0 <= schedule.min_ratio <= 1,
        "schedule.min_ratio",
        f"expected a fraction of the learning rate in [0, 1], got {schedule.min_ratio}",
        "",
        "give 0 to 1",
    )
    yield (
        schedule.name == "constant" and schedule.min_ratio != 0,
        "schedule.min_ratio",
        f"expected 0 with schedule constant, got {schedule.min_ratio}",
        "a constant schedule never falls",
        "schedule.name: linear or cosine, or leave it out",
    )
    yield (
        schedule.name != "constant" and not schedule.total_steps,
        "schedule.total_steps",
        f"expected a number with schedule {schedule.name}, got {schedule.total_steps}",
        "it is the step at which the schedule ends",
        "set it to the number of optimizer steps of the run",
    )

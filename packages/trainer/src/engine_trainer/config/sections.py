"""The parts that the configurations of the tasks share, each a frozen dataclass.

The parts below ``engine`` are the contract's own dataclasses, so that the settings of an engine
are defined once. Every field has a reader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
from engine_trainer.config.combined_reward import COMBINE, parts_of, refuse_limits_without_workers


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """The choice of an engine, and all of its settings."""

    model: ModelSource
    """Model that the engine loads."""

    backend: str = "fsdp2"
    """Name of the engine plug-in, such as ``fsdp2``."""

    device: str = "auto"
    """Device that the engine computes on; ``auto`` lets the engine choose."""

    model_type: str = "language_model"
    """Type of the model: ``language_model``, or ``value_model`` with a head that gives one
    number.
    """

    optimizer: OptimizerConfig | None = field(default_factory=OptimizerConfig)
    """Optimizer of the engine; null is an engine that does not train."""

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning-rate schedule; a ``total_steps`` of null is the number of steps of the run."""

    parallelism: Parallelism = field(default_factory=Parallelism)
    """Division of the model and the data over the ranks."""

    precision: Precision = field(default_factory=Precision)
    """Number formats of weights, computation and reductions."""

    memory: Memory = field(default_factory=Memory)
    """Settings that trade memory for time."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Settings of the engine's checkpoints."""

    lora: LoraConfig | None = None
    """LoRA adapter to train; null trains all weights."""

    seed: int | None = None
    """Seed of the engine; null is ``run.seed``."""

    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options that the engine plug-in declares itself."""

    def build(self, *, seed: int, total_steps: int) -> EngineConfig:
        """Build the configuration that ``EngineRegistry.create`` takes.

        ``seed`` and ``total_steps`` replace the values that are null.

        Raises ``ConfigError`` that names the key below ``engine.``.
        """
        schedule = self.schedule
        if schedule.total_steps is None:
            schedule = replace(schedule, total_steps=total_steps)
        try:
            return EngineConfig(
                model=self.model,
                optimizer=self.optimizer,
                schedule=schedule,
                parallelism=self.parallelism,
                precision=self.precision,
                memory=self.memory,
                checkpoint=self.checkpoint,
                lora=self.lora,
                seed=seed if self.seed is None else self.seed,
                options=dict(self.options) or None,
            )
        except ConfigError as error:
            raise ConfigError(
                f"engine.{error.field}", error.what, why=error.why, remedy=error.remedy
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOptimizer(OptimizerConfig):
    """The optimizer of a policy that learns from rewards or preferences."""

    lr: float = 1e-6
    """Largest learning rate; 1e-6 is the default of TRL's GRPO and DPO, of verl and of OpenRLHF.

    A policy that has been trained leaves its distribution at the 1e-5 of supervised fine-tuning.
    Adapters (``engine.lora``) want 10 to 100 times as much.
    """


@dataclass(frozen=True, kw_only=True)
class PolicyEngineSection(EngineSection):
    """The engine of a policy in ``rl`` and ``dpo``."""

    optimizer: PolicyOptimizer | None = field(default_factory=PolicyOptimizer)
    """Optimizer of the policy; null is an engine that does not train."""


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
    """Procedurally generated problems, held out or not by the hash of the question.

    ``skip`` passes over that many training questions first. With the same seed, SFT on the first
    4096 and RL with ``skip: 4096`` never meet the same question.
    """

    datasets: Sequence[GymDataset]
    """Tasks of the mixture."""

    size: int = 4096
    """Number of training questions, all different."""

    skip: int = 0
    """Number of training questions to pass over first."""

    heldout_size: int = 512
    """Number of held-out questions, which evaluation reads."""

    heldout_share: float = 0.1
    """Share in [0, 1] of all questions that is held out, chosen by the sha256 of the
    question's text.
    """

    seed: int = 0
    """Seed that the questions are generated from."""

    response: str = "answer"
    """Form of the responses that SFT learns from: ``answer``, or ``worked`` with the steps
    written out (see ``engine_trainer.data.worked``).
    """

    worked_share: float = 1.0
    """Share in [0, 1] of rows that show their steps with ``response: worked``; the remaining
    rows have the form ``answer``.
    """

    def __post_init__(self) -> None:
        at_least("data.reasoning_gym", self, 1, "size")
        at_least("data.reasoning_gym", self, 0, "skip", "heldout_size")
        for name in ("heldout_share", "worked_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(
                    f"data.reasoning_gym.{name}",
                    f"{getattr(self, name)} is no share",
                    remedy="give a number in [0, 1]",
                )


@dataclass(frozen=True, kw_only=True)
class ColumnsSection:
    """The names of the columns; with null the usual names are tried.

    The usual names are in ``engine_trainer.data.layouts``.
    """

    messages: str | None = None
    """Column with a conversation as a list of messages; null tries the usual names."""

    prompt: str | None = None
    """Column with the prompt; null tries the usual names."""

    response: str | None = None
    """Column with the response to the prompt; null tries the usual names."""

    answer: str | None = None
    """Column with the ground truth that the reward compares with; null tries the usual
    names.

    Dots in the name reach into nested columns.
    """

    def __post_init__(self) -> None:
        if self.messages is not None and (self.prompt is not None or self.response is not None):
            raise ConfigError(
                "data.columns.messages",
                "beside prompt or response",
                why="a row is a conversation, or a prompt with a response",
                remedy="name one of the two",
            )


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The source of the rows, and their conversion to tokens."""

    source: str | Sequence[str] | None = None
    """File (.jsonl, .parquet or .arrow), folder of such files, or
    ``hf://datasets/owner/name``, or a list of them.

    Null needs ``reasoning_gym`` in its place.
    """

    reasoning_gym: GymSection | None = None
    """Generated problems in place of ``source``; null reads ``source``."""

    split: str | None = None
    """Split of the data; null reads every file.

    Of a folder only the files of that name are read (train.jsonl, train-0*.parquet,
    train/…), of a saved data set the split of that name.
    """

    columns: ColumnsSection = field(default_factory=ColumnsSection)
    """Names of the columns to read."""

    tokenizer: str | None = None
    """Folder or name of the tokenizer; null is ``engine.model.path``."""

    chat_template: str | None = None
    """Jinja text or path of a .jinja file; null is the tokenizer's own template.

    A rendering may use 10 s of processor time and 1 GiB of memory.
    """

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Variables that are passed to the chat template."""

    system_prompt: str | None = None
    """System message for rows that have none; null adds no message."""

    prompt_template: str = "{prompt}"
    """Text around the last user turn, which takes the place of ``{prompt}``."""

    train_on: Literal["all", "last"] = "all"
    """Assistant turns that carry loss: all of them, or the last one only."""

    max_length: int | None = None
    """Largest length in tokens, of the whole document in SFT and of the prompt in RL; null
    sets no limit here.

    In RL the model's context limits the prompt, too.
    """

    on_too_long: Literal["error", "drop", "truncate"] = "error"
    """Treatment of a row above ``max_length``: raise an error, drop the row, or truncate it.

    A truncated document keeps its beginning, a truncated prompt its end.
    """

    shuffle: bool = True
    """True shuffles the rows; false keeps their order."""

    seed: int | None = None
    """Seed of the order of the rows; null is ``run.seed``."""

    def __post_init__(self) -> None:
        if (not self.source) == (self.reasoning_gym is None):
            raise ConfigError(
                "data.source",
                "give data.source or data.reasoning_gym, one of the two",
                remedy="data.source: a .jsonl, .parquet or .arrow file, a folder of them, "
                "or hf://datasets/owner/name",
            )
        if self.max_length is not None:
            at_least("data", self, 1, "max_length")
        if self.split is not None and self.source is None:
            raise ConfigError(
                "data.split",
                "without data.source",
                why="generated problems have no files",
                remedy="set data.split=null",
            )
        if "{prompt}" not in self.prompt_template:
            raise ConfigError(
                "data.prompt_template",
                f"{self.prompt_template!r} has no {{prompt}}",
                remedy="write {prompt} where the question goes",
            )


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """The length of a run, its folder, and the files it writes and keeps."""

    output_dir: str
    """Folder that the run writes checkpoints, logs and reports to."""

    steps: int | None = None
    """Number of optimizer updates, in RL of rounds of prompts; null needs ``epochs`` in its
    place.
    """

    epochs: float | None = None
    """Number of passes over the data, counted in whole batches; null needs ``steps`` in its
    place.
    """

    seed: int = 0
    """Seed of every random number of a run.

    It covers the order of the data, weights and sampling, and on each rank dropout and the
    numbers that user code draws from the generators of Python, NumPy and torch.
    """

    log_every: int = 1
    """Number of steps from one log entry to the next."""

    save_every: int = 0
    """Number of steps from one checkpoint to the next; 0 saves only at the end."""

    save_last: bool = True
    """True saves a checkpoint at the end; false keeps only those of ``save_every``."""

    keep: int = 2
    """Number of newest checkpoints to keep; 0 keeps all."""

    resume: str = "auto"
    """Checkpoint to continue from: ``auto`` for the newest of ``output_dir``, ``never``, or
    a checkpoint folder.
    """

    save_hf: bool = True
    """True writes the model as a Hugging Face folder to ``output_dir/hf`` at the end."""

    tensorboard: bool = True
    """True logs metrics for TensorBoard."""

    wandb: str | None = None
    """Project name on Weights & Biases; null logs nothing there."""

    progress: bool = True
    """True shows the progress in the terminal."""

    report: bool = True
    """True writes plots and report.html at the end."""

    profile_steps: Sequence[int] = field(default_factory=list[int])
    """Steps to profile; each process writes a trace of them to ``output_dir/profile``."""

    timeout_s: float = 3600.0
    """Seconds that a live rank may keep other ranks waiting between calls of the engine.

    After that time the run ends with ``RankFailure``. The limit bounds how much longer a
    rank may generate, score or read than another rank. A rank that is gone is noticed within
    seconds. For a stopped rank, and inside calls of the engine, ``engine.options.timeout_s``
    holds.
    """

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(
                "run.steps", "give run.steps or run.epochs, one of the two", remedy="run.steps: 100"
            )
        name, length = ("steps", self.steps) if self.steps is not None else ("epochs", self.epochs)
        if length is None or not 0 < length < math.inf:  # NaN fails too
            raise ConfigError(
                f"run.{name}",
                f"{length} is not a length",
                remedy="give a number above 0; "
                "`engine-train eval` measures a model without training it",
            )
        at_least("run", self, 1, "log_every")
        at_least("run", self, 0, "save_every", "keep")
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(
                "run.timeout_s",
                f"expected seconds above 0, got {self.timeout_s}",
                remedy="run.timeout_s: 3600",
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
                why="rows that data.on_too_long: drop leaves out do not count",
                remedy=f"give more rows, or a smaller {key}",
            )
        return (
            self.steps
            if self.steps is not None
            else max(1, int((self.epochs or 0) * samples) // batch_size)
        )


@dataclass(frozen=True, kw_only=True)
class RolloutSection:
    """The choice of a rollout, and the sampling of completions."""

    name: str = "local"
    """Name of the rollout plug-in; ``local`` generates with the engine itself."""

    device: str = "auto"
    """Device that the rollout computes on; ``auto`` lets the rollout choose."""

    n: int = 8
    """Number of completions of a prompt."""

    max_new_tokens: int = 256
    """Largest number of tokens of a completion."""

    temperature: float = 1.0
    """Sampling temperature; RL refuses 0, which is greedy decoding."""

    top_p: float = 1.0
    """Share in (0, 1] of the probability mass that tokens are sampled from; 1 keeps all
    tokens.
    """

    top_k: int = 0
    """Number of most probable tokens that are sampled from; 0 keeps all tokens."""

    batch_size: int = 64
    """Number of completions (prompts × ``n``) that a rank generates at the same time."""

    quantization: Literal["none", "fp8"] = "none"
    """Number format of the rollout's weights: ``fp8`` is blockwise e4m3, for rollouts that
    support it.
    """

    lora: Literal["merged", "adapter"] = "merged"
    """Way in which an adapter reaches the rollout: ``merged`` into the weights, or
    ``adapter``.

    With ``adapter`` the base weights are sent once, and afterwards only the adapter of
    ``engine.lora``.
    """

    sleep: bool = True
    """True frees the rollout's memory while the engine trains."""

    offload_engine: bool = False
    """True frees the engine's memory while the rollout generates."""

    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options that the rollout plug-in declares itself."""

    def __post_init__(self) -> None:
        at_least("rollout", self, 1, "n", "max_new_tokens", "batch_size")
        at_least("rollout", self, 0, "temperature", "top_k")
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                "rollout.top_p",
                f"{self.top_p} is no share",
                remedy="give a number in (0, 1]; 1: all",
            )


@dataclass(frozen=True, kw_only=True)
class RaySection:
    """The cluster and the workers of ``launcher: ray``.

    The workers are documented in ``engine_trainer.placement.ray``.
    """

    address: str | None = None
    """Address of the Ray cluster, ``host:port`` or ``auto``; null starts a cluster on this
    machine for this run only.
    """

    engines: int = 1
    """Number of ranks of the engine, each in a process of its own."""

    rollouts: int | None = None
    """Number of rollout replicas in processes of their own; null colocates one with each
    data-parallel rank, time-shared with the engine.
    """

    gpus_per_worker: float | None = None
    """Number of GPUs of each worker; null is 1 where the engine computes on GPUs."""

    cpus_per_worker: float = 1.0
    """Number of processors of each worker."""

    timeout_s: float = 1800.0
    """Seconds that any call of a worker may take; a worker that is silent for longer counts
    as lost.
    """

    start_timeout_s: float = 120.0
    """Seconds until the cluster has free resources for the workers, and again until the
    workers have started.
    """

    restarts: int = 3
    """Number of restarts from the last checkpoint after a worker or a node was lost."""

    imports: Sequence[str] = field(default_factory=list[str])
    """Modules that each worker imports first, for engines, rollouts and rewards that are
    registered in process.
    """

    log_workers: bool = False
    """True shows the output of the workers, which is always in Ray's session folder."""

    def __post_init__(self) -> None:
        at_least("ray", self, 1, "engines")
        at_least("ray", self, 0, "cpus_per_worker", "restarts")
        for name in ("timeout_s", "start_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"ray.{name}",
                    f"{getattr(self, name)} is not a time",
                    remedy="give seconds above 0",
                )
        if self.rollouts is not None:
            at_least("ray", self, 1, "rollouts")
        if self.gpus_per_worker is not None:
            at_least("ray", self, 0, "gpus_per_worker")


@dataclass(frozen=True, kw_only=True)
class OverlapSection:
    """Generation that overlaps with training, on replicas of its own (``ray.rollouts``).

    With ``one_step_off`` the completions of a step are generated while the previous step is
    trained on. With ``full`` replicas stop only for a weight sync, and completions that began
    before it continue after it with the new weights.
    """

    mode: Literal["none", "one_step_off", "full"] = "none"
    """Mode of the overlap between generation and training; ``none`` alternates them."""

    max_staleness: int = 1
    """Number of steps that the weights behind a token may lag; an older token carries no
    loss, and is counted.
    """

    slice_tokens: int = 64
    """Number of tokens after which a weight sync may interrupt a generation in the mode
    ``full``.
    """

    def __post_init__(self) -> None:
        at_least("overlap", self, 1, "max_staleness", "slice_tokens")


@dataclass(frozen=True, kw_only=True)
class RewardSection:
    """A reward function, given by name or as a user's own function, and its arguments.

    Names are those of the entry-point group ``engine_trainer.rewards``. A user's own function takes
    an ``engine_trainer.rewards.Sample`` and returns a number. Calls of an ``async def`` run
    concurrently.
    """

    name: str | None = None
    """Name of a reward: ``math``, ``gsm8k``, ``exact``, ``reasoning_gym``, an installed one,
    or ``combine``; null needs ``function``.
    """

    function: str | None = None
    """Function ``path/to/file.py:name`` or ``package.module:name``, in place of ``name``;
    null reads ``name``.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the function, or of the factory that ``name`` stands for."""

    timeout_s: float | None = 10.0
    """Seconds that a call may take; null sets no limit.

    The process of a plain function that takes longer is killed and replaced, whatever the
    function does, and the call counts 0. The clock runs during a call, imports inside the
    function included. Slow imports belong at the top of the file, which each process loads
    once and outside of the clock (it has two minutes for that). A coroutine is cancelled.
    One that blocks its event loop is interrupted two seconds later, and its process is
    killed after two more. A limit needs ``workers`` above 0.
    """

    workers: int = 1
    """Number of processes that score completions, for each rank that samples.

    They load the function's file in place of the trainer's own process. With 0 the trainer's
    own process calls the function, for a function that needs its memory or its device.
    Nothing can then end a call, so that ``timeout_s`` must be null.
    """

    concurrency: int = 64
    """Number of calls of an async function that run at the same time in each process."""

    max_failures: int = 0
    """Number of calls of a run that may raise or return no finite number, and count 0; one
    more ends the run.
    """

    max_timeouts: int | None = 64
    """Number of calls in a row that may exceed ``timeout_s``; one more ends the run, and
    null sets no limit.
    """

    def __post_init__(self) -> None:
        at_least("reward", self, 0, "workers", "max_failures")
        at_least("reward", self, 1, "concurrency")
        if self.max_timeouts is not None:
            at_least("reward", self, 0, "max_timeouts")
        if (self.name is None) == (self.function is None):
            remedy = "reward.name: math, or reward.function: rewards.py:score"
            # A recipe may name one reward, and the command line a different one.
            if self.name is not None:
                remedy = (
                    f"reward.name: null for {self.function}, "
                    f"or reward.function: null for {self.name}"
                )
            raise ConfigError(
                "reward.name", "give reward.name or reward.function, one of the two", remedy=remedy
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(
                "reward.timeout_s",
                f"{self.timeout_s} is not a time",
                remedy="give seconds above 0, or null",
            )
        limits = {self.name or self.function or "": self.timeout_s}
        if self.name == COMBINE:
            limits = {part.title: part.timeout_s for part in parts_of(self.kwargs, self.timeout_s)}
        if self.workers == 0:
            refuse_limits_without_workers(limits)


@dataclass(frozen=True, kw_only=True)
class AgentSection:
    """Conversations of several turns with tools, in place of one completion.

    They are described in ``engine_trainer.agent``. ``rollout.max_new_tokens`` then limits the whole
    conversation after the prompt, the output of tools included.
    """

    function: str
    """Async function of one ``Episode``, as ``path/to/file.py:name`` or
    ``package.module:name``.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the function."""

    max_turns: int = 8
    """Largest number of the model's turns in a trajectory."""

    max_turn_tokens: int | None = None
    """Largest number of the model's tokens in a turn; null is the number of tokens that are
    left.
    """

    timeout_s: float | None = 300.0
    """Seconds of the function's own time in a trajectory, tools included; null sets no
    limit.

    The time of the model is not counted.
    """

    concurrency: int = 64
    """Number of trajectories that run at the same time on a replica."""

    max_failures: int = 0
    """Number of trajectories of a run in which the function may raise; one more ends the
    run.
    """

    def __post_init__(self) -> None:
        at_least("agent", self, 1, "max_turns", "concurrency")
        at_least("agent", self, 0, "max_failures")
        if self.max_turn_tokens is not None:
            at_least("agent", self, 1, "max_turn_tokens")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(
                "agent.timeout_s",
                f"{self.timeout_s} is not a time",
                remedy="give seconds above 0, or null",
            )


def at_least(section: str, part: object, low: float, *names: str) -> None:
    """Raise ``ConfigError`` for a field of ``part`` below ``low``."""
    for name in names:
        value = getattr(part, name)
        if not value >= low:  # NaN fails too
            key = f"{section}.{name}" if section else name
            raise ConfigError(key, f"{value} is too small", remedy=f"give at least {low}")


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

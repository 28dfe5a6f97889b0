"""The parts that the configurations of SFT and RL share: one frozen dataclass a concern.

The parts below ``engine`` are the contract's own dataclasses, so that what an engine
can be told is written down once. Every field has a reader.
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
    """Which engine, and everything that it is told."""

    model: ModelSource
    backend: str = "fsdp2"
    device: str = "auto"
    model_type: str = "language_model"
    optimizer: OptimizerConfig | None = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)  # total_steps null: the run's
    parallelism: Parallelism = field(default_factory=Parallelism)
    precision: Precision = field(default_factory=Precision)
    memory: Memory = field(default_factory=Memory)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    lora: LoraConfig | None = None
    seed: int | None = None  # null: run.seed
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the plug-in's own

    def build(self, *, seed: int, total_steps: int) -> EngineConfig:
        """What ``EngineRegistry.create`` wants; ``seed`` and ``total_steps`` fill what was left null.

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


@dataclass(frozen=True, kw_only=True)
class GymDataset:
    """One reasoning-gym task in a mixture."""

    name: str
    weight: float = 1.0
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the task's own settings


@dataclass(frozen=True, kw_only=True)
class GymSection:
    """Procedurally generated problems; a question's own hash decides whether it is held out.

    ``skip`` passes over that many training questions first: with one seed, SFT on the first 4096 and RL
    with ``skip: 4096`` never meet the same question.
    """

    datasets: Sequence[GymDataset]
    size: int = 4096  # training questions, all different
    skip: int = 0
    heldout_size: int = 512
    heldout_share: float = 0.1  # of all questions, by sha256 of the text
    seed: int = 0
    response: str = "answer"  # how SFT responses are written; see engine_trainer.data.worked
    worked_share: float = (
        1.0  # with response: worked, the share of rows that show their steps (the rest: answer)
    )

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
    """Which column holds what; null: the usual names are tried (see engine_trainer.data.layouts)."""

    messages: str | None = None
    prompt: str | None = None
    response: str | None = None
    answer: str | None = None  # what the reward compares with; dots reach into nested columns

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
    """Where the rows come from, and how they become tokens."""

    source: str | Sequence[str] | None = (
        None  # .jsonl, .parquet or .arrow, a folder of them, or hf://datasets/owner/name
    )
    reasoning_gym: GymSection | None = None  # instead of source
    split: str | None = (
        None  # of a folder: only its files of that name (train.jsonl, train-0*.parquet, train/…); of a saved data set, its own
    )
    columns: ColumnsSection = field(default_factory=ColumnsSection)
    tokenizer: str | None = None  # null: engine.model.path
    # Jinja text or a .jinja file; null: the tokenizer's own. A rendering has 10 s of processor time and 1 GiB of memory.
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    system_prompt: str | None = None  # put before rows that have none
    prompt_template: str = "{prompt}"  # around the last user turn
    train_on: Literal["all", "last"] = "all"  # which assistant turns carry loss
    max_length: int | None = (
        None  # tokens; of the whole document in SFT, of the prompt in RL (there the context limits it too)
    )
    on_too_long: Literal["error", "drop", "truncate"] = (
        "error"  # truncate: a document keeps its beginning, a prompt its end
    )
    shuffle: bool = True
    seed: int | None = None  # null: run.seed

    def __post_init__(self) -> None:
        if (not self.source) == (self.reasoning_gym is None):
            raise ConfigError(
                "data.source",
                "give data.source or data.reasoning_gym, one of the two",
                remedy="data.source: a .jsonl, .parquet or .arrow file, a folder of them, or hf://datasets/owner/name",
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
    """How long, where to, and what is kept."""

    output_dir: str
    steps: int | None = None  # optimizer updates (RL: rounds of prompts); null: epochs
    epochs: float | None = None
    seed: int = 0
    """Seed of every random number of a run: order of the data, weights, sampling, and by rank dropout and what user code
    draws from Python's, NumPy's and torch's generators."""
    log_every: int = 1
    save_every: int = 0  # 0: only at the end
    save_last: bool = True  # a checkpoint at the end; false: only those of save_every
    keep: int = 2  # newest checkpoints; 0: all
    resume: str = "auto"  # auto | never | a checkpoint folder
    save_hf: bool = True  # a Hugging Face folder at the end, output_dir/hf
    tensorboard: bool = True
    wandb: str | None = None  # project name
    progress: bool = True
    report: bool = True  # plots and report.html at the end
    profile_steps: Sequence[int] = field(
        default_factory=list[int]
    )  # a trace a process, in output_dir/profile
    timeout_s: float = 3600.0
    """Seconds that a rank which lives may keep the others waiting between the engine's calls, after which the run ends with
    ``RankFailure``: how much longer one rank may generate, score or read than another. A rank that is gone is noticed within
    seconds; for one that is stopped, and inside the engine's calls, ``engine.options.timeout_s`` holds."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(
                "run.steps", "give run.steps or run.epochs, one of the two", remedy="run.steps: 100"
            )
        name, length = ("steps", self.steps) if self.steps is not None else ("epochs", self.epochs)
        if length is None or not 0 < length < math.inf:  # not a number is none either
            raise ConfigError(
                f"run.{name}",
                f"{length} is not a length",
                remedy="give a number above 0; `engine-train eval` measures a model without training it",
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
        """Steps of the whole run; ``epochs`` counts whole batches only, and at least one.

        Args:
            samples: of ``data``, without those that were dropped.
            key: of the configuration, where ``batch_size`` stands.

        Raises ``ConfigError`` for fewer samples than a batch, which would have some of them twice.
        """
        if samples < batch_size:
            raise ConfigError(
                "data.source",
                f"{samples} rows of {data.source or 'data.reasoning_gym'} are left, but a step takes {batch_size}",
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
    """Which rollout, and how completions are drawn."""

    name: str = "local"
    device: str = "auto"
    n: int = 8  # completions a prompt
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    batch_size: int = 64  # prompts × n that are generated at the same time on a rank
    quantization: Literal["none", "fp8"] = "none"  # fp8: blockwise e4m3, where the rollout can
    lora: Literal["merged", "adapter"] = (
        "merged"  # adapter: the base is sent once, then engine.lora's adapter alone
    )
    sleep: bool = True  # give the rollout's memory back while the engine trains
    offload_engine: bool = False  # and the engine's memory while the rollout generates
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the rollout's own

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
    """``launcher: ray``: on which cluster, and how many workers (docs of each: engine_trainer.placement.ray)."""

    address: str | None = (
        None  # host:port, or auto; null: a cluster on this machine, for this run alone
    )
    engines: int = 1  # ranks of the engine, a process each
    rollouts: int | None = (
        None  # replicas in processes of their own; null: one beside each data-parallel rank, by turns
    )
    gpus_per_worker: float | None = None  # null: 1 where the engine computes on GPUs
    cpus_per_worker: float = 1.0
    timeout_s: float = 1800.0  # of every call of a worker; one that is silent for longer is lost
    start_timeout_s: float = (
        120.0  # until the cluster has room for the workers, then until they have started
    )
    restarts: int = 3  # from the last checkpoint, after a worker or a node was lost
    # modules that each worker imports first: what registers engines, rollouts, rewards in process
    imports: Sequence[str] = field(default_factory=list[str])
    log_workers: bool = False  # show what workers print; it is always in Ray's session folder

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
    """Generation beside training, on replicas of their own (``ray.rollouts``).

    ``one_step_off``: the completions of a step are generated while the step before is trained on.
    ``full``: replicas never stop but for a weight sync; what was begun before it goes on after it with the new weights.
    """

    mode: Literal["none", "one_step_off", "full"] = "none"
    max_staleness: int = 1  # steps that a token's weights may be behind; an older one carries no loss, and is counted
    slice_tokens: int = 64  # full: tokens after which a generation may be interrupted by a sync

    def __post_init__(self) -> None:
        at_least("overlap", self, 1, "max_staleness", "slice_tokens")


@dataclass(frozen=True, kw_only=True)
class RewardSection:
    """A reward function: by name (entry-point group ``engine_trainer.rewards``), or one's own; and its arguments.

    One's own function takes an ``engine_trainer.rewards.Sample`` and returns a number; ``async def`` runs side by side.
    """

    name: str | None = None
    """Name of a reward: ``math``, ``gsm8k``, ``exact``, ``reasoning_gym``, an installed one, or ``combine``."""
    function: str | None = None
    """``path/to/file.py:name`` or ``package.module:name``, in place of ``name``."""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the function, or of the factory that ``name`` stands for."""
    timeout_s: float | None = 10.0
    """Seconds that a call may take; null: any time.

    The process of a plain function that takes longer is killed and replaced, whatever the function does, and the call counts 0.
    The clock runs during a call, imports inside the function included: what is slow to import stands at the top of the
    file, which each process loads once, outside of the clock (it has two minutes for that). A coroutine is cancelled; one that
    holds its event loop is interrupted two seconds later, and its process killed after two more. Needs ``workers``.
    """
    workers: int = 1
    """Processes that judge, for each rank that samples.

    They load the function's file instead of the trainer's own process. 0: the trainer's own process calls the function,
    for one that needs its memory or its device; nothing can then end a call, so that ``timeout_s`` must be null.
    """
    concurrency: int = 64
    """Calls of an async function that run at the same time, in each process."""
    max_failures: int = 0
    """Calls of a run that may raise or give no finite number, and count 0; with one more the run ends."""
    max_timeouts: int | None = 64
    """Calls in a row that may take too long; with one more the run ends. null: any number."""

    def __post_init__(self) -> None:
        at_least("reward", self, 0, "workers", "max_failures")
        at_least("reward", self, 1, "concurrency")
        if self.max_timeouts is not None:
            at_least("reward", self, 0, "max_timeouts")
        if (self.name is None) == (self.function is None):
            remedy = "reward.name: math, or reward.function: rewards.py:score"
            if self.name is not None:  # a recipe names one, the command line another
                remedy = f"reward.name: null for {self.function}, or reward.function: null for {self.name}"
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
    """Conversations of several turns with tools, in place of one completion; see ``engine_trainer.agent``.

    ``rollout.max_new_tokens`` then is of the whole conversation after the prompt, what tools say included.
    """

    function: str  # path/to/file.py:name or package.module:name, an async def of one Episode
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_turns: int = 8  # of the model, a trajectory
    max_turn_tokens: int | None = None  # of the model, a turn; null: what is left
    timeout_s: float | None = (
        300.0  # of the function's own time, tools included, a trajectory; the model's is not counted
    )
    concurrency: int = 64  # trajectories at the same time, a replica
    max_failures: int = (
        0  # trajectories of a run in which the function may raise; then the run ends
    )

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
    """Return one of the rollout's options that the trainer reads, too. Raises ``ConfigError`` for no positive integer."""
    value: object = rollout.options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        key = f"rollout.options.{name}"
        raise ConfigError(
            key,
            f"expected a positive integer, got {value!r:.100}",
            remedy="give an integer of at least 1",
        )
    return value

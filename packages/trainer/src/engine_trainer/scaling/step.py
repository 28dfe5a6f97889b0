"""A whole RL step, whose phases run one after the other on the same GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from engine_trainer.scaling import phases
from engine_trainer.scaling.hardware import H200, Hardware
from engine_trainer.scaling.phases import Lengths, Phase
from engine_trainer.scaling.shapes import Shape

NAMES = ("generate", "reward", "log-probs", "update", "sync")


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of a step."""

    prompts: int = 512
    """Number of prompts."""

    n: int = 16
    """Number of completions of a prompt."""

    lengths: Lengths
    """Lengths of prompts and completions in tokens."""

    fp8: bool = False
    """True serves the rollout in FP8."""

    micro_batch: int = 32768
    """Number of tokens of a GPU in one pass.

    A longer completion is one pass of its own.
    """

    updates: int = 1
    """Number of optimizer steps."""

    reward_s: float = 0.002
    """Seconds to score a completion.

    math-verify takes 1.1 ms of the default on one core; decoding the text takes the rest.
    """

    reward_processes: int = 1
    """Number of processes of a replica that score completions (``reward.workers``)."""

    @property
    def completions(self) -> int:
        """Number of completions of the step."""
        return self.prompts * self.n

    @property
    def tokens(self) -> float:
        """Number of tokens that are trained on, prompts included."""
        return self.completions * (self.lengths.prompt + self.lengths.mean)


@dataclass(frozen=True, kw_only=True)
class Step:
    """The phases of a step by name, with their seconds.

    Where the model does not fit into memory, ``fits`` is false and nothing else is known.
    """

    gpus: int
    phases: dict[str, Phase]
    tensor_parallel: int = 1
    shard_group: int = 0

    @property
    def fits(self) -> bool:
        """True if there is enough memory for the model."""
        return bool(self.phases)

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def bottleneck(self) -> str:
        """Longest phase and the resource that limits it."""
        name = max(self.phases, key=lambda n: self.phases[n].seconds)
        return f"{name}: {self.phases[name].bottleneck}"

    def share(self, name: str) -> float:
        """Return the share of a phase in the step's time."""
        return self.phases[name].seconds / self.seconds

    def tokens_per_gpu_s(self, job: Job) -> float:
        """Return the number of trained tokens per second and GPU."""
        return job.tokens / self.seconds / self.gpus


def step_of(shape: Shape, gpus: int, job: Job, hardware: Hardware = H200) -> Step:
    """Return one step of ``job`` on ``gpus`` GPUs, time-shared by engine and rollout."""
    group = phases.shard_group(shape, hardware, gpus)
    tensor_parallel = phases.replica_gpus(shape, hardware, 1 if job.fp8 else 2)
    if not group or tensor_parallel > gpus:
        return Step(gpus=gpus, phases={})
    sequences = job.completions / (gpus // tensor_parallel)
    length = job.lengths.prompt + job.lengths.mean
    micro_batch = max(job.micro_batch, int(job.lengths.prompt + job.lengths.longest))
    work = {"gpus": gpus, "tokens": job.tokens, "length": length, "micro_batch": micro_batch}
    found = {
        # A replica with less than one sequence on average still completes one.
        "generate": phases.generate(
            shape,
            hardware,
            job.lengths,
            sequences=max(1.0, sequences),
            tensor_parallel=tensor_parallel,
            fp8=job.fp8,
        ),
        "reward": phases.reward(
            completions=max(1.0, sequences), seconds=job.reward_s, processes=job.reward_processes
        ),
        "log-probs": phases.log_probs(shape, hardware, **work),
        "update": phases.update(shape, hardware, **work, updates=job.updates),
        "sync": phases.sync(
            shape, hardware, group=group, tensor_parallel=tensor_parallel, fp8=job.fp8
        ),
    }
    return Step(gpus=gpus, phases=found, tensor_parallel=tensor_parallel, shard_group=group)

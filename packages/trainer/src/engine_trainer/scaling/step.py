"""A whole RL step: its phases one after the other on the same GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from engine_trainer.scaling import phases
from engine_trainer.scaling.hardware import H200, Hardware
from engine_trainer.scaling.phases import Lengths, Phase
from engine_trainer.scaling.shapes import Shape

NAMES = ("generate", "reward", "log-probs", "update", "sync")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a step does."""

    prompts: int = 512
    n: int = 16  # completions a prompt
    lengths: Lengths
    fp8: bool = False  # rollout
    micro_batch: int = (
        32768  # tokens of a GPU in one pass; a longer completion is one pass of its own
    )
    updates: int = 1  # optimizer steps
    reward_s: float = (
        0.002  # a completion: math-verify takes 1.1 ms on one core, decoding the text the rest
    )
    reward_processes: int = 1  # a replica (reward.workers)

    @property
    def completions(self) -> int:
        """Of the step."""
        return self.prompts * self.n

    @property
    def tokens(self) -> float:
        """That are trained on, prompts included."""
        return self.completions * (self.lengths.prompt + self.lengths.mean)


@dataclass(frozen=True, kw_only=True)
class Step:
    """The phases by name, in seconds; ``fits`` is false, and nothing else known, where the model's states do not fit."""

    gpus: int
    phases: dict[str, Phase]
    tensor_parallel: int = 1
    shard_group: int = 0

    @property
    def fits(self) -> bool:
        """Whether there is enough memory."""
        return bool(self.phases)

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def bottleneck(self) -> str:
        """The longest phase and what limits it."""
        name = max(self.phases, key=lambda n: self.phases[n].seconds)
        return f"{name}: {self.phases[name].bottleneck}"

    def share(self, name: str) -> float:
        """Of the step's time."""
        return self.phases[name].seconds / self.seconds

    def tokens_per_gpu_s(self, job: Job) -> float:
        """Trained tokens a second and GPU."""
        return job.tokens / self.seconds / self.gpus


def step_of(shape: Shape, gpus: int, job: Job, hardware: Hardware = H200) -> Step:
    """One step of ``job`` on ``gpus``, engine and rollout by turns on all of them."""
    group = phases.shard_group(shape, hardware, gpus)
    tensor_parallel = phases.replica_gpus(shape, hardware, 1 if job.fp8 else 2)
    if not group or tensor_parallel > gpus:
        return Step(gpus=gpus, phases={})
    sequences = job.completions / (gpus // tensor_parallel)
    length = job.lengths.prompt + job.lengths.mean
    micro_batch = max(job.micro_batch, int(job.lengths.prompt + job.lengths.longest))
    work = {"gpus": gpus, "tokens": job.tokens, "length": length, "micro_batch": micro_batch}
    found = {
        # A replica with less than one sequence still answers one.
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

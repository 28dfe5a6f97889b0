"""The configuration of ``engine-train rl``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from engine_trainer.config.algorithm import AlgorithmSection
from engine_trainer.config.checks import Refusal, refuse
from engine_trainer.config.evaluation import EvalSection, check_evaluation
from engine_trainer.config.sections import (
    AgentSection,
    DataSection,
    OverlapSection,
    PolicyEngineSection,
    RaySection,
    RewardSection,
    RolloutSection,
    RunSection,
    wrong_balance,
)


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """The configuration of ``engine-train rl``, and of ``engine-train eval``."""

    engine: PolicyEngineSection
    """Engine of the policy."""

    data: DataSection
    """Prompts to train on. ``engine-train eval`` reads none of them, but converts the held-out
    problems by these settings.
    """

    run: RunSection
    """Length of the run, and the files that it writes."""

    reward: RewardSection
    """Reward that scores the completions."""

    rollout: RolloutSection = field(default_factory=RolloutSection)
    """Rollout that generates the completions, and its sampling."""

    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    """Advantage, loss and correction that turn completions into updates. ``engine-train eval`` does
    not read it.
    """

    agent: AgentSection | None = None
    """Conversations with tools. Null generates one completion for each sample."""

    eval: EvalSection | None = None
    """Held-out problems to measure. Null measures none, which ``engine-train eval`` refuses."""

    launcher: Literal["none", "ray"] = "none"
    """Way in which the processes start. ``none`` uses this process or the ranks of torchrun,
    ``ray`` starts workers on a cluster. ``engine-train eval`` needs ``none``.
    """

    ray: RaySection = field(default_factory=RaySection)
    """Cluster and workers, read with ``launcher: ray``."""

    overlap: OverlapSection = field(default_factory=OverlapSection)
    """Overlap of generation with training, off by default."""

    def __post_init__(self) -> None:
        if self.eval is not None:
            check_evaluation(self.eval, self.data, loss=False)
        correction = self.algorithm.correction.resolved(
            rollout=self.rollout.name, old_log_probs=self.algorithm.old_log_probs
        )
        object.__setattr__(self, "algorithm", replace(self.algorithm, correction=correction))
        refuse("", _wrong_parts(self))


def _wrong_parts(config: RLConfig) -> Iterator[Refusal]:
    """Yield a refusal for each combination of sections that a run may not have."""
    algorithm, rollout = config.algorithm, config.rollout
    compares = not algorithm.by_token or algorithm.dynamic_sampling.enabled
    teacher = algorithm.teacher
    yield wrong_balance(config.engine.options, "rl")
    if algorithm.critic is not None:
        yield wrong_balance(algorithm.critic.options or {}, "rl", "algorithm.critic")
    yield (
        teacher is not None and teacher.url is not None and rollout.temperature != 1,
        "rollout.temperature",
        f"expected 1 with algorithm.teacher.url, got {rollout.temperature}",
        "a server gives the log-probs of a prompt at temperature 1",
        "use 1.0, or algorithm.teacher.engine, which computes at any temperature",
    )
    yield (
        rollout.n < 2 and compares and algorithm.reads_rewards,
        "rollout.n",
        f"expected a number of at least 2, got {rollout.n}",
        "the completions of a prompt are compared with each other",
        "use at least 2, or advantage: gae or reinforce_pp without dynamic sampling",
    )
    yield (
        algorithm.overlong.buffer > rollout.max_new_tokens,
        "algorithm.overlong.buffer",
        f"expected at most {rollout.max_new_tokens}, got {algorithm.overlong.buffer}",
        "the penalty begins so many tokens below rollout.max_new_tokens",
        f"give at most {rollout.max_new_tokens}",
    )
    yield (
        rollout.temperature == 0,
        "rollout.temperature",
        "expected a number above 0, got 0, which is greedy",
        "a group of equal completions teaches nothing",
        "use 1.0; eval.temperature may be 0",
    )
    yield (
        rollout.routed_experts == "replay" and config.engine.memory.share_prefixes,
        "engine.memory.share_prefixes",
        "expected false with rollout.routed_experts: replay, got true",
        "the tokens of a prompt may have other experts in each of its completions",
        "set engine.memory.share_prefixes: false, or rollout.routed_experts: off",
    )
    teacher = algorithm.teacher
    kl = "sampled" if teacher is None else teacher.chosen_kl
    yield (
        kl != "sampled" and config.engine.memory.share_prefixes,
        "engine.memory.share_prefixes",
        f"expected false with algorithm.teacher.kl: {kl}, got true",
        "documents that begin alike may have teachers that saw different prompts",
        "set engine.memory.share_prefixes: false, or algorithm.teacher.kl: sampled",
    )
    yield (
        config.ray.elastic and (config.launcher != "ray" or config.ray.rollouts is None),
        "ray.elastic",
        "true needs replicas of their own",
        "a replica that is colocated with a rank of the engine is lost together with it",
        "launcher: ray and ray.rollouts: 1 or more, or ray.elastic: false",
    )
    mode = config.overlap.mode
    yield (
        mode != "none" and (config.launcher != "ray" or config.ray.rollouts is None),
        "overlap.mode",
        f"{mode} needs replicas of their own",
        "a rollout that is colocated with an engine waits while the engine trains",
        "launcher: ray and ray.rollouts: 1 or more",
    )
    yield (
        config.overlap.in_flight is True and mode != "full",
        "overlap.in_flight",
        f"expected auto or false with overlap.mode: {mode}, got true",
        "only the mode full syncs weights while completions are generated",
        "overlap.mode: full, or leave overlap.in_flight out",
    )
    yield (
        config.overlap.in_flight is True and config.agent is not None,
        "overlap.in_flight",
        "expected auto or false with an agent, got true",
        "the turns of conversations are generated in slices",
        "leave overlap.in_flight out",
    )
    # With a rollout that is chosen later, so is the correction.
    undecided = algorithm.correction.weight == "auto"
    corrected = algorithm.correction.enabled or undecided or algorithm.old_log_probs == "rollout"
    yield (
        mode != "none" and not corrected,
        "overlap.mode",
        f"{mode} needs a correction",
        "older weights made the completions",
        "algorithm.correction.weight: token, or algorithm.old_log_probs: rollout",
    )

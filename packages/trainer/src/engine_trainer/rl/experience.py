"""What a step learns from: groups of answers, and the rewards that count."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

from engine_trainer.algorithms.shaping import informative, overlong_penalty
from engine_trainer.config import RLConfig
from engine_trainer.data import PromptDataset, SampleOrder
from engine_trainer.placement.replica import Group, ScoredCompletion
from engine_trainer.rewards import failure_figures
from engine_trainer.sampling.sampler import Sampler


@dataclass(frozen=True, kw_only=True)
class Experience:
    """One step's groups, the same on all ranks."""

    groups: list[Group]
    position: int  # of the next prompt in the run's order
    metrics: dict[
        str, float
    ]  # of all answers that were generated, those of dropped groups included
    generated: list[Group] = field(
        default_factory=list[Group]
    )  # all of them, those that are not learned from too
    pending: list[int] = field(
        default_factory=list[int]
    )  # positions before it of prompts that are still under way

    @property
    def state(self) -> dict[str, Any]:
        """Where a resumed run goes on."""
        return (
            {"position": self.position, "pending": self.pending}
            if self.pending
            else {"position": self.position}
        )


def collect(
    sampler: Sampler,
    data: PromptDataset,
    order: SampleOrder,
    config: RLConfig,
    *,
    step: int,
    position: int,
) -> Experience:
    """``prompts_per_step`` groups from ``position`` on; within ``sampler.serving``.

    With dynamic sampling, groups whose rewards are all equal give way to new prompts, round by round. After
    ``max_rounds`` the step takes the groups that it has, which may be fewer, or none.
    """
    wanted, dynamic = config.algorithm.prompts_per_step, config.algorithm.dynamic_sampling
    generated: list[Group] = []
    kept: list[Group] = []
    rounds = 0
    sampler.timers.spent("generate")  # an evaluation's
    while len(kept) < wanted and rounds < (dynamic.max_rounds if dynamic.enabled else 1):
        indices = order.take(position, wanted - len(kept))
        position += len(indices)
        new = sampler.sample(
            [data[i] for i in indices],
            n=config.rollout.n,
            temperature=config.rollout.temperature,
            seed=round_seed(config.run.seed, step, rounds),
        )
        keep = informative(totals(new)).tolist() if dynamic.enabled else [True] * len(new)
        generated += new
        kept += [group for group, useful in zip(new, keep, strict=True) if useful]
        rounds += 1
    metrics = completion_figures(generated, sampler.timers.spent("generate")) | {
        "rollout/groups": float(len(kept)),
        "rollout/rounds": float(rounds),
    }
    return Experience(groups=kept, position=position, metrics=metrics, generated=generated)


def round_seed(seed: int, step: int, round_: int) -> int:
    """A rollout's seed: a function of where the run stands, so that a resumed run draws what it would have drawn."""
    digest = hashlib.sha256(f"engine_trainer:{seed}:{step}:{round_}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def totals(groups: Sequence[Group]) -> torch.Tensor:
    """``[P, n]`` float64: what the reward functions gave."""
    return torch.tensor(
        [[a.score.total for a in g.completions] for g in groups], dtype=torch.float64
    )


def shaped_rewards(groups: Sequence[Group], config: RLConfig) -> torch.Tensor:
    """``[P, n]`` float64: the rewards with the overlong punishment."""
    rewards, overlong = totals(groups), config.algorithm.overlong
    if not overlong.buffer:
        return rewards
    lengths = torch.tensor([[len(a.tokens) for a in g.completions] for g in groups])
    return rewards + overlong_penalty(
        lengths,
        max_length=config.rollout.max_new_tokens,
        buffer=overlong.buffer,
        factor=overlong.penalty,
    )


def is_stale(answer: ScoredCompletion, oldest: int) -> list[bool]:
    """Of each token, whether weights older than version ``oldest`` made it."""
    return [version < oldest for version in answer.weight_versions]


def staleness_figures(groups: Sequence[Group], version: int, oldest: int) -> dict[str, float]:
    """``rollout/…`` of groups that a policy of ``version`` is to be trained on; of the tokens that the model made.

    ``staleness`` and ``staleness_max`` (optimizer steps; 0 where there is no token), ``stale_tokens`` that carry no loss, and
    ``continued``, the share of answers that more than one version made.
    """
    answers = [a for g in groups for a in g.completions]
    made = [v for a in answers for v in a.versions]
    behind = [version - v for v in made] or [0]
    return {
        "rollout/staleness": fmean(behind),
        "rollout/staleness_max": float(max(behind)),
        "rollout/stale_tokens": float(sum(v < oldest for v in made)),
        "rollout/continued": fmean(len(set(a.versions)) > 1 for a in answers),
    }


def completion_figures(groups: Sequence[Group], seconds: float = 0.0) -> dict[str, float]:
    """``train/…``, ``rollout/…`` and ``reward/…`` of all answers that were generated; ``perf/…`` where it took known ``seconds``."""
    answers = [a for g in groups for a in g.completions]
    rewards = totals(groups)
    parts = {name: fmean(a.score.parts[name] for a in answers) for name in answers[0].score.parts}
    figures = {
        "train/reward": float(rewards.mean()),
        "train/reward_std": float(rewards.std(correction=0)),
        "train/accuracy": fmean(a.score.correct for a in answers),
        "rollout/uninformative_groups": fmean((~informative(rewards)).tolist()),
        "rollout/response_length": fmean(len(a.tokens) for a in answers),
        "rollout/response_length_max": float(max(len(a.tokens) for a in answers)),
        "rollout/truncated": fmean(not a.finished for a in answers),
        "rollout/tokens": float(sum(a.num_generated for a in answers)),
    }
    if seconds:
        figures["perf/generated_tokens_per_s"] = figures["rollout/tokens"] / seconds
    figures |= failure_figures([a.score for a in answers])
    figures |= {f"reward/{name}": value for name, value in parts.items() if len(parts) > 1}
    return figures | {
        f"agent/{name}": fmean(a.figures[name] for a in answers) for name in answers[0].figures
    }

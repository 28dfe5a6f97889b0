"""The experience of a step, which is groups of completions and the rewards that count."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

from engine_trainer.algorithms.inputs import Completions
from engine_trainer.algorithms.shaping import informative, overlong_penalty
from engine_trainer.config import RLConfig
from engine_trainer.config.combined_reward import COMBINE, parts_of
from engine_trainer.config.sections import RewardSection
from engine_trainer.data import PromptDataset, SampleOrder
from engine_trainer.placement.replica import Group, ScoredCompletion
from engine_trainer.rewards import failure_figures
from engine_trainer.sampling.sampler import Sampler, require_groups


@dataclass(frozen=True, kw_only=True)
class Experience:
    """The groups of one step, the same on all ranks."""

    groups: list[Group]
    position: int
    """Position of the next prompt in the run's order."""
    metrics: dict[str, float]
    """Figures over all generated completions, those of dropped groups included."""
    generated: list[Group] = field(default_factory=list[Group])
    """All generated groups, including those that are not trained on."""
    pending: list[int] = field(default_factory=list[int])
    """Positions before ``position`` whose prompts are still being generated for."""

    @property
    def state(self) -> dict[str, Any]:
        """The position where a resumed run goes on, as JSON."""
        state: dict[str, Any] = {"position": self.position}
        if self.pending:
            state["pending"] = self.pending
        return state


def collect_experience(
    sampler: Sampler,
    data: PromptDataset,
    order: SampleOrder,
    config: RLConfig,
    *,
    step: int,
    position: int,
) -> Experience:
    """Return ``prompts_per_step`` groups from ``position`` on, within ``sampler.serving``.

    With dynamic sampling, groups whose rewards are all equal are replaced by new prompts, round by
    round. After ``max_rounds`` the step takes the groups that it has, which may be fewer, or none.
    So it is with prompts that ``data.on_bad_image: drop`` leaves out.
    """
    wanted = config.algorithm.prompts_per_step
    dynamic = config.algorithm.dynamic_sampling
    generated: list[Group] = []
    kept: list[Group] = []
    rounds = 0
    bad_images = 0
    # Discard the seconds that an evaluation has spent since the last step.
    sampler.timers.take_spent("generate")
    while len(kept) < wanted and rounds < (dynamic.max_rounds if dynamic.enabled else 1):
        indices = order.take(position, wanted - len(kept))
        position += len(indices)
        new = sampler.sample(
            [data[i] for i in indices],
            n=config.rollout.n,
            temperature=config.rollout.temperature,
            seed=round_seed(config.run.seed, step, rounds),
        )
        chosen = dynamic.enabled and new
        keep = informative(totals(new)).tolist() if chosen else [True] * len(new)
        generated += new
        bad_images += len(indices) - len(new)
        kept += [group for group, useful in zip(new, keep, strict=True) if useful]
        rounds += 1
    require_groups(generated, "this step")
    metrics = completion_figures(generated, sampler.timers.take_spent("generate")) | {
        "rollout/groups": float(len(kept)),
        "rollout/rounds": float(rounds),
    }
    if bad_images:
        metrics["train/bad_images"] = float(bad_images)
    return Experience(groups=kept, position=position, metrics=metrics, generated=generated)


def round_seed(seed: int, step: int, round_: int) -> int:
    """Return a rollout's seed for one round of a step.

    It is a function of the run's seed, step and round, so that a resumed run draws the same
    completions.
    """
    digest = hashlib.sha256(f"engine_trainer:{seed}:{step}:{round_}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def totals(groups: Sequence[Group]) -> torch.Tensor:
    """Return the rewards ``[P, n]`` float64 as the reward functions gave them."""
    return torch.tensor(
        [[a.score.total for a in g.completions] for g in groups], dtype=torch.float64
    )


def shaped_rewards(groups: Sequence[Group], config: RLConfig) -> torch.Tensor:
    """Return the rewards ``[P, n]`` float64 with the overlong punishment."""
    rewards = totals(groups)
    overlong = config.algorithm.overlong
    if not overlong.buffer:
        return rewards
    lengths = torch.tensor([[len(a.tokens) for a in g.completions] for g in groups])
    return rewards + overlong_penalty(
        lengths,
        max_length=config.rollout.max_new_tokens,
        buffer=overlong.buffer,
        factor=overlong.penalty,
    )


def completions_of(groups: Sequence[Group], config: RLConfig) -> Completions:
    """Return the rewards of a step's groups, as an advantage of whole completions gets them."""
    scores = [[a.score for a in g.completions] for g in groups]
    names = list(scores[0][0].parts)
    parts = {
        name: torch.tensor([[s.parts[name] for s in row] for row in scores], dtype=torch.float64)
        for name in names
    }
    return Completions(
        rewards=shaped_rewards(groups, config),
        parts=parts,
        weights=reward_weights(config.reward, names),
        lengths=torch.tensor([[len(a.tokens) for a in g.completions] for g in groups]),
    )


def reward_weights(section: RewardSection, names: Sequence[str]) -> dict[str, float]:
    """Return the factor of each reward in the weighted sum."""
    if section.name != COMBINE:
        return dict.fromkeys(names, 1.0)
    parts = parts_of(section.kwargs, section.timeout_s)
    return {part.title: part.weight for part in parts}


def is_stale(completion: ScoredCompletion, oldest: int) -> list[bool]:
    """Return for each token whether weights older than version ``oldest`` made it."""
    return [version < oldest for version in completion.weight_versions]


def staleness_figures(groups: Sequence[Group], version: int, oldest: int) -> dict[str, float]:
    """Return ``rollout/…`` of the groups that a policy of ``version`` is trained on.

    The figures are over the tokens that the model made: ``staleness`` and ``staleness_max``
    (optimizer steps, 0 where there is no token), ``stale_tokens`` (those that carry no loss), and
    ``continued``, the fraction of completions that more than one version made.
    """
    completions = [a for g in groups for a in g.completions]
    made = [v for a in completions for v in a.versions]
    behind = [version - v for v in made] or [0]
    return {
        "rollout/staleness": fmean(behind),
        "rollout/staleness_max": float(max(behind)),
        "rollout/stale_tokens": float(sum(v < oldest for v in made)),
        "rollout/continued": fmean(len(set(a.versions)) > 1 for a in completions),
    }


def completion_figures(groups: Sequence[Group], seconds: float = 0.0) -> dict[str, float]:
    """Return ``train/…``, ``rollout/…`` and ``reward/…`` over all generated completions.

    With the ``seconds`` that generation took also ``perf/…``.
    """
    completions = [a for g in groups for a in g.completions]
    rewards = totals(groups)
    parts = {
        name: fmean(a.score.parts[name] for a in completions) for name in completions[0].score.parts
    }
    figures = {
        "train/reward": float(rewards.mean()),
        "train/reward_std": float(rewards.std(correction=0)),
        "train/accuracy": fmean(a.score.correct for a in completions),
        "rollout/uninformative_groups": fmean((~informative(rewards)).tolist()),
        "rollout/response_length": fmean(len(a.tokens) for a in completions),
        "rollout/response_length_max": float(max(len(a.tokens) for a in completions)),
        "rollout/truncated": fmean(not a.finished for a in completions),
        "rollout/tokens": float(sum(a.num_generated for a in completions)),
    }
    # Rollouts that generate one token with each pass need not count them.
    if passes := sum(a.passes for a in completions):
        figures["rollout/accepted_length"] = figures["rollout/tokens"] / passes
    if seconds:
        figures["perf/generated_tokens_per_s"] = figures["rollout/tokens"] / seconds
    figures |= failure_figures([a.score for a in completions])
    figures |= {f"reward/{name}": value for name, value in parts.items() if len(parts) > 1}
    return figures | {
        f"agent/{name}": fmean(a.figures[name] for a in completions)
        for name in completions[0].figures
    }

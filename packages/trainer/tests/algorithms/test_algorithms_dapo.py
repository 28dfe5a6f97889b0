"""DAPO as in its paper, against the equations in Python's own numbers.

arXiv:2503.14476, eq. 8 to 13.
"""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch
from layout import ROOT

from engine_api.batch import Batch
from engine_api.losses import token_weights
from engine_api.results import TokenOutputs
from engine_trainer.algorithms.advantages import group_advantages
from engine_trainer.algorithms.losses import PolicyLoss, denominator
from engine_trainer.algorithms.shaping import informative, overlong_penalty
from engine_trainer.config import RLConfig
from engine_trainer.config.loading import load_config
from engine_trainer.data import Prompt
from engine_trainer.placement.replica import Group, ScoredCompletion
from engine_trainer.rewards import Score
from engine_trainer.rl.experience import shaped_rewards

LOW = 0.2
HIGH = 0.28
MAX_LENGTH = 10
CACHE = 4


def punishment(length: int) -> float:
    """Return the punishment of eq. 13."""
    if length <= MAX_LENGTH - CACHE:
        return 0.0
    return ((MAX_LENGTH - CACHE) - length) / CACHE if length <= MAX_LENGTH else -1.0


def test_the_objective_by_the_equations():
    dice = random.Random(9)
    # The middle group is left out by eq. 11.
    correct = [
        [1.0, -1.0, -1.0],
        [1.0, 1.0, 1.0],
        [-1.0, 1.0, 1.0],
    ]
    lengths = [[2, 7, 10], [8, 9, 10], [6, 3, 9]]
    ratios = [[[dice.uniform(0.5, 1.6) for _ in range(n)] for n in row] for row in lengths]

    kept = informative(torch.tensor(correct, dtype=torch.float64)).tolist()
    assert kept == [True, False, True]
    groups = [i for i, keep in enumerate(kept) if keep]

    objective = 0.0
    tokens = 0
    for g in groups:
        rewards = [r + punishment(n) for r, n in zip(correct[g], lengths[g], strict=True)]
        mean = statistics.fmean(rewards)
        deviation = statistics.stdev(rewards)
        for reward, answer in zip(rewards, ratios[g], strict=True):
            advantage = (reward - mean) / deviation  # eq. 9
            for r in answer:  # eq. 8 and 12: each token of the batch weighs the same
                objective += min(r * advantage, max(1 - LOW, min(1 + HIGH, r)) * advantage)
                tokens += 1

    penalty = overlong_penalty(torch.tensor(lengths), max_length=MAX_LENGTH, buffer=CACHE)
    assert penalty.tolist() == [[punishment(n) for n in row] for row in lengths]
    rewards = (torch.tensor(correct, dtype=torch.float64) + penalty)[groups]
    advantages = group_advantages(rewards, "grpo", eps=0.0)
    documents = [
        {
            "input_ids": [0] * (1 + len(answer)),
            "mask": [0.0] + [1.0] * len(answer),
            "advantages": [0.0] + [float(advantages[k, i])] * len(answer),
            "old_log_probs": [0.0] + [-1.0] * len(answer),
            "new": [0.0] + [-1.0 + math.log(r) for r in answer],
        }
        for k, g in enumerate(groups)
        for i, answer in enumerate(ratios[g])
    ]
    batch = Batch.pack(documents)
    batch = batch.with_fields(
        loss_weight=token_weights(batch["mask"], batch.cu_seqlens, "token-mean")
    )
    result = PolicyLoss(clip_low=LOW, clip_high=HIGH)(TokenOutputs(log_probs=batch["new"]), batch)
    whole = denominator("token-mean", [n for g in groups for n in lengths[g]])
    assert whole == tokens
    assert float(result.loss) / whole == pytest.approx(-objective / tokens, rel=1e-5)
    assert int(result.metrics["clipped_high"]) > 0
    assert int(result.metrics["clipped_low"]) > 0


def test_the_recipe_has_the_papers_numbers():
    """Check the numbers of section 4.1.

    512 prompts of 16 completions, 16 updates, 16384 tokens and 4096 of punishment, AdamW at 1e-6
    after 20 steps.
    """
    recipe = ROOT / "recipes" / "rl" / "dapo.yaml"
    config = load_config(RLConfig, recipe, ["engine.model.path=m"])
    algorithm = config.algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.aggregation) == (
        0.2,
        0.28,
        "token-mean",
    )
    assert (algorithm.prompts_per_step, config.rollout.n, algorithm.mini_batches) == (512, 16, 16)
    assert (config.rollout.max_new_tokens, algorithm.overlong.buffer) == (16384 + 4096, 4096)
    assert (algorithm.dynamic_sampling.enabled, algorithm.kl.coefficient) == (True, 0.0)
    optimizer = config.engine.optimizer
    schedule = config.engine.schedule
    assert optimizer is not None
    assert (optimizer.lr, schedule.name, schedule.warmup_steps) == (1e-6, "constant", 20 * 16)


@pytest.mark.parametrize("recipe", ["dapo.yaml", "dapo_fp8.yaml"])
def test_the_recipes_totals_are_the_papers_on_another_scale(recipe):
    """Check eq. 13 with rewards 1 and -1.

    A right completion at the limit is half-way from wrong to right.
    """
    config = load_config(RLConfig, ROOT / "recipes" / "rl" / recipe, ["engine.model.path=m"])
    limit = 16384 + 4096
    buffer = 4096
    lengths = [1, limit - buffer, limit - buffer + 1, limit - buffer // 2, limit]
    graded = [(length, right) for right in (True, False) for length in lengths]

    def paper(length: int, right: bool) -> float:
        soft = 0.0 if length <= limit - buffer else ((limit - buffer) - length) / buffer
        return (1.0 if right else -1.0) + soft

    answers = [
        ScoredCompletion(
            tokens=[5] * length,
            log_probs=[-1.0] * length,
            text="",
            finished=length < limit,
            weight_versions=[0] * length,
            score=Score(total=float(right), parts={}, correct=right),
        )
        for length, right in graded
    ]
    prompt = Prompt(tokens=[6], rendered="", text="", answer=None)
    totals = shaped_rewards([Group(prompt=prompt, completions=answers)], config)[0]
    expected = torch.tensor([paper(*one) for one in graded], dtype=torch.float64)
    torch.testing.assert_close(totals, (expected + 1) / 2, rtol=0, atol=1e-7)
    at_the_limit = dict(zip(graded, totals.tolist(), strict=True))
    assert at_the_limit[limit, True] == 0.5
    assert at_the_limit[limit, False] == -0.5
    assert at_the_limit[1, False] == 0.0
    # Advantages do not know the scale: those of the recipe are the paper's.
    torch.testing.assert_close(
        group_advantages(totals[None]), group_advantages(expected[None]), rtol=1e-5, atol=1e-6
    )

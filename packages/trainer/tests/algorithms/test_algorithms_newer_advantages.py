"""Batch-scaled rewards, GDPO and the optimal token baseline, by each paper's equation."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from engine_api.batch import Batch
from engine_trainer.algorithms import Completions
from engine_trainer.algorithms.advantages import gdpo, grpo_batch
from engine_trainer.config.algorithm import AlgorithmSection
from engine_trainer.extensions.built_in import ADVANTAGES
from engine_trainer.rl.credit import CreditAssignment

REWARDS = [[1.0, 0.0, 0.25], [3.0, 2.0, 2.5], [0.5, 0.5, 0.5]]


def test_batch_scaled_rewards():
    deviation = statistics.stdev([x for row in REWARDS for x in row])
    expected = [[(x - statistics.fmean(row)) / (deviation + 1e-4) for x in row] for row in REWARDS]
    given = grpo_batch(Completions(rewards=torch.tensor(REWARDS, dtype=torch.float64)), eps=1e-4)
    torch.testing.assert_close(given, torch.tensor(expected), rtol=1e-6, atol=1e-7)
    assert given[2].tolist() == [0.0, 0.0, 0.0]


def test_gdpo_normalizes_each_reward_and_then_the_step():
    parts = {
        "math": [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0]],
        "format": [[0.2, 0.4, 0.9], [0.5, 0.1, 0.1], [0.3, 0.6, 0.0]],
    }
    weights = {"math": 1.0, "format": 0.5}
    shaping = [[0.0, 0.0, -0.5], [0.0, 0.0, 0.0], [0.0, -0.25, 0.0]]

    def normalized(row: list[float]) -> list[float]:
        if len(set(row)) == 1:
            return [0.0] * len(row)
        mean, deviation = statistics.fmean(row), statistics.stdev(row)
        return [(x - mean) / (deviation + 1e-4) for x in row]

    def expected(with_shaping: bool) -> torch.Tensor:
        terms = [(weights[name], table) for name, table in parts.items()]
        terms += [(1.0, shaping)] * with_shaping
        summed = [
            [sum(w * normalized(table[p])[i] for w, table in terms) for i in range(3)]
            for p in range(3)
        ]
        flat = [x for row in summed for x in row]
        mean, deviation = statistics.fmean(flat), statistics.stdev(flat)
        return torch.tensor([[(x - mean) / (deviation + 1e-4) for x in row] for row in summed])

    tables = {name: torch.tensor(t, dtype=torch.float64) for name, t in parts.items()}
    total = sum(weights[name] * t for name, t in tables.items())
    assert isinstance(total, torch.Tensor)
    plain = gdpo(Completions(rewards=total, parts=tables, weights=weights), eps=1e-4)
    torch.testing.assert_close(plain, expected(False), rtol=1e-6, atol=1e-7)
    shaped = total + torch.tensor(shaping, dtype=torch.float64)
    given = gdpo(Completions(rewards=shaped, parts=tables, weights=weights), eps=1e-4)
    torch.testing.assert_close(given, expected(True), rtol=1e-6, atol=1e-7)


def test_gdpo_tells_apart_what_grpo_does_not():
    """Check the paper's example, (1, 0) and (1, 1) against (0, 0), which are the same to GRPO."""
    parts = {
        "a": torch.tensor([[0.0, 1.0], [0.0, 1.0]], dtype=torch.float64),
        "b": torch.tensor([[0.0, 0.0], [0.0, 1.0]], dtype=torch.float64),
    }
    total = parts["a"] + parts["b"]
    completions = Completions(rewards=total, parts=parts, weights={"a": 1.0, "b": 1.0})
    grpo = ADVANTAGES.function("grpo")(completions)
    assert grpo[0].tolist() == pytest.approx(grpo[1].tolist(), rel=1e-5)
    own = gdpo(completions)
    assert float(own[1, 1]) > 1.5 * float(own[0, 1])


# --- the optimal token baseline -------------------------------------------------------------------


class AllRanks:
    """A policy whose shards are all held here."""

    def gather(self, given):
        return list(given)


LOG_PROBS = {
    (0, 0): [-0.2, -1.5, -0.7],
    (0, 1): [-2.0, -0.1],
    (0, 2): [-0.5],
    (1, 0): [-0.3, -0.4],
    (1, 1): [-1.0, -0.6, -0.05, -3.0],
    (1, 2): [-0.9, -0.8],
}


def shard(places: list[tuple[int, int]]) -> Batch:
    documents = []
    for place in places:
        numbers = LOG_PROBS[place]
        # A tool's token after the first one of the policy.
        old = [0.0, numbers[0], math.nan, *numbers[1:]]
        mask = [0.0, 1.0, 0.0] + [1.0] * (len(numbers) - 1)
        documents.append({"input_ids": [1] * len(old), "mask": mask, "old": old})
    packed = Batch.pack([{k: v for k, v in d.items() if k != "old"} for d in documents])
    return packed.with_computed(
        old_log_probs=torch.tensor([x for d in documents for x in d["old"]])
    )


def expected_otb(place: tuple[int, int], zero_tail: bool) -> list[float]:
    group = {i: LOG_PROBS[place[0], i] for i in range(3)}
    found = []
    for t in range(len(LOG_PROBS[place])):
        alive = [i for i, numbers in group.items() if len(numbers) > t]
        energy = {i: sum(1 - math.exp(x) for x in group[i][: t + 1]) for i in alive}
        gain = {i: REWARDS[place[0]][i] for i in alive}
        baseline = sum(gain[i] * energy[i] for i in alive) / sum(energy.values())
        if zero_tail and len(alive) == 1:
            baseline = 0.0
        found.append(gain[place[1]] - baseline)
    return found


@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize(
    "places",
    [
        [[(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]],
        [[(1, 1), (0, 2), (0, 0)], [], [(1, 2), (0, 1), (1, 0)]],
    ],
    ids=["one rank", "groups spread over ranks"],
)
def test_the_optimal_token_baseline(places, zero_tail):
    section = AlgorithmSection(advantage="otb", advantage_options={"zero_tail": zero_tail})
    credit = CreditAssignment(section, AllRanks())  # pyright: ignore[reportArgumentType]
    assert credit.reads_old_log_probs
    assert not credit.zero_stays_zero
    nothing = torch.zeros(0)
    empty = Batch.pack([]).with_fields(mask=nothing, old_log_probs=nothing)
    shards = [shard(own) if own else empty for own in places]
    rewards = torch.tensor(REWARDS[:2], dtype=torch.float64)
    given = credit.assign(shards, places, Completions(rewards=rewards), [])
    for own, packed, advantages in zip(places, shards, given.advantages, strict=True):
        expected = [x for place in own for x in expected_otb(place, zero_tail)]
        assert advantages[packed["mask"] > 0].tolist() == pytest.approx(expected, rel=1e-6)
        assert not advantages[packed["mask"] <= 0].any()

"""From rewards to advantages of tokens, over shards of several ranks: numbers by hand."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from engine_api.batch import Batch
from engine_api.errors import ConfigError
from engine_trainer.algorithms import Completions
from engine_trainer.config.algorithm import AlgorithmSection, CriticSection, KLSection
from engine_trainer.rl.credit import CreditAssignment


class AllRanks:
    """A policy whose shards are all held here."""

    def gather(self, rows):
        return list(rows)


def assignment(**section) -> CreditAssignment:
    return CreditAssignment(AlgorithmSection(**section), AllRanks())  # pyright: ignore[reportArgumentType]


def shard(*answers: list[float]) -> Batch:
    """Build documents of one prompt token and a completion.

    Each number is the log-ratio to the reference at its token.
    """
    documents = [
        {
            "input_ids": [1] * (1 + len(a)),
            "mask": [0.0] + [1.0] * len(a),
            "old_log_probs": [0.0, *a],
            "ref_log_probs": [0.0] * (1 + len(a)),
        }
        for a in answers
    ]
    return Batch.pack(documents)


# Two groups of two answers on two ranks; the second rank's first answer is (1, 0).
SHARDS = [shard([0.1, 0.3], [0.2]), shard([0.0, 0.4], [0.5])]
PLACES = [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
REWARDS = torch.tensor([[1.0, 0.0], [3.0, 2.0]], dtype=torch.float64)
VALUES = [torch.tensor([9.0, 0.5, 0.25, 9.0, 0.5]), torch.tensor([9.0, 1.0, 2.0, 9.0, 1.0])]


def close(given, *expected: list[float]) -> None:
    for a, b in zip(given, expected, strict=True):
        torch.testing.assert_close(a, torch.tensor(b))


def test_groups_share_one_advantage():
    section = assignment(advantage="dr_grpo")
    assert section.zero_stays_zero
    assert section.before(Completions(rewards=REWARDS)).tolist() == [[0.5, -0.5], [0.5, -0.5]]
    credit = section.assign(SHARDS, PLACES, Completions(rewards=REWARDS), [])
    close(credit.advantages, [0, 0.5, 0.5, 0, -0.5], [0, 0.5, 0.5, 0, -0.5])
    assert not credit.returns
    assert not credit.figures


def test_groups_with_a_kl_in_the_reward():
    section = assignment(
        advantage="dr_grpo", kl=KLSection(coefficient=0.5, where="reward", estimator="k1")
    )
    assert not section.zero_stays_zero
    credit = section.assign(SHARDS, PLACES, Completions(rewards=REWARDS), [])
    # rewards 1 - 0.2, 0 - 0.1; 3 - 0.2, 2 - 0.25
    close(credit.advantages, [0, 0.45, 0.45, 0, -0.45], [0, 0.525, 0.525, 0, -0.525])
    assert credit.figures == pytest.approx(
        {"train/kl": (0.4 + 0.2 + 0.4 + 0.5) / 4, "train/kl_coefficient": 0.5}
    )


def test_reinforce_pp_takes_the_kl_from_each_token_and_normalizes_over_all():
    section = assignment(
        advantage="reinforce_pp", kl=KLSection(coefficient=0.5, where="reward", estimator="k1")
    )
    credit = section.assign(SHARDS, PLACES, Completions(rewards=REWARDS), [])
    # 1 - 0.15 and before it 0.05 less; 0 - 0.1; 3 - 0.2 and nothing less; 2 - 0.25
    returns = [0.8, 0.85, -0.1, 2.8, 2.8, 1.75]
    mean, deviation = statistics.fmean(returns), math.sqrt(statistics.variance(returns) + 1e-8)
    a = [(x - mean) / deviation for x in returns]
    close(credit.advantages, [0, a[0], a[1], 0, a[2]], [0, a[3], a[4], 0, a[5]])


def test_the_discount_of_reinforce_pp():
    credit = assignment(advantage="reinforce_pp", gamma=0.5, whiten=False).assign(
        SHARDS, PLACES, Completions(rewards=REWARDS), []
    )
    close(credit.advantages, [0, 0.5, 1, 0, 0], [0, 1.5, 3, 0, 2])


def test_reinforce_pp_baseline_normalizes_over_tokens_not_over_answers():
    section = assignment(advantage="reinforce_pp_baseline")
    assert not section.zero_stays_zero
    credit = section.assign(SHARDS, PLACES, Completions(rewards=REWARDS), [])
    centred = [0.5, 0.5, -0.5, 0.5, 0.5, -0.5]
    mean, deviation = statistics.fmean(centred), math.sqrt(statistics.variance(centred) + 1e-8)
    up, down = (0.5 - mean) / deviation, (-0.5 - mean) / deviation
    close(credit.advantages, [0, up, up, 0, down], [0, up, up, 0, down])


def test_gae_with_a_kl_by_hand():
    kl = KLSection(coefficient=0.5, where="reward", estimator="k1")
    section = assignment(
        advantage="gae", gamma=0.5, lam=0.5, whiten=False, critic=CriticSection(), kl=kl
    )
    credit = section.assign(SHARDS, PLACES, Completions(rewards=REWARDS), VALUES)
    # δ: 1 - 0.15 - 0.25 = 0.6; -0.05 + 0.125 - 0.5 = -0.425, and γλ = 0.25
    # δ: 3 - 0.2 - 2 = 0.8; 0 + 0.5 · 2 - 1 = 0
    close(credit.advantages, [0, -0.275, 0.6, 0, -0.6], [0, 0.2, 0.8, 0, 0.75])
    close(credit.returns, [0, 0.225, 0.85, 0, -0.1], [0, 1.2, 2.8, 0, 1.75])
    whitened = assignment(
        advantage="gae", gamma=0.5, lam=0.5, critic=CriticSection(), kl=kl
    ).assign(SHARDS, PLACES, Completions(rewards=REWARDS), VALUES)
    given = torch.cat(whitened.advantages)[[1, 2, 4, 6, 7, 9]]
    assert float(given.mean()) == pytest.approx(0, abs=1e-6)
    assert float(given.std()) == pytest.approx(1, abs=1e-6)
    # The critic's targets are not whitened.
    close(whitened.returns, [0, 0.225, 0.85, 0, -0.1], [0, 1.2, 2.8, 0, 1.75])


def test_the_coefficient_follows_its_target():
    section = assignment(
        advantage="dr_grpo",
        kl=KLSection(coefficient=0.5, where="reward", estimator="k1", target=0.25, gain=0.1),
    )
    first = section.assign(SHARDS, PLACES, Completions(rewards=REWARDS), []).figures
    assert first["train/kl_coefficient"] == 0.5
    # The KL is 0.375 nats, half above the target; the correction is limited to a fifth.
    assert section.kl_coefficient == pytest.approx(0.5 * 1.02)
    assert section.assign(SHARDS, PLACES, Completions(rewards=REWARDS), []).figures[
        "train/kl_coefficient"
    ] == pytest.approx(0.51)


def test_a_rank_without_documents_takes_part():
    nothing = torch.zeros(0)
    empty = Batch.pack([]).with_fields(mask=nothing, old_log_probs=nothing, ref_log_probs=nothing)
    kl = KLSection(coefficient=0.5, where="reward", estimator="k1")
    for section in (
        {"advantage": "gae", "critic": CriticSection()},
        {"advantage": "grpo"},
        {"advantage": "reinforce_pp"},
    ):
        both = assignment(kl=kl, **section).assign(
            [*SHARDS, empty], [*PLACES, []], Completions(rewards=REWARDS), [*VALUES, nothing]
        )
        alone = assignment(kl=kl, **section).assign(
            SHARDS, PLACES, Completions(rewards=REWARDS), VALUES
        )
        close(both.advantages[:2], *(a.tolist() for a in alone.advantages))
        assert both.advantages[2].shape == (0,)
        assert both.figures == alone.figures


@pytest.mark.parametrize(
    ("section", "field", "said"),
    [
        ({"advantage": "gae"}, "critic", "needs values"),
        ({"critic": CriticSection()}, "critic", "set advantage: gae"),
        ({"gamma": 0.9}, "gamma", "advantage: gae or reinforce_pp"),
        ({"gamma": 1.1, "advantage": "reinforce_pp"}, "gamma", r"in \[0, 1\], got 1.1"),
        ({"lam": 0.9, "advantage": "reinforce_pp"}, "lam", "only gae"),
        ({"lam": -1}, "lam", r"in \[0, 1\], got -1"),
        (
            {"loss": "gspo", "advantage": "reinforce_pp", "aggregation": "seq-mean-token-mean"},
            "loss",
            "gspo_token",
        ),
        ({"loss": "gspo"}, "aggregation", "seq-mean-token-mean"),
        ({"loss": "cispo", "dual_clip": 3.0}, "dual_clip", "loss: ppo"),
    ],
)
def test_what_does_not_go_together_is_refused(section, field, said):
    with pytest.raises(ConfigError, match=said) as caught:
        AlgorithmSection(**section)
    assert caught.value.field == f"algorithm.{field}"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"target": 1.0}, "where: reward"),
        ({"target": 1.0, "where": "reward"}, "coefficient above 0"),
        ({"target": -1.0, "where": "reward", "coefficient": 0.1}, "target above 0"),
        ({"target": 1.0, "where": "reward", "coefficient": 0.1, "gain": 5.0}, "gain"),
    ],
)
def test_a_target_without_a_kl_to_adapt_is_refused(section, said):
    with pytest.raises(ConfigError, match=said) as caught:
        KLSection(**section)
    assert caught.value.field == "algorithm.kl.target"

from __future__ import annotations

import re

import pytest

from engine_api.errors import ConfigError
from engine_trainer.config.sections import GymDataset, GymSection
from engine_trainer.data.gym import gym_examples, is_heldout
from engine_trainer.errors import DataError

pytest.importorskip("reasoning_gym")
LEGS = GymDataset(
    name="leg_counting", weight=2.0, config={"min_animals": 2, "max_animals": 3, "max_instances": 9}
)
SUMS = GymDataset(
    name="chain_sum", config={"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
)


def gym(**settings):
    return GymSection(
        **{"datasets": [LEGS, SUMS], "size": 300, "heldout_size": 60, "response": "worked"}
        | settings
    )


def questions(section, side="train"):
    return [e.messages[0]["content"] for e in gym_examples(section, side)]


def test_no_question_stands_twice_or_on_both_sides_whatever_the_seed():
    train, heldout = [], []
    for seed in (0, 1):
        train += questions(gym(seed=seed))
        heldout += questions(gym(seed=seed), "heldout")
        assert len(set(train[-300:])) == 300
    assert len(heldout) == 120
    assert not set(train) & set(heldout)
    assert all(is_heldout(q, 0.1) for q in heldout)


def test_the_share_is_about_what_was_asked_for():
    share = sum(is_heldout(f"question {i}", 0.1) for i in range(20_000)) / 20_000
    assert abs(share - 0.1) < 0.01


def test_skip_gives_other_questions_and_leaves_heldout_as_it_is():
    first, then = gym(size=200), gym(size=100, skip=200)
    assert questions(first) + questions(then) == questions(gym(size=300))
    assert questions(first, "heldout") == questions(then, "heldout")


def test_worked_answers_lead_to_the_answer_and_score():
    import reasoning_gym

    for example in gym_examples(gym(size=60), "train"):
        text = example.messages[1]["content"]
        assert text.endswith(f"#### {example.answer}")
        for left, right in re.findall(r"([-\d+*]+)=(-?\d+)", text):
            assert eval(left) == int(right)  # digits and signs only
        entry = example.metadata["entry"]
        score = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
        assert score(example.answer, entry) == 1.0


@pytest.mark.parametrize(
    ("settings", "field", "said"),
    [
        (
            {"datasets": [GymDataset(name="leg_countin")]},
            "data.reasoning_gym.datasets[0].name",
            "did you mean leg_counting",
        ),
        (
            {"datasets": [GymDataset(name="chain_sum", config={"terms": 2})]},
            "data.reasoning_gym.datasets",
            "terms",
        ),
        (
            {"datasets": [GymDataset(name="chain_sum", config={"min_terms": 9, "max_terms": 2})]},
            "data.reasoning_gym.datasets",
            "max_terms",
        ),
        ({"response": "work"}, "data.reasoning_gym.response", "did you mean worked"),
        (
            {"datasets": [GymDataset(name="gcd")]},
            "data.reasoning_gym.response",
            "no worked answers for 'gcd'",
        ),
    ],
)
def test_wrong_settings_are_named(settings, field, said):
    with pytest.raises(ConfigError) as caught:
        gym_examples(gym(**settings), "train")
    assert caught.value.field == field
    assert said in str(caught.value)


@pytest.mark.slow
def test_a_task_that_is_too_small_says_how_many_questions_it_has():
    tiny = GymDataset(
        name="chain_sum", config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    )
    with pytest.raises(DataError, match=r"expected 5000 different train questions, got \d+"):
        gym_examples(gym(datasets=[tiny], size=5000), "train")

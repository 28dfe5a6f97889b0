"""Fuzz tests of the values that a reward function may return, raise and receive.

The result is a finite number or a typed error, and the next call works.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator

import odd_rewards
import pytest
from fuzzing import fuzz
from hypothesis import example, given
from hypothesis import strategies as st

from engine_api.errors import ConfigError
from engine_trainer.config import RLConfig
from engine_trainer.config.loading import from_tree
from engine_trainer.config.sections import RewardSection
from engine_trainer.rewards import RewardError, Sample, Score, Scorer
from engine_trainer.rewards.registry import RewardSpec

FILE = odd_rewards.__file__
FINE = {"kind": "the number", "number": 1.0, "text": ""}
# An interrupt within the trainer's own process is its user's.
OF_THE_PROCESS = {"interrupt"}

texts = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(categories=["Cs", "Cc", "Co"]), max_size=5),
    st.just("x" * 100_000),
)
odd = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(odd_rewards.KINDS),
        "number": st.floats(allow_nan=False, allow_infinity=False),
        "text": texts,
    }
)
# Arguments that a built-in reward takes.
TAKEN = {"extract", "ignore_case", "flexible", "boxed_only", "full_match"}
# Names of parameters of what passes them on.
names = st.one_of(
    st.sampled_from(
        [
            "key",
            "function",
            "sample",
            "self",
            "positional",
            "keywords",
            "name",
            "func",
            "args",
            "kwargs",
            "cls",
        ]
    ),
    st.sampled_from(sorted(TAKEN)),
    st.text(max_size=5),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)

Make = Callable[[str, int], Scorer]


@pytest.fixture(scope="module")
def scorers() -> Iterator[Make]:
    """One scorer for all examples: an example that harms it makes the next one fail."""
    made: dict[tuple[str, int], Scorer] = {}

    def make(name: str, workers: int) -> Scorer:
        if (name, workers) not in made:
            section = RewardSection(
                function=f"{FILE}:{name}",
                workers=workers,
                timeout_s=60.0 if workers else None,
                max_failures=10**9,
            )
            made[name, workers] = Scorer.from_section(section)
        return made[name, workers]

    yield make
    for scorer in made.values():
        scorer.close()


def sample(does: dict) -> Sample:
    return Sample(prompt="the row", completion=json.dumps(does), answer="a")


def check(score: Score, name: str) -> None:
    assert type(score.total) is float
    assert math.isfinite(score.total)
    assert score.answer is None or type(score.answer) is str
    assert score.failed in ((), (name,))
    assert len(score.failed) == len(score.problems)
    for problem in score.problems:
        problem.encode("utf-8")  # what cannot be written to a log is no text
        assert len(problem) < 2000


def refused_key(make: Callable[[], object]) -> str:
    """Empty where nothing is refused."""
    try:
        make()
    except ConfigError as error:
        return error.field
    return ""


def judge(scorer: Scorer, rows: list[dict], name: str) -> None:
    try:
        scores = scorer.score([sample(row) for row in rows])
    except RewardError as caught:
        error = caught
    else:
        for score in scores:
            check(score, name)
        return
    assert error.prompt == "the row"
    assert str(error)


EVERY_KIND = [{"kind": kind, "number": 2.5, "text": "x\ud800"} for kind in odd_rewards.KINDS]
FUNCTIONS = ["score", "ascore", "nested"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
@fuzz(cost=2)
@given(rows=st.lists(odd, min_size=1, max_size=4))
@example(rows=EVERY_KIND)
def test_whatever_it_does_in_this_process_a_number_or_a_typed_error_comes_of_it(
    scorers, name, rows
):
    try_all(scorers(name, 0), [row for row in rows if row["kind"] not in OF_THE_PROCESS], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
@fuzz(cost=20)  # an error ends the process
@given(rows=st.lists(odd, min_size=1, max_size=4))
@example(rows=EVERY_KIND)
def test_whatever_it_does_in_another_process_a_number_or_a_typed_error_comes_of_it(
    scorers, name, rows
):
    try_all(scorers(name, 1), rows, name)


def try_all(scorer: Scorer, rows: list[dict], name: str) -> None:
    for row in rows:  # each alone too: an error ends a whole call
        judge(scorer, [row], name)
    judge(scorer, rows, name)
    assert [score.total for score in scorer.score([sample(FINE)])] == [1.0]


@fuzz()
@given(
    kwargs=st.dictionaries(names, values, max_size=3),
    function=st.sampled_from(["takes_all", "takes_none"]),
)
def test_arguments_of_any_name_reach_it_or_are_refused_by_key(kwargs, function):
    spec = RewardSpec(function=f"{FILE}:{function}", kwargs=kwargs)
    if function == "takes_none" and kwargs:
        with pytest.raises(
            ConfigError, match=r"config reward\.function: the function cannot be called with"
        ):
            spec.make()
        return
    assert spec.make()(sample(FINE)) == (len(kwargs) if function == "takes_all" else 1.0)


@pytest.mark.slow
@fuzz()
@given(
    name=st.sampled_from(["math", "gsm8k", "exact", "reasoning_gym"]),
    kwargs=st.dictionaries(names, values, max_size=2),
)
@example(name="exact", kwargs={"extract": ["none"]})
@example(name="exact", kwargs={"extract": "none", "ignore_case": None})
def test_arguments_that_a_reward_of_the_house_does_not_take_are_refused_by_key(name, kwargs):
    spec = RewardSpec(name=name, kwargs=kwargs)
    key = refused_key(spec.make)
    assert (
        key.startswith("reward.kwargs")
        if set(kwargs) - TAKEN
        else key == "" or key.startswith("reward.kwargs")
    )


@pytest.mark.slow
@fuzz()
@given(
    section=st.dictionaries(
        st.sampled_from([*RewardSection.__dataclass_fields__, "nmae"]), values, max_size=4
    )
)
def test_any_section_is_taken_or_refused_by_key(section):
    tree = {
        "engine": {"model": {"path": "m"}},
        "data": {"source": "d"},
        "run": {"output_dir": "o", "steps": 1},
        "reward": section,
    }
    key = refused_key(lambda: from_tree(RLConfig, tree))
    assert not key or key.startswith(("reward", "?"))

from __future__ import annotations

import importlib
import json
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest
from waiting import NEVER_S

from engine_api.errors import ConfigError
from engine_trainer.config.sections import RewardSection
from engine_trainer.rewards import (
    RewardError,
    Sample,
    Scorer,
    Verdict,
    WeightedReward,
    create,
    known,
    register,
)
from engine_trainer.rewards.deadline import DeadlineExceeded, alarm
from engine_trainer.rewards.exact import exact
from engine_trainer.rewards.gsm8k import gsm8k
from engine_trainer.rewards.gym import reasoning_gym
from engine_trainer.rewards.math import math
from engine_trainer.rewards.text import after_marker, inside_answer_tags, last_boxed, last_number


def sample(completion: str, answer: str | None = None, **metadata) -> Sample:
    return Sample(prompt="<user>How many?", completion=completion, answer=answer, metadata=metadata)


def scorer(function, **kwargs) -> Scorer:
    return Scorer([WeightedReward(name="mine", function=function, **kwargs)])


@pytest.mark.parametrize(
    ("find", "text", "expected"),
    [
        (after_marker, "2+2=4\n#### 4\nbye", "4"),
        (after_marker, "#### 1\n#### 2", "2"),
        (after_marker, "4", None),
        (last_number, "from 1,200.50 to -3", "-3"),
        (last_number, "$1,200.50!", "1,200.50"),
        (last_number, "none", None),
        (last_number, "it is 42, or so", "42"),
        (last_number, "12-5", "5"),
        (last_number, "a loss of -$1,200.50", "-1,200.50"),
        (last_boxed, r"\boxed{1} so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (last_boxed, r"\boxed{\frac{1}{2}", None),
        (last_boxed, "no box", None),
        (inside_answer_tags, "<answer>a</answer><answer> b\n</answer>", "b"),
        (inside_answer_tags, "<answer>a", None),
    ],
)
def test_finding_an_answer(find, text, expected):
    assert find(text) == expected


@pytest.mark.parametrize(
    ("kwargs", "completion", "answer", "expected"),
    [
        ({}, " yes\n", "yes", 1.0),
        ({}, "Yes", "yes", 0.0),
        ({"ignore_case": True}, "Yes", "yes", 1.0),
        ({"extract": "marker"}, "so\n#### 7", "7", 1.0),
        ({"extract": "marker"}, "7", "7", 0.0),
        ({"extract": "boxed"}, r"\boxed{7}", "7", 1.0),
        ({"extract": "number"}, "it is 7.", "7", 1.0),
        ({"extract": "number"}, "it is 7, I think", "7", 1.0),
    ],
)
def test_exact(kwargs, completion, answer, expected):
    assert exact(**kwargs)(sample(completion, answer)) == expected


@pytest.mark.parametrize(
    ("kwargs", "completion", "answer", "expected"),
    [
        ({}, "6*3=18\n#### 18", "Janet ... <<6*3=18>>\n#### 18", 1.0),
        ({}, "#### $1,200.0", "1200", 1.0),
        ({}, "#### 19", "18", 0.0),
        ({}, "the answer is 18", "18", 0.0),
        ({"flexible": True}, "the answer is 18", "18", 1.0),
        ({"flexible": True}, "18 is wrong\n#### 17", "18", 0.0),
        ({}, "#### none", "18", 0.0),
        ({}, "#### 42 apples in 3 boxes", "42", 1.0),
        ({}, "#### 42 apples in 3 boxes", "3", 0.0),
        ({}, "#### 42", "#### 42 apples in 3 boxes", 1.0),
        ({}, "#### 42", "42 apples in 3 boxes", 1.0),  # as data.layouts leaves it
        ({}, "#### 1,200.50 dollars for 2", "$1,200.5", 1.0),
        ({}, "#### 42, 3 a box", "42", 1.0),
        ({}, "#### -$5 (2 too many)", "-5", 1.0),
        ({}, "#### $-5", "-5", 1.0),
        ({}, "#### 10-5", "10", 1.0),
        ({}, "#### .5 of 3", "0.5", 1.0),
        ({"flexible": True}, "3 boxes, 42 apples", "42", 1.0),
        ({}, "#### 1234568", "1234567", 0.0),
        ({}, "#### 90071992547409930", "90071992547409931", 0.0),  # equal as float64
        ({}, "#### " + "9" * 400, "8" * 400, 0.0),  # no float64 is that large
    ],
)
def test_gsm8k(kwargs, completion, answer, expected):
    assert gsm8k(**kwargs)(sample(completion, answer)) == expected


@pytest.mark.parametrize(
    ("kwargs", "completion", "answer", "expected"),
    [
        ({}, r"so \boxed{\frac{1}{2}}", "1/2", 1.0),
        ({}, r"so \boxed{0.5}", r"\frac{1}{2}", 1.0),
        ({}, r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        ({}, "first 3, then it is 12", "12", 1.0),
        ({"boxed_only": True}, "it is 12", "12", 0.0),
        ({}, r"\boxed{3}, no, \boxed{4}", "3", 0.0),
        ({}, r"\boxed{13}", r"a long solution, \boxed{13}", 1.0),
        ({}, r"\boxed{18}", "so\n#### 18", 1.0),
        ({}, "", "12", 0.0),
        ({}, "}{ $$ \\frac{", "12", 0.0),
    ],
)
def test_math(kwargs, completion, answer, expected):
    assert math(**kwargs)(sample(completion, answer)) == expected


# A dependency of reasoning-gym warns when it is first compiled.
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_reasoning_gym_uses_the_tasks_own_scorer():
    import reasoning_gym as gym

    entry = gym.create_dataset("chain_sum", seed=1, size=1)[0]
    answer = entry["answer"]
    give = {"answer": answer, "entry": entry}
    assert reasoning_gym()(sample(f"so\n#### {answer}", **give)) == 1.0
    assert reasoning_gym()(sample(answer, **give)) == 0.0  # no marker
    assert reasoning_gym(extract="none")(sample(answer, **give)) == 1.0
    # the task's own scorer gives a part of a point to an answer that contains the right one
    assert 0 < reasoning_gym(full_match=False)(sample(f"#### about {answer}", **give)) < 1
    assert reasoning_gym()(sample(f"#### about {answer}", **give)) == 0.0
    with pytest.raises(RewardError, match="no reasoning-gym entry"):
        reasoning_gym()(sample("#### 1", answer="1"))


def test_registered_names_and_misspelt_ones():
    register("test_constant")(lambda value=2.0: lambda s: value)
    assert "test_constant" in known()
    assert create("test_constant", {"value": 3.0})(sample("")) == 3.0
    with pytest.raises(ConfigError, match="test_constant"):
        create("test_constnat")
    with pytest.raises(ConfigError, match="cannot be created"):
        create("test_constant", {"valeu": 3.0})
    with pytest.raises(ConfigError, match="boxed"):
        create_exact_with_unknown_extraction()


def create_exact_with_unknown_extraction():
    exact(extract="box")


def test_installed_names():
    assert {"math", "gsm8k", "exact", "reasoning_gym"} <= set(known())
    assert create("gsm8k", {"flexible": True})(sample("18", "18")) == 1.0


@pytest.mark.parametrize(
    ("ways", "vote"),
    [
        (("0.5", "1/2", r"\frac{1}{2}", r"50\%", "x = 0.5"), "1/2"),
        (("6", "6.0", r"2 \cdot 3", "n=6"), "6"),
    ],
)
def test_one_answer_is_one_vote_however_it_is_written(ways, vote):
    judge = math()
    found = [judge(sample(rf"\boxed{{{way}}}", ways[0])) for way in ways]
    assert [(float(v), v.answer) for v in found] == [(1.0, vote)] * len(ways)


@pytest.mark.parametrize(
    "given",
    [
        "2018!",
        "3^{10000}",
        r"\binom{100000}{50000}",
        r"1.5\times10^{5000}",
        "2^{2^{2^{100}}}",
        "10^{9}!",
    ],
)
@pytest.mark.timeout(60)
def test_an_answer_that_is_too_long_to_write_costs_nothing(given):
    assert math()(sample(rf"\boxed{{{given}}}", "18")) == 0.0
    assert math()(sample(rf"\boxed{{{given}}}", given)) == 1.0


def combined(*parts) -> Scorer:
    section = RewardSection(
        name="combine", kwargs={"rewards": list(parts)}, workers=0, timeout_s=None
    )
    return Scorer.from_section(section)


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        (
            [{"name": "exact", "weight": "1"}],
            r"rewards\[0\]\.weight: expected a number, got the text '1'",
        ),
        ([{"name": "exact", "weight": True}], r"rewards\[0\]\.weight: expected a number, got true"),
        ([{"name": "exact", "weight": None}], r"rewards\[0\]\.weight: expected a number, got null"),
        (
            [{"name": "exact"}, {"name": "gsm8k", "weight": float("nan")}],
            r"rewards\[1\]\.weight: nan",
        ),
        ([{"name": "exact", "weight": float("inf")}], r"rewards\[0\]\.weight: inf"),
        (
            [{"name": "exact", "timeout_s": 0}],
            r"rewards\[0\]\.timeout_s: expected .* above 0, got 0",
        ),
        (
            [{"name": "exact", "timeout_s": "a"}],
            r"rewards\[0\]\.timeout_s: expected .*, got the text 'a'",
        ),
        (
            [{"name": "exact", "kwargs": [1]}],
            r"rewards\[0\]\.kwargs: expected .*, got the list \[1\]",
        ),
        ([{"name": "exact", "wieght": 1}], r"(?s)rewards\[0\]\.wieght: unknown key.*weight"),
        (
            [{"name": "exact", "function": "a.py:b"}],
            r"(?s)rewards\[0\]: .*name or function, one of the two",
        ),
        ([{"weight": 1.0}], r"(?s)rewards\[0\]: .*name or function, one of the two"),
        ([{"name": "combine"}], r"rewards\[0\]\.name: combine within combine"),
        (["exact"], r"rewards\[0\]: expected .*, got the text 'exact'"),
        ({"name": "exact"}, r"kwargs\.rewards: expected .*, got the mapping"),
        (None, r"kwargs\.rewards: expected .*, got null"),
        ([], r"kwargs\.rewards: no reward is named"),
        ([{"name": "exact"}, {"function": "a.py:exact"}], r"kwargs\.rewards: names .*exact"),
    ],
)
def test_a_sum_that_is_not_what_it_seems_is_refused_with_the_configuration(rewards, said):
    with pytest.raises(ConfigError, match=said):
        RewardSection(name="combine", kwargs={"rewards": rewards})


def test_nothing_beside_the_rewards_is_passed_over():
    with pytest.raises(ConfigError, match=r"reward\.kwargs\.weights: unknown key"):
        RewardSection(name="combine", kwargs={"rewards": [{"name": "exact"}], "weights": [0.5]})


def test_a_sum_that_no_float_holds_is_said():
    register("test_large")(lambda: lambda sample: 1e308)
    with pytest.raises(RewardError, match="expected a finite weighted sum"):
        combined({"name": "test_large", "weight": 9.0}, {"name": "exact"}).score(
            [Sample(prompt="p", completion="c", answer="c")]
        )


def test_a_weight_of_zero_is_only_measured_and_what_failed_counts_zero():
    register("test_one")(lambda: lambda sample: 1.0)
    register("test_broken")(lambda: lambda sample: float("nan"))
    parts = [
        {"name": "test_one", "weight": 0},
        {"name": "exact", "weight": -2},
        {"name": "test_broken", "weight": 5.0},
    ]
    section = RewardSection(
        name="combine", kwargs={"rewards": parts}, workers=0, timeout_s=None, max_failures=1
    )
    (score,) = Scorer.from_section(section).score([Sample(prompt="p", completion="c", answer="c")])
    assert (score.total, score.parts) == (-2.0, {"test_one": 1.0, "exact": 1.0, "test_broken": 0.0})
    assert (score.correct, score.failed) == (True, ("test_broken",))


def test_rewards_add_up_by_weight_and_the_first_says_correct():
    register("test_length")(lambda: lambda s: len(s.completion) / 10)
    both = combined({"name": "exact"}, {"name": "test_length", "weight": -0.5})
    right, wrong = both.score([sample("yes", "yes"), sample("no", "yes")])
    assert (right.total, right.parts, right.correct) == (
        0.85,
        {"exact": 1.0, "test_length": 0.3},
        True,
    )
    assert (wrong.total, wrong.correct) == (-0.1, False)
    with pytest.raises(ConfigError, match="wieght"):
        combined({"name": "exact", "wieght": 1})
    with pytest.raises(ConfigError, match="rewards"):
        combined()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda s: 1 / 0, "ZeroDivisionError"),
        (lambda s: s.nothing, "AttributeError"),
        (lambda s: float("nan"), "not a finite number"),
        (lambda s: "a lot", "not a number"),
        (lambda s: None, "not a number"),
    ],
)
def test_a_reward_that_fails_is_named_with_what_it_was_given(function, said):
    with pytest.raises(RewardError, match=said) as caught:
        scorer(function).score([sample("my completion " + "x" * 1000, "5")])
    error = caught.value
    assert (error.function, error.prompt) == ("mine", "<user>How many?")
    assert error.completion.startswith("my completion")
    text = str(error)
    assert "'mine'" in text
    assert "How many?" in text
    assert "my completion" in text
    assert len(text) < 1000  # shortened


def test_an_answer_that_the_data_lacks():
    with pytest.raises(RewardError, match=r"data\.columns\.answer"):
        scorer(exact()).score([sample("5")])


def test_math_verify_works_out_nothing_that_has_no_end():
    assert math()(sample(r"\boxed{9^{9^{9^{9}}}}", "3")) == 0.0


def test_an_alarm_restores_the_handler_that_was_there():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(DeadlineExceeded), alarm(0.05):
        time.sleep(NEVER_S)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_alarm_waits_for_the_end_of_an_import(tmp_path, monkeypatch):
    (tmp_path / "imported_slowly.py").write_text("import time\ntime.sleep(0.5)\nDONE = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def work() -> None:
        importlib.import_module("imported_slowly")
        time.sleep(NEVER_S)

    with pytest.raises(DeadlineExceeded), alarm(0.05):
        work()
    assert sys.modules["imported_slowly"].DONE


def test_an_alarm_outside_the_main_thread_is_refused():
    caught: list[Exception] = []

    def work() -> None:
        try:
            with alarm(1.0):
                pass
        except ConfigError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


# A program of its own: spawned processes cannot import this module, which pytest loads by its path.
RANKS = """
import json, sys
import torch.distributed as dist
from engine_api.comm import TorchComm, together
from engine_api.errors import RankFailure
from engine_trainer.rewards import RewardError
from engine_trainer.rewards import Sample
from engine_trainer.rewards import Scorer
from engine_trainer.rewards import WeightedReward

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
comm = TorchComm()

def judge(sample):
    if rank == 1:
        raise KeyError("boom")
    return 1.0

try:
    completion = Sample(prompt="how many?", completion="a completion", answer=None, metadata={})
    together(comm, lambda: Scorer([WeightedReward(name="mine", function=judge)])\
.score([completion]))
    outcome = ("nothing", "")
except (RewardError, RankFailure) as error:
    outcome = (type(error).__name__, str(error))
comm.close()
dist.destroy_process_group()
print(json.dumps(outcome))
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_a_reward_that_raises_ends_all_ranks_together(tmp_path):
    program, store = tmp_path / "ranks.py", tmp_path / "store"
    program.write_text(RANKS)
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(rank), str(store)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    rows = [json.loads(rank.communicate(timeout=600)[0].splitlines()[-1]) for rank in ranks]
    assert [row[0] for row in rows] == ["RankFailure", "RewardError"]
    assert all("KeyError" in row[1] and "a completion" in row[1] for row in rows)


def test_a_verdict_is_a_number_that_says_what_it_found():
    verdict = pickle.loads(pickle.dumps(Verdict(1.0, "12")))
    assert (verdict, verdict.answer, verdict + 1) == (1.0, "12", 2.0)


@pytest.mark.parametrize(
    ("name", "kwargs", "completion", "answer", "found"),
    [
        ("gsm8k", {}, "#### $1,200.0", "1200", "1200"),
        ("gsm8k", {}, "#### 007.50", "1200", "7.5"),
        ("gsm8k", {}, "#### -0.0", "1200", "0"),
        ("gsm8k", {}, "#### 1,234,567", "1200", "1234567"),
        ("gsm8k", {}, "#### " + "12" * 40, "1200", "12" * 40),
        ("gsm8k", {}, "none", "1200", None),
        ("exact", {"extract": "boxed", "ignore_case": True}, r"\boxed{Yes}", "yes", "yes"),
        ("math", {}, r"\boxed{0.5}", "1/2", "1/2"),
        ("math", {}, r"\boxed{\frac{1}{2}}", "7", "1/2"),
        ("math", {"boxed_only": True}, "it is 12", "12", None),
    ],
)
def test_what_the_rewards_of_the_house_find(name, kwargs, completion, answer, found):
    scorer = Scorer.from_section(RewardSection(name=name, kwargs=kwargs, workers=0, timeout_s=None))
    (score,) = scorer.score([Sample(prompt="p", completion=completion, answer=answer)])
    assert score.answer == found

"""Users' own reward functions, which are loaded and run concurrently and in other processes.

Failures are counted, named and limited.
"""

from __future__ import annotations

import importlib
import os

import pytest
from own_rewards import samples, totals

from engine_api.errors import ConfigError
from engine_trainer.config.sections import RewardSection
from engine_trainer.extensions.functions import load_function
from engine_trainer.rewards import RewardError, Sample, Scorer, WeightedReward, failure_figures


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_of_a_file_with_arguments_and_a_module_beside_it(own, workers):
    scorer = own("length", kwargs={"scale": 0.5}, workers=workers)
    assert totals(scorer, "", "ab", "abcd") == [0.0, 1.0, 2.0]
    assert scorer.score(samples("ab"))[0].parts == {"length": 1.0}
    assert totals(own("borrowed", workers=workers), "") == [7.0]


def test_a_function_of_a_module(monkeypatch, tmp_path):
    (tmp_path / "my_module_of_rewards.py").write_text("def one(sample):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    scorer = Scorer.from_section(RewardSection(function="my_module_of_rewards:one"))
    assert totals(scorer, "x") == [1.0]
    scorer.close()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("mine.py", "expected the name of a function"),
        ("{}/nothing.py:f", "there is no file"),
        ("{}/mine.py:lenght", "did you mean length"),
        ("{}/mine.py:NUMBER", "no function 'NUMBER'"),
        ("no_such_module_at_all:f", "cannot be imported"),
        ("{}/broken.py:f", "ZeroDivisionError"),
    ],
)
def test_a_function_that_is_not_there(own, tmp_path, target, said):
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=said) as caught:
        load_function(target.format(tmp_path), "reward.function")
    assert caught.value.field == "reward.function"


def test_a_file_that_exits_when_it_is_imported(tmp_path):
    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"(?s)script\.py cannot be imported.*SystemExit: 0"):
        load_function(f"{tmp_path}/script.py:score", "reward.function")


def test_arguments_that_it_does_not_take(own):
    with pytest.raises(ConfigError, match="cannot be called with"):
        own("length", kwargs={"scael": 1})


def test_name_and_function_exclude_each_other():
    with pytest.raises(ConfigError, match="one of the two"):
        RewardSection()
    with pytest.raises(ConfigError, match=r"reward.name: null for a.py:b"):
        RewardSection(name="math", function="a.py:b")


def test_processes_judge_side_by_side_in_the_order_of_the_samples(own):
    scorer = own("process", workers=3)
    pids = totals(scorer, *["x"] * 3)  # each returns when three are there
    assert len(set(pids)) == 3
    assert os.getpid() not in pids
    assert totals(own("length", workers=3), "a", "bb", "ccc", "dddd") == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("workers", [0, 1])
def test_coroutines_run_side_by_side(own, workers):
    scorer = own("together", workers=workers, concurrency=20)
    assert totals(scorer, *["x"] * 40) == [20.0] * 40  # each returns when twenty are there


@pytest.mark.parametrize("function", ["fickle", "afickle"])
@pytest.mark.parametrize("workers", [1, 2])
def test_what_fails_counts_zero_and_is_named(own, function, workers):
    scorer = own(function, workers=workers, timeout_s=2.0, max_failures=2)
    scores = scorer.score(samples("fine", "raise", "spin", "nan", "fine"))
    assert [s.total for s in scores] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert [s.timed_out for s in scores] == [(), (), (function,), (), ()]
    assert [s.failed for s in scores] == [(), (function,), (), (function,), ()]
    assert failure_figures(scores) == {
        "reward/timeouts": 1.0,
        f"reward/timeouts/{function}": 1.0,
        "reward/failures": 2.0,
        f"reward/failures/{function}": 2.0,
    }
    with pytest.raises(
        RewardError, match=r"KeyError: 'boom' .*mine\.py:\d+\); failed calls: 3"
    ) as caught:
        scorer.score(samples("raise"))
    assert caught.value.completion == "raise"
    assert "reward.max_failures" in caught.value.remedy


@pytest.mark.parametrize("function", ["fickle", "afickle", "nested"])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_exit_is_a_failure_and_ends_no_process(own, function, workers, caplog):
    scorer = own(function, workers=workers, max_failures=1)
    assert totals(scorer, "fine", "exit", "fine") == [1.0, 0.0, 1.0]
    assert "it raised SystemExit: 3" in caplog.text
    with pytest.raises(RewardError, match=r"SystemExit: 3 .*failed calls: 2"):
        scorer.score(samples("exit"))


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_no_float_is_a_failure(own, workers, caplog):
    scorer = own("fickle", workers=workers, max_failures=2)
    assert totals(scorer, "huge", "fine", "own") == [0.0, 1.0, 0.0]
    assert (
        "it returned a int that is not a float: OverflowError: int too large to convert to float"
        in caplog.text
    )
    assert "KeyError: 'its own'" in caplog.text
    with pytest.raises(RewardError, match="OverflowError"):
        scorer.score(samples("huge"))


@pytest.mark.slow
@pytest.mark.parametrize("function", ["fickle", "afickle"])
def test_a_service_that_is_gone_ends_the_run_soon(own, function):
    scorer = own(function, timeout_s=1.0, max_timeouts=3, concurrency=1)
    assert totals(scorer, *["spin", "spin", "spin", "fine", "spin"]) == [0, 0, 0, 1, 0]
    with pytest.raises(RewardError, match=r"4 calls in a row took longer than 1\.0 s"):
        scorer.score(samples(*["spin"] * 1000))  # which would take a quarter of an hour
    assert totals(own(function, timeout_s=0.1, max_timeouts=None), *["spin"] * 5) == [0] * 5


def test_a_limit_that_nothing_could_keep_is_refused(own):
    with pytest.raises(
        ConfigError, match=r"expected null with reward\.workers: 0, got 10 s for 'math'"
    ):
        RewardSection(name="math", workers=0)
    parts = [{"name": "exact"}, {"name": "gsm8k", "timeout_s": 3}]
    with pytest.raises(ConfigError, match="got 3 s for 'gsm8k'"):
        RewardSection(name="combine", kwargs={"rewards": parts}, workers=0, timeout_s=None)
    with pytest.raises(ConfigError, match="got 2 s for 'mine'"):
        Scorer([WeightedReward(name="mine", function=len, timeout_s=2.0)])


@pytest.mark.slow
def test_a_coroutine_that_never_awaits_is_interrupted(own):
    completions = ["fine", "block", "fine"]
    scorer = own("rude", timeout_s=1.0, concurrency=1)
    assert totals(scorer, "fine") == [1.0]
    (before,) = scorer.workers._workers
    assert totals(scorer, *completions) == [1.0, 0.0, 1.0]
    assert scorer.workers._workers == [before]  # its process goes on
    # On one loop it makes its neighbours late; all of it still ends.
    together = totals(own("rude", timeout_s=0.3), *completions, "block")
    assert (together[1], together[3]) == (0.0, 0.0)


def test_a_thread_that_never_returns_holds_nobody(own):
    assert totals(own("threaded", timeout_s=2.0), "fine", "hang", "fine") == [1.0, 0.0, 1.0]


def test_a_reward_that_another_process_cannot_make_is_said(own):
    from engine_trainer.rewards import register

    register("test_only_here")(lambda: lambda s: 1.0)
    with pytest.raises(
        ConfigError, match="cannot create 'test_only_here', which was registered in the process"
    ):
        Scorer.from_section(RewardSection(name="test_only_here"))


def test_a_reward_that_a_module_registers_is_made_in_another_process(tmp_path, monkeypatch):
    code = (
        "from engine_trainer.rewards import register\n\n"
        "@register('of_a_module')\ndef make():\n    return lambda sample: 3.0\n"
    )
    (tmp_path / "registers_a_reward.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("registers_a_reward")
    scorer = Scorer.from_section(RewardSection(name="of_a_module"))
    assert totals(scorer, "x") == [3.0]
    scorer.close()


def test_a_sample_that_cannot_travel_is_said(own):
    scorer = own("length", workers=1)
    with pytest.raises(ConfigError, match="cannot be sent"):
        scorer.score([Sample(prompt="p", completion="c", metadata={"f": lambda: 1})])


@pytest.mark.slow
def test_a_coroutine_that_pays_no_heed_to_its_cancellation_holds_nobody(own):
    scorer = own("stubborn", timeout_s=2.0, max_failures=1)
    scores = scorer.score(samples("hang", "fine", "cancelled", "hang"))
    assert [s.total for s in scores] == [0.0, 1.0, 0.0, 0.0]
    assert [bool(s.timed_out) for s in scores] == [True, False, False, True]
    assert scores[2].failed == ("stubborn",)
    assert totals(scorer, "fine") == [1.0]

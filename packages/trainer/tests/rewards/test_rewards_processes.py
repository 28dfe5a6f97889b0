"""Reward processes.

A process that ends in any way is noticed, counted and replaced, and leaves nothing behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from own_rewards import samples, totals

from engine_trainer.config.sections import RewardSection
from engine_trainer.rewards import RewardError, Scorer


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ended(*pids: int) -> bool:
    """Within ten seconds."""
    end = time.monotonic() + 10
    while any(map(running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(running, pids))


def group_ended(group: int) -> bool:
    """Within ten seconds, all of its processes."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_a_process_that_died_while_it_was_idle_is_replaced(own):
    scorer = own("length", workers=1)
    assert totals(scorer, "a") == [1.0]
    (worker,) = scorer.workers._workers
    worker.process.kill()
    worker.process.wait()
    assert totals(scorer, "ab", "c") == [2.0, 1.0]


def test_a_process_that_no_alarm_reaches_is_killed_and_replaced(own):
    scorer = own("fickle", workers=1, timeout_s=2.0)
    (score,) = scorer.score(samples("in C"))
    assert score.timed_out == ("fickle",)
    assert totals(scorer, "fine") == [1.0]


def test_a_function_that_ends_its_process_is_a_failure(own):
    scorer = own("fickle", workers=1, max_failures=1)
    assert totals(scorer, "die", "fine") == [0.0, 1.0]
    with pytest.raises(RewardError, match="ended with status 3"):
        scorer.score(samples("die"))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("a child stays", r"ended with status -9 \(SIGKILL\)"),
        ("half a word", "ended with status 3"),
        ("closes", "closed its pipe"),
    ],
)
def test_however_a_process_ends_it_is_noticed_at_once(own, how, said, monkeypatch):
    monkeypatch.setattr("engine_trainer.rewards.worker_pool.END_S", 0.5)
    scorer = own("ends_roughly", workers=2, timeout_s=None, max_failures=1)
    assert totals(scorer, "fine", "fine") == [1.0, 1.0]
    scores = scorer.score(samples("fine", how, "fine", "fine"))
    assert [s.total for s in scores] == [1.0, 0.0, 1.0, 1.0]
    assert [s.failed for s in scores] == [(), ("ends_roughly",), (), ()]
    with pytest.raises(RewardError, match=said + r"(?s:.*)failed calls: 2") as caught:
        scorer.score(samples(how))
    assert caught.value.completion == how


@pytest.mark.parametrize("workers", [1, 2])
def test_a_process_that_ends_takes_no_other_call_along(own, workers):
    """Repeat the calls that ran concurrently with the one that ended their process."""
    scorer = own("afickle", workers=workers, max_failures=2)
    scores = scorer.score(samples("fine", "die", "fine", "raise", *["fine"] * 20))
    assert [s.total for s in scores] == [1.0, 0.0, 1.0, 0.0, *[1.0] * 20]
    assert [place for place, s in enumerate(scores) if s.failed] == [1, 3]


def test_a_process_that_dies_just_before_it_is_asked_costs_nothing(own, monkeypatch):
    scorer = own("length", workers=1)
    assert totals(scorer, "a") == [1.0]
    (worker,) = scorer.workers._workers
    real = scorer.workers._forget_dead

    def too_late() -> None:
        real()
        worker.process.kill()
        worker.process.wait()

    monkeypatch.setattr(scorer.workers, "_forget_dead", too_late)
    assert totals(scorer, "ab", "c") == [2.0, 1.0]


def test_with_a_process_of_its_own_the_time_is_kept_in_any_thread(own):
    scorer, found = own("fickle", workers=1, timeout_s=2.0), []
    thread = threading.Thread(target=lambda: found.append(totals(scorer, "spin", "fine")))
    thread.start()
    thread.join()
    assert found == [[0.0, 1.0]]


def test_closing_leaves_no_process(own):
    scorer = own("length", workers=2)
    scorer.score(samples("a", "b"))
    processes = [w.process for w in scorer.workers._workers]
    assert len(processes) == 2
    scorer.close()
    assert all(p.poll() is not None for p in processes)
    assert totals(scorer, "abc") == [3.0]  # they start again


def test_a_call_that_takes_too_long_leaves_no_process_of_its_own(own, tmp_path):
    assert totals(own("starts", workers=1, timeout_s=2.0), str(tmp_path / "pids")) == [0.0]
    assert ended(*map(int, (tmp_path / "pids").read_text().split()))


def test_a_parent_that_is_killed_in_the_middle_of_a_call_leaves_nothing(own, tmp_path):
    own("length")  # writes the file
    code = f"""
import os, pathlib, signal, threading, time
from engine_trainer.rewards import Sample
from engine_trainer.rewards import Scorer
from engine_trainer.config.sections import RewardSection
pids = pathlib.Path({str(tmp_path / "pids")!r})
def kill():
    while not pids.exists() or " " not in pids.read_text():
        time.sleep(0.05)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=kill).start()
scorer = Scorer.from_section(RewardSection(function={f"{tmp_path}/mine.py:starts"!r}, \
workers=1, timeout_s=None))
scorer.score([Sample(prompt="", completion=str(pids), answer="")])
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=600).returncode == -9
    assert ended(*map(int, (tmp_path / "pids").read_text().split()))


LASTING = ["imports", "imports in C", "regex", "powers", "sleeps in C", "catches"]


@pytest.mark.slow
@pytest.mark.parametrize("what", LASTING)
def test_a_call_that_nothing_interrupts_counts_zero_and_the_others_go_on(own, what):
    """In one process, which is given several at once: those before and behind it are judged."""
    scorer = own("lasts", timeout_s=3.0, max_failures=0)
    assert totals(scorer, "fine") == [1.0]
    (before,) = scorer.workers._workers
    scores = scorer.score(samples("fine", what, "fine", "fine", what, "fine"))
    assert [s.total for s in scores] == [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    assert [s.timed_out for s in scores] == [(), ("lasts",), (), (), ("lasts",), ()]
    assert before.process.returncode is not None
    assert ended(before.process.pid)


def test_too_many_calls_in_a_row_that_take_too_long_say_where_imports_belong(own):
    scorer = own("lasts", timeout_s=0.2, max_timeouts=1)
    with pytest.raises(RewardError, match=r"2 calls in a row took longer than 0\.2 s") as caught:
        scorer.score(samples(*["imports"] * 5))
    assert "to the top of its file" in caught.value.remedy
    assert not scorer.workers._workers


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "what", ["both return", "the child stays", "the child exits", "the child raises"]
)
def test_a_function_that_forks_is_heard_once_and_leaves_no_process(own, what, workers):
    scorer = own("forks", workers=workers)
    assert totals(scorer, *["fine", what, "fine"] * 5) == [1.0] * 15
    groups = [w.process.pid for w in scorer.workers._workers]
    scorer.close()
    assert all(group_ended(group) for group in groups)


@pytest.mark.slow
def test_a_coroutine_in_c_takes_no_other_call_along(own):
    scorer = own("holds", timeout_s=2.0, concurrency=4)
    scores = scorer.score(samples("fine", "fine", "regex", "fine", "fine"))
    assert [s.total for s in scores] == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert scores[2].timed_out == ("holds",)


def test_what_a_function_writes_into_the_pipe_is_a_failure_of_its_own(own):
    scorer = own("writes", max_failures=1)
    scores = scorer.score(samples("fine", "garbage", "fine"))
    assert [s.total for s in scores] == [1.0, 0.0, 1.0]
    assert "sent a message that cannot be read" in scores[1].problems[0]


def test_modules_that_stand_in_the_working_directory_take_no_place_of_pythons_own(
    own, tmp_path, monkeypatch
):
    (tmp_path / "random.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    assert totals(own("length"), "ab") == [2.0]


def test_the_trainers_process_does_not_load_the_functions_file(own, tmp_path):
    own("length")
    (tmp_path / "once.py").write_text(
        "import os, pathlib\n"
        "with pathlib.Path(__file__).with_suffix('.pids').open('a') as file:\n"
        "    print(os.getpid(), file=file)\n"
        "def score(sample):\n    return float(os.getpid())\n"
    )
    scorer = Scorer.from_section(RewardSection(function=f"{tmp_path}/once.py:score"))
    try:
        (pid,) = totals(scorer, "x")
    finally:
        scorer.close()
    assert (tmp_path / "once.pids").read_text().split() == [str(int(pid))]
    assert int(pid) != os.getpid()

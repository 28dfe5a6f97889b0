"""``engine-train … --ranks N``: the ranks of one machine, with their status and no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import yaml
from ray_runs import tree
from rl_runs import rows_of, same
from rl_runs import start as start_torchrun
from sockets import listening
from waiting import DEADLINE_S, runs, until

from engine_trainer.run.interrupt import SAME_PRESS_S

pytest.importorskip("engine_fsdp", reason="the runs need an engine")
pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(4 * DEADLINE_S)]
REWARD = """
import os, pathlib, time

def score(sample):
    if pathlib.Path({wait!r}).exists():
        pathlib.Path({waits!r}).touch()
        while pathlib.Path({wait!r}).exists():
            time.sleep(0.05)
    if pathlib.Path({fail!r}).exists() and os.environ["RANK"] == "1":
        raise RuntimeError("the judge is away")
    return sample.completion.count("7") / 4
"""


@pytest.fixture
def begin(sums_model, tmp_path):
    """Start a run of two ranks whose reward waits, or fails, as long as a file is there."""
    names = {name: str(tmp_path / name) for name in ("wait", "waits", "fail")}
    (tmp_path / "judge.py").write_text(REWARD.format(**names))
    reward = {"name": None, "function": f"{tmp_path}/judge.py:score", "timeout_s": None}
    config = tree(sums_model, tmp_path / "out", reward=reward)
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(config))
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "engine_trainer", "rl", str(tmp_path / "rl.yaml")]
        started.append(
            subprocess.Popen(
                [*command, "--ranks", "2"],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the process ids of the two ranks."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(process.pid)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    ranks = [int(line.split()[0]) for line in listed if "engine_trainer" in line]
    assert len(ranks) == 2, listed
    return ranks


def test_ctrl_c_ends_the_step_with_status_zero_and_no_traceback(begin, tmp_path):
    (tmp_path / "wait").touch()
    process = begin()
    until(lambda: (tmp_path / "waits").exists() or process.poll() is not None)
    if sys.platform == "linux":
        found = listening(process.pid)
        assert len(found) >= 2, "the store and the ranks' gloo"
        assert not [one for one in found if not one.is_local]
    os.killpg(process.pid, signal.SIGINT)
    (tmp_path / "wait").unlink()
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    assert "Traceback" not in said
    assert said.count("finishing step 1, then saving; again to abort") == 1
    assert said.count("stopped after step 1 of 3, saved") == 1


@pytest.mark.nightly
def test_a_second_press_ends_all_ranks_with_one_line_and_no_traceback(begin, tmp_path):
    (tmp_path / "wait").touch()
    process = begin()
    until(lambda: (tmp_path / "waits").exists() or process.poll() is not None)
    ranks = ranks_of(process)
    os.killpg(process.pid, signal.SIGINT)
    assert any("finishing step 1, then saving" in line for line in process.stdout)
    heard = time.monotonic()
    until(lambda: time.monotonic() > heard + SAME_PRESS_S)
    os.killpg(process.pid, signal.SIGINT)
    said = process.stdout.read()
    assert process.wait() == 130, said
    assert "Traceback" not in said
    assert said.count("aborted; there is no checkpoint") == said.count("aborted") == 1, said
    until(lambda: not [rank for rank in ranks if runs(rank)])


def test_a_failure_is_said_once_and_is_the_status(begin, tmp_path):
    (tmp_path / "fail").touch()
    process = begin()
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1, said
    assert "Traceback" not in said
    assert said.count("the judge is away") == 1, said


@pytest.mark.nightly
def test_a_rank_that_is_killed_ends_the_others(begin, tmp_path):
    (tmp_path / "wait").touch()
    process = begin()
    until(lambda: (tmp_path / "waits").exists() or process.poll() is not None)
    ranks = ranks_of(process)
    os.kill(ranks[1], signal.SIGKILL)
    (tmp_path / "wait").unlink()
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGKILL, said
    assert "rank 1" in said


def test_it_trains_as_torchrun_does(begin, sums_model, tmp_path):
    said, _ = (process := begin()).communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    config = yaml.safe_load((tmp_path / "rl.yaml").read_text())
    config["run"]["output_dir"] = str(tmp_path / "torchrun")
    other = start_torchrun(tmp_path, config, 2)
    said, _ = other.communicate(timeout=DEADLINE_S)
    assert other.returncode == 0, said
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "torchrun")
    assert same(tmp_path / "out" / "hf", tmp_path / "torchrun" / "hf")

"""Ctrl-C at a terminal, with real processes.

It gives one clear line and the shell's status for it, and no process goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray_runs import ON_RAY, start, tree
from waiting import DEADLINE_S, until

from engine_trainer.cli import main

REWARD = """
import os, pathlib, time

def score(sample):
    pathlib.Path({marks!r}, str(os.getpid())).touch()
    while not pathlib.Path({go!r}).exists():
        time.sleep(0.05)
    return float(len(sample.completion))
"""
# Seconds between two presses: within a second they count as one, and a busy process receives the
# first one late.
PRESS_S = 4.0


def below(pid: int) -> set[int]:
    """Return all processes of its session and those that they have started, zombies too."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(entry.name)] = int(fields[1])
    found = {pid}
    new = {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found - {pid}


def alive(pids: set[int]) -> dict[int, str]:
    found = {}
    for pid in pids:
        try:
            found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def wait_for_the_end_of(pids: set[int]) -> None:
    until(lambda: not alive(pids), missing=lambda: alive(pids))


@pytest.fixture
def running(tmp_path, sums_model):
    """Start a run whose reward never returns, and wait until the reward is called."""
    (marks := tmp_path / "marks").mkdir()
    (tmp_path / "slow.py").write_text(REWARD.format(go=str(tmp_path / "go"), marks=str(marks)))
    made: list[subprocess.Popen[str]] = []

    def begin(**sections) -> subprocess.Popen[str]:
        reward = {
            "name": None,
            "function": f"{tmp_path}/slow.py:score",
            "timeout_s": None,
            **sections.pop("reward", {}),
        }
        made.append(
            start(
                tree(sums_model, tmp_path / "out", reward=reward, **sections),
                tmp_path / "config.yaml",
            )
        )
        until(lambda: list(marks.iterdir()) or made[-1].poll() is not None)
        assert made[-1].poll() is None, made[-1].stdout.read()
        return made[-1]

    yield begin
    for process in made:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def press(process: subprocess.Popen[str], *, times: int) -> None:
    """Send the signal to all processes of the foreground, as a terminal does."""
    for press_number in range(times):
        if press_number:
            time.sleep(PRESS_S)
        os.killpg(process.pid, signal.SIGINT)


WHERE = ["here", "workers", pytest.param("ray", marks=pytest.mark.distributed)]


def placed(where: str) -> dict:
    if where == "ray":
        pytest.importorskip("ray", reason="the extra ray")
        return {"launcher": "ray", "ray": {**ON_RAY, "engines": 1}}
    return {"reward": {"workers": 2}} if where == "workers" else {}


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
def test_one_press_ends_the_step_and_saves(running, tmp_path, where):
    process = running(**placed(where), run={"save_every": 0})
    others = below(process.pid)
    press(process, times=1)
    time.sleep(PRESS_S)  # the step goes on: nothing tells outside that the press was heard
    (tmp_path / "go").touch()
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    assert "stopped after step 1 of 3, saved" in said
    assert (tmp_path / "out" / "checkpoints" / "step-000001" / "manifest.json").is_file()
    wait_for_the_end_of(others)


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [*WHERE[:2], pytest.param("ray", marks=[pytest.mark.distributed, pytest.mark.nightly])],
)
def test_a_second_press_ends_it_with_one_line_and_leaves_nothing(running, where):
    process = running(**placed(where))
    others = below(process.pid)
    press(process, times=2)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if "aborted" in line]
    assert "no checkpoint" in line
    wait_for_the_end_of(others)


# This module stands in for one that the command imports, and its import does not end by itself.
SLOW_IMPORT = """
import importlib, os, pathlib, sys, time

if os.environ.get("RANK") in {ranks!r}:
    pathlib.Path({marks!r}, str(os.getpid())).touch()
    while True:
        time.sleep(0.05)
sys.path.remove({here!r})
del sys.modules["omegaconf"]
importlib.import_module("omegaconf")
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, 2])
def test_a_press_in_an_import_ends_the_command_with_one_line(tmp_path, sft_file, ranks):
    (marks := tmp_path / "marks").mkdir()
    (here := tmp_path / "here").mkdir()
    waiting = [None] if ranks is None else ["0", "1"]
    (here / "omegaconf.py").write_text(
        SLOW_IMPORT.format(ranks=waiting, marks=str(marks), here=str(here))
    )
    arguments = ["sft", str(sft_file), *([] if ranks is None else ["--ranks", str(ranks)])]
    path = os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        [sys.executable, "-m", "engine_trainer", *arguments],
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        until(lambda: len(list(marks.iterdir())) == len(waiting) or process.poll() is not None)
        others = below(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, said) == (130, "aborted\n")
    wait_for_the_end_of(others)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_press_while_the_cluster_starts_leaves_none(tmp_path, sums_model):
    pytest.importorskip("ray", reason="the extra ray")
    process = start(
        tree(sums_model, tmp_path / "out", launcher="ray", ray={**ON_RAY, "engines": 1}),
        tmp_path / "config.yaml",
    )
    until(lambda: any("gcs_server" in line for line in alive(below(process.pid)).values()))
    others = below(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, said.splitlines()[-1:]) == (
        130,
        ["aborted; there is no checkpoint: the same command starts at step 1"],
    ), said
    wait_for_the_end_of(others)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_an_aborted_command_says_what_stands(tmp_path, sft_file, monkeypatch, capsys, resume):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("engine_trainer.sft.train_sft", interrupted)
    out = tmp_path / "stands"
    arguments = ["sft", str(sft_file), f"run.output_dir={out}", f"run.resume={resume}"]
    assert main(arguments) == 130
    assert (
        capsys.readouterr().err
        == "aborted; there is no checkpoint: the same command starts at step 1\n"
    )
    for step in (8, 12):
        (out / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
        (out / "checkpoints" / f"step-{step:06d}" / "manifest.json").write_text("{}")
    (out / "checkpoints" / "step-000016.partial").mkdir()
    assert main(arguments) == 130
    again = {"auto": "the same command", "never": "run.resume=auto"}[resume]
    assert (
        capsys.readouterr().err
        == f"aborted; the newest checkpoint is of step 12: {again} continues from it\n"
    )

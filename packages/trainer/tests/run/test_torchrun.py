"""Ranks end with the torchrun that started them, however that ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine_trainer.run.torchrun import end_with_torchrun

RANK = """
import os, pathlib, time
from engine_trainer.run.torchrun import end_with_torchrun
end_with_torchrun()
pathlib.Path(os.environ["NOTES"], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""


def wait_until(condition, seconds=240.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    try:
        # What has ended may wait for somebody to ask for its status.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel's signal at a parent's end is Linux'"
)
def test_ranks_do_not_outlive_a_torchrun_that_is_killed(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "notes").mkdir()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(tmp_path / "rank.py"),
    ]
    launcher = subprocess.Popen(command, env=os.environ | {"NOTES": str(tmp_path / "notes")})
    try:
        wait_until(lambda: len([p for p in (tmp_path / "notes").iterdir() if p.read_text()]) == 2)
        ranks = [int(path.read_text()) for path in (tmp_path / "notes").iterdir()]
        assert not any(is_gone(pid) for pid in ranks)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    wait_until(lambda: all(is_gone(pid) for pid in ranks))


def test_a_rank_whose_torchrun_has_gone_already_ends_by_itself(monkeypatch):
    monkeypatch.setattr("engine_trainer.run.torchrun.end_with_parent", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        place = {
            "TORCHELASTIC_RUN_ID": "x",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": "127.0.0.1",
        }
        for name, value in (place | {"MASTER_PORT": str(port)}).items():
            monkeypatch.setenv(name, value)
        end_with_torchrun()
    with pytest.raises(SystemExit, match=r"127\.0\.0\.1:\d+ refuses connections"):
        end_with_torchrun()


@pytest.mark.slow
@pytest.mark.distributed
def test_an_error_that_all_ranks_have_is_said_once(tmp_path):
    (tmp_path / "rl.yaml").write_text("data: {sauce: here}")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "engine_trainer",
        "rl",
        str(tmp_path / "rl.yaml"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert ended.stderr.count("data.sauce") == 1, ended.stderr


def test_without_torchrun_nothing_is_done(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(
        "engine_trainer.run.torchrun.end_with_parent", lambda: pytest.fail("it was called")
    )
    end_with_torchrun()

"""A rank of a run that is lost.

All other ranks end with one error that names it, and exit code 1.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml
from rl_runs import tree

pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
SCRIPT = Path(__file__).parent / "helpers" / "rank_faults.py"
DEADLINE_S = 400.0
STOPPED_S = 60  # longer than an engine takes for a step on a busy machine
SAID = {
    "killed": "is gone (killed? out of memory?)",
    "stopped": ("is stopped (SIGSTOP?)", "it has been silent for 60 s"),
    "raises": "this rank's own mistake",
    "exits": "SystemExit: 3",
}


def configuration(task: str, folder: Path, model: Path, timeout_s: int) -> Path:
    options = {"timeout_s": timeout_s, "verify_model": False}
    sections = {"run": {"steps": 1000, "timeout_s": timeout_s}, "engine": {"options": options}}
    config = tree(model, folder / "out", **sections)
    if task == "sft":
        for name in ("reward", "rollout", "algorithm"):
            del config[name]
        config["data"] = {**config["data"], "columns": {"response": "answer"}}
        config["batch_size"] = 8
    else:
        config["reward"] = {"name": "at fault", "timeout_s": None, "workers": 0}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"


@contextlib.contextmanager
def ranks(world, folder, *arguments):
    """Start processes as torchrun does, over a store like its own.

    No launcher ends them when one fails.
    """
    store = dist.TCPStore(
        "127.0.0.1",
        0,
        None,
        is_master=True,
        timeout=timedelta(seconds=DEADLINE_S),
        wait_for_workers=False,
    )
    common = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(world):
            errors = stack.enter_context((folder / f"rank-{rank}.log").open("w"))
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *map(str, arguments)],
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            started.append(process)
        yield started


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize(
    ("task", "world", "how"),
    [
        ("sft", 3, "raises"),
        ("rl", 2, "exits"),
        ("rl", 3, "killed"),
        *(
            pytest.param(task, 2, how, marks=pytest.mark.nightly)
            for task, how in (
                ("sft", "exits"),
                ("sft", "killed"),
                ("sft", "stopped"),
                ("rl", "killed"),
                ("rl", "stopped"),
            )
        ),
    ],
)
def test_the_command_of_every_other_rank_names_the_one_that_goes_away(
    sums_model, tmp_path, task, world, how
):
    timeout_s = STOPPED_S if how == "stopped" else 3600
    file = configuration(task, tmp_path, sums_model, timeout_s)
    fault = how if how in ("raises", "exits") else "waits"
    with ranks(world, tmp_path, fault, task, file) as started:
        *left, gone = started
        if fault == "waits":
            line = gone.stdout.readline()
            assert "waiting" in line, (tmp_path / f"rank-{world - 1}.log").read_text()[-3000:]
            gone.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        for rank, process in enumerate(left):
            code = process.wait(DEADLINE_S)
            said = (tmp_path / f"rank-{rank}.log").read_text()
            assert code == 1, said[-3000:]
            assert "Traceback" not in said
            stopped = said[said.index("stopped: 1 rank(s) failed") :]
            assert f"rank {world - 1}: " in stopped
            wanted = SAID[how]
            assert any(w in stopped for w in ([wanted] if isinstance(wanted, str) else wanted)), (
                stopped
            )
            # In the excluded case all ranks agreed, and the error is complete.
            if how != "raises" and (task, how) != ("rl", "exits"):
                assert str(tmp_path / f"rank-{world - 1}.log") in stopped, "its log is not named"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(2 * DEADLINE_S)
def test_under_torchrun_the_rank_that_is_left_says_why_before_it_is_ended(sums_model, tmp_path):
    file = configuration("sft", tmp_path, sums_model, 3600)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), "exits", "sft", str(file)],
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 1
    assert "[rank 0] stopped: 1 rank(s) failed" in done.stderr, done.stderr[-3000:]
    assert "SystemExit: 3" in done.stderr

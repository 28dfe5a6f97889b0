"""A run on the real engine with two ranks, killed in the middle and resumed to the same end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest
import yaml
from waiting import DEADLINE_S, until

from engine_api.registry import EngineRegistry
from engine_trainer.telemetry.logs import METRICS, read_metrics


def launch(file, folder, *overrides):
    # --standalone: torchrun finds a free port itself, and holds it.
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command = [
        *torchrun,
        "-m",
        "engine_trainer",
        "sft",
        str(file),
        f"run.output_dir={folder}",
        *overrides,
    ]
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        return subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log
        )


def kill(launcher):
    """The launcher and its workers at once, as a lost machine would be."""
    children = subprocess.run(
        ["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    for pid in (launcher.pid, *map(int, children)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    launcher.wait()


def wait_for_step(launcher, folder, step):
    def reached():
        return (folder / METRICS).is_file() and any(
            row["step"] >= step for row in read_metrics(folder / METRICS)
        )

    until(lambda: reached() or launcher.poll() is not None)
    if not reached():
        pytest.fail(
            f"step {step} was not reached: "
            f"{(folder.parent / f'{folder.name}.log').read_text()[-2000:]}"
        )


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.nightly
def test_killed_and_resumed_is_bitwise_the_same(tmp_path, sft_file):
    if not any("fsdp2" in row.backends for _, row in EngineRegistry.rows()):
        pytest.skip("engine-fsdp is not installed")
    config = yaml.safe_load(sft_file.read_text())
    config["engine"] |= {
        "backend": "fsdp2",
        "device": "cpu",
        "optimizer": {"lr": 1e-2},
        "options": {"verify_model": False},
    }
    config["engine"]["model"]["init"] = "random"
    config["run"] |= {"steps": 60, "save_every": 10}
    sft_file.write_text(yaml.safe_dump(config))
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    assert launch(sft_file, alone).wait(DEADLINE_S) == 0, (tmp_path / "alone.log").read_text()[
        -2000:
    ]
    first = launch(sft_file, killed)
    wait_for_step(first, killed, 14)
    kill(first)
    assert not (killed / "hf").exists(), "it was too fast to be killed"
    assert launch(sft_file, killed).wait(DEADLINE_S) == 0
    assert "resumed from" in (tmp_path / "killed.log").read_text()
    assert (alone / "hf" / "model.safetensors").read_bytes() == (
        killed / "hf" / "model.safetensors"
    ).read_bytes()
    left, right = (
        [(r["step"], r.get("train/loss")) for r in read_metrics(f / METRICS)]
        for f in (alone, killed)
    )
    assert left == right

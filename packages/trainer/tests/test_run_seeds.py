"""One seed decides every random number of a run, dropout's too: in one process and on two ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from engine_api.registry import EngineRegistry
from engine_trainer.telemetry.logs import METRICS, read_metrics

DEADLINE_S = 400


def command(world, file, folder, *overrides):
    task = ["-m", "engine_trainer", "sft", str(file), f"run.output_dir={folder}", *overrides]
    if world == 1:
        return [sys.executable, *task]
    spread = ["--standalone", "--nproc-per-node", str(world)]
    return [sys.executable, "-m", "torch.distributed.run", *spread, *task]


def start(world, file, folder, *overrides):
    """Start a run in a process group of its own."""
    with folder.with_suffix(".log").open("a") as log:
        return subprocess.Popen(
            command(world, file, folder, *overrides),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def finish(world, file, folder, *overrides):
    """Run to the end; return the trained weights and each step's loss."""
    assert start(world, file, folder, *overrides).wait(DEADLINE_S) == 0, folder.with_suffix(
        ".log"
    ).read_text()[-3000:]
    losses = [(row["step"], row.get("train/loss")) for row in read_metrics(folder / METRICS)]
    return (folder / "hf" / "model.safetensors").read_bytes(), losses


def kill_after_a_step(process, folder):
    """Kill the run and its ranks once a step has been taken."""
    end = time.monotonic() + DEADLINE_S
    while not (
        (folder / METRICS).is_file()
        and any(row["step"] >= 1 for row in read_metrics(folder / METRICS))
    ):
        assert process.poll() is None, (
            f"it ended by itself: {folder.with_suffix('.log').read_text()[-3000:]}"
        )
        assert time.monotonic() < end, "no step was taken"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def dropping(sft_file):
    """A run with a LoRA that drops inputs, from given weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not any("fsdp2" in row.backends for _, row in EngineRegistry.rows()):
        pytest.skip("engine-fsdp is not installed")
    config = yaml.safe_load(sft_file.read_text())
    model = config["engine"]["model"]["path"]
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    config["engine"] |= {
        "backend": "fsdp2",
        "device": "cpu",
        "optimizer": {"lr": 1e-2},
        "lora": {"rank": 4, "alpha": 8.0, "dropout": 0.3},
        "options": {"verify_model": False},
    }
    config["run"] |= {"steps": 200, "save_every": 1000, "seed": 1}
    sft_file.write_text(yaml.safe_dump(config))
    return sft_file


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(4 * DEADLINE_S)
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_with_dropout_a_run_killed_before_its_first_checkpoint_and_run_again_equals_an_unbroken_one(
    tmp_path, dropping, world
):
    unbroken = finish(world, dropping, tmp_path / "unbroken")
    broken = tmp_path / "broken"
    kill_after_a_step(start(world, dropping, broken), broken)
    assert not list((broken / "checkpoints").glob("step-*")), (
        "it was too fast to be killed before a checkpoint"
    )
    assert finish(world, dropping, broken) == unbroken
    assert finish(world, dropping, tmp_path / "other", "run.seed=2")[0] != unbroken[0]

"""What a run keeps when it fails, and what it says about it.

A run that fails and is started again ends as an unbroken one does, bit for bit.
"""

from __future__ import annotations

import json
import random

import pytest
import torch
from rl_runs import configure, rows_of, same, start, tree
from waiting import DEADLINE_S

from engine_trainer import sft
from engine_trainer.config import SFTConfig
from engine_trainer.config.loading import load_config
from engine_trainer.rewards import RewardError, register
from engine_trainer.rl.loop import train_rl
from engine_trainer.run.checkpoints import Checkpoints, find_checkpoint
from engine_trainer.sft import train_sft

LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.3}


def run_sft(file, *overrides):
    return train_sft(load_config(SFTConfig, file, overrides))


def table(folder):
    return torch.load(folder / "hf" / "table.pt", weights_only=True)


def newest(folder):
    return max(Checkpoints(folder / "checkpoints", keep=0).steps(), default=0)


@pytest.fixture
def fail_at(monkeypatch):
    """Make the loss of the given call raise, once."""

    def fail(number):
        calls = []
        whole = sft.sft_loss

        def loss(outputs, batch):
            calls.append(1)
            if len(calls) == number:
                raise ValueError("the disk of the labels is gone")
            return whole(outputs, batch)

        monkeypatch.setattr(sft, "sft_loss", loss)

    return fail


def test_a_step_that_fails_costs_no_step_before_it(sft_file, tmp_path, fail_at, capsys):
    unbroken = run_sft(sft_file, f"run.output_dir={tmp_path / 'unbroken'}").folder
    fail_at(4)
    with pytest.raises(ValueError, match="labels"):
        run_sft(sft_file)
    assert newest(tmp_path / "run") == 3
    assert "failed after step 3, which is saved" in capsys.readouterr().out
    again = run_sft(sft_file).folder
    assert "after step 3" in capsys.readouterr().out
    assert torch.equal(table(again), table(unbroken))
    assert rows_of(again) == rows_of(unbroken)


def test_an_evaluation_that_fails_costs_no_step_and_is_made_up_for(
    sft_file, tmp_path, monkeypatch, capsys
):
    measured = (f"eval.source={tmp_path / 'rows.jsonl'}", "eval.every=2")
    unbroken = run_sft(sft_file, f"run.output_dir={tmp_path / 'unbroken'}", *measured).folder
    whole = sft.heldout_loss
    calls = []

    def heldout_loss(run, dataset):
        calls.append(1)
        if len(calls) == 3:
            raise OSError("the held-out file is gone")
        return whole(run, dataset)

    monkeypatch.setattr(sft, "heldout_loss", heldout_loss)
    with pytest.raises(OSError, match="held-out"):
        run_sft(sft_file, *measured)
    assert newest(tmp_path / "run") == 4
    assert "failed in the evaluation after step 4, which is saved" in capsys.readouterr().out
    again = run_sft(sft_file, *measured).folder
    assert rows_of(again) == rows_of(unbroken)
    assert torch.equal(table(again), table(unbroken))


@pytest.mark.parametrize(("failing", "losses"), [(2, [3.0, 2.0, 2.5]), (3, [3.0, 2.0, 1.0])])
def test_a_step_that_is_measured_late_can_be_the_best_one(
    sft_file, tmp_path, monkeypatch, failing, losses
):
    # Steps 0, 2 and 4 are measured, and behind step 4 nothing is saved.
    given = ["run.steps=4", "run.keep=1", "run.keep_best=eval/loss", "eval.every=2"]
    given.append(f"eval.source={tmp_path / 'rows.jsonl'}")
    calls = []
    left = iter(losses)

    def heldout_loss(*_):
        calls.append(1)
        if len(calls) == failing:
            raise OSError("the held-out file is gone")
        return {"loss": next(left)}

    monkeypatch.setattr(sft, "heldout_loss", heldout_loss)
    with pytest.raises(OSError, match="held-out"):
        run_sft(sft_file, *given)
    folder = run_sft(sft_file, *given).folder / "checkpoints"
    name = (folder / "best").read_text().strip()
    assert name == f"step-{2 * (failing - 1):06d}"
    assert find_checkpoint(folder / "best") == folder / name


def test_a_failure_before_the_first_step_saves_nothing(sft_file, tmp_path, fail_at, capsys):
    fail_at(1)
    with pytest.raises(ValueError, match="labels"):
        run_sft(sft_file)
    assert newest(tmp_path / "run") == 0
    assert "failed" not in capsys.readouterr().out


def test_a_save_that_fails_does_not_hide_why_the_run_failed(
    sft_file, tmp_path, fail_at, capsys, monkeypatch
):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpoints, "save", full)
    fail_at(4)
    with pytest.raises(ValueError, match="labels"):
        run_sft(sft_file)
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "failed after" in line]
    assert "No space left" in said
    assert "there is no checkpoint: 3 steps will be trained again" in said
    monkeypatch.undo()
    run_sft(sft_file)
    assert (
        "has figures up to step 3, but there is no checkpoint: steps 1 to 3 are trained again"
        in capsys.readouterr().out
    )


def test_checkpoints_are_saved_by_time(sft_file, tmp_path, monkeypatch):
    """Two minutes pass in each step."""
    from engine_trainer.run import checkpoints

    now = [0.0]
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now[0])
    whole = sft.sft_loss

    def loss(outputs, batch):
        now[0] += 120.0
        return whole(outputs, batch)

    monkeypatch.setattr(sft, "sft_loss", loss)
    run_sft(sft_file, "run.save_minutes=4", "run.keep=0", "run.steps=5", "run.save_last=false")
    found = Checkpoints(tmp_path / "run" / "checkpoints", keep=0).steps()
    assert list(found) == [2, 4]
    never = tmp_path / "never"
    run_sft(sft_file, "run.save_minutes=0", "run.save_last=false", f"run.output_dir={never}")
    assert newest(never) == 0


def test_steps_that_a_kill_lost_are_named(sft_file, tmp_path, capsys):
    folder = run_sft(sft_file, "run.steps=4").folder
    with (folder / "metrics.jsonl").open("a") as file:  # rows that a killed run has left
        file.writelines(json.dumps({"step": step}) + "\n" for step in (5, 6))
    capsys.readouterr()
    run_sft(sft_file)
    assert (
        "has figures up to step 6, but the checkpoint is of step 4: steps 5 to 6 are trained again"
        in capsys.readouterr().out
    )


def test_a_reward_that_raises_costs_no_step_whatever_it_drew(sums_model, tmp_path, monkeypatch):
    """The step that fails has drawn from Python's generator, and dropped activations."""
    pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
    calls = []

    @register("draws")
    def draws():
        def score(sample):
            drawn = random.random()
            calls.append(drawn)
            if len(calls) == failing:
                raise RuntimeError("the judge is away")
            return sample.completion.count("7") / 4 + drawn

        return score

    sections = {
        "engine": {
            "model": {"path": str(sums_model)},
            "device": "cpu",
            "optimizer": {"lr": 0.003},
            "lora": LORA,
        },
        "reward": {"name": "draws", "workers": 0, "timeout_s": None, "max_failures": 0},
    }
    failing = -1
    train_rl(configure(sums_model, tmp_path / "unbroken", **sections))
    per_step = len(calls) // 3
    calls.clear()
    failing = 2 * per_step + per_step // 2
    with pytest.raises(RewardError, match="the judge is away"):
        train_rl(configure(sums_model, tmp_path / "broken", **sections))
    assert newest(tmp_path / "broken") == 2
    failing = -1
    train_rl(configure(sums_model, tmp_path / "broken", **sections))
    assert rows_of(tmp_path / "broken") == rows_of(tmp_path / "unbroken")
    assert same(tmp_path / "broken" / "hf", tmp_path / "unbroken" / "hf")


def test_weights_that_a_step_has_updated_in_part_are_not_saved(
    sums_model, tmp_path, monkeypatch, capsys
):
    """The third step fails in the second of its two updates."""
    pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
    from engine_trainer.placement.spmd import SpmdEngines

    whole = SpmdEngines.train
    calls = []

    def train(self, *arguments, **keywords):
        calls.append(1)
        if len(calls) == 6:
            raise ValueError("a batch that no kernel takes")
        return whole(self, *arguments, **keywords)

    monkeypatch.setattr(SpmdEngines, "train", train)
    scored = []

    @register("differs")  # within each group, so that each update has a gradient
    def differs():
        return lambda sample: scored.append(1) or float(len(scored) % 4)

    sections = {
        "algorithm": {"prompts_per_step": 8, "mini_batches": 2},
        "reward": {"name": "differs"},
        "run": {"save_every": 1},
    }
    with pytest.raises(ValueError, match="no kernel"):
        train_rl(configure(sums_model, tmp_path / "saved", **sections))
    assert "failed after step 2, which is saved" in capsys.readouterr().out
    calls.clear()
    sections["run"] = {}
    with pytest.raises(ValueError, match="no kernel"):
        train_rl(configure(sums_model, tmp_path / "unsaved", **sections))
    assert (
        "failed after step 2, which could not be saved (step 3 has updated the weights in part); "
        "there is no checkpoint: 2 steps will be trained again"
    ) in capsys.readouterr().out
    assert newest(tmp_path / "unsaved") == 0


REWARD = """
import os, pathlib

def score(sample):
    calls = globals().setdefault("calls", [])
    calls.append(1)
    mark = pathlib.Path({mark!r})
    if os.environ["RANK"] == "1" and len(calls) == {failing} and not mark.exists():
        mark.touch()
        raise RuntimeError("the judge of rank 1 is away")
    return sample.completion.count("7") / 4
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(4 * DEADLINE_S)
@pytest.mark.nightly
def test_a_reward_that_raises_on_one_of_two_ranks_costs_no_step(sums_model, tmp_path):
    pytest.importorskip("engine_fsdp", reason="the loop needs an engine")

    def run(name):
        file = tmp_path / f"{name}.py"
        # 8 prompts with 4 completions each are 16 calls a rank and step.
        file.write_text(REWARD.format(failing=40, mark=str(tmp_path / f"{name}.mark")))
        reward = {"name": None, "function": f"{file}:score", "workers": 0, "timeout_s": None}
        config = tree(sums_model, tmp_path / name, reward=reward)
        process = start(tmp_path, config, 2)
        said, _ = process.communicate(timeout=2 * DEADLINE_S)
        return process.returncode, said

    (tmp_path / "unbroken.mark").touch()
    code, said = run("unbroken")
    assert code == 0, said
    code, said = run("broken")
    assert code != 0
    assert "the judge of rank 1 is away" in said
    assert "failed after step 2, which is saved" in said
    assert newest(tmp_path / "broken") == 2
    code, said = run("broken")
    assert code == 0, said
    assert rows_of(tmp_path / "broken") == rows_of(tmp_path / "unbroken")
    assert same(tmp_path / "broken" / "hf", tmp_path / "unbroken" / "hf")

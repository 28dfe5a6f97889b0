"""A run that learns nothing is told so, once, and one that learns is left alone."""

from __future__ import annotations

import pytest
from rl_runs import configure

from engine_trainer.config import SFTConfig
from engine_trainer.config.loading import load_config
from engine_trainer.rewards import register
from engine_trainer.rl.loop import train_rl
from engine_trainer.sft import train_sft
from engine_trainer.telemetry.learning import PATIENCE, LearningWatch

LEARNS = {
    "train/updates": 2.0,
    "train/reward": 0.5,
    "train/grad_norm": 1.0,
    "rollout/uninformative_groups": 0.2,
    "rollout/truncated": 0.4,
    "agent/timeout": 0.1,
}


def say(steps):
    watch = LearningWatch()
    return [watch.note(i, LEARNS | figures) for i, figures in enumerate(steps, start=1)]


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (
            {"train/updates": 0.0, "rollout/uninformative_groups": 1.0},
            "all completions had the same reward",
        ),
        ({"train/updates": 0.0}, "no update was applied"),
        ({"agent/timeout": 1.0}, "every conversation ended at agent.timeout_s"),
        ({"rollout/truncated": 1.0}, "every completion was cut off"),
    ],
)
def test_a_sign_that_lasts_is_told_once_and_again_after_a_break(figures, words):
    told = say([figures] * (PATIENCE + 3) + [{}] + [figures] * PATIENCE)
    assert [i for i, lines in enumerate(told, start=1) if lines] == [PATIENCE, 2 * PATIENCE + 4]
    assert all(len(lines) == 1 and words in lines[0] for lines in told if lines)
    assert not any(say([figures, {}] * PATIENCE))


def test_a_reward_that_collapses_with_a_huge_gradient_is_told():
    collapse = {"train/reward": 0.0, "train/grad_norm": 80.0}
    told = say([{}] * 4 + [collapse] * (PATIENCE + 2))
    (lines,) = [lines for lines in told if lines]
    assert "fallen to 0, from 0.5" in lines[0]
    # A reward that falls with the usual gradient may be a harder part of the data.
    assert not any(say([{}] * 4 + [{"train/reward": 0.0}] * 9))
    assert not any(say([{"train/reward": 0.0, "train/updates": 1.0}] * 9))


def test_a_run_of_rl_that_rewards_nothing_is_told(sums_model, tmp_path, capsys):
    pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
    register("zero")(lambda: lambda sample: 0.0)
    train_rl(
        configure(
            sums_model, tmp_path / "out", reward={"name": "zero"}, run={"steps": PATIENCE + 1}
        )
    )
    said = capsys.readouterr().out
    assert said.count("all completions had the same reward") == 1


@pytest.mark.parametrize("whole", [True, False])
def test_rows_that_teach_no_end_are_told(sft_file, caplog, whole):
    """Without their last token the rows do not have the token that ends a turn."""
    length = 99 if whole else 10
    arguments = [f"data.max_length={length}", "data.on_too_long=truncate", "run.steps=1"]
    train_sft(load_config(SFTConfig, sft_file, arguments))
    assert ("no row teaches the model to stop" in caplog.text) is not whole

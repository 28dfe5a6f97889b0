"""RL with an agent, in a whole run and in the tokens that carry loss."""

from __future__ import annotations

import json

import pytest
import torch

from engine_trainer.data import Prompt

ADDS = """
async def add(episode, tool=True):
    # The model generates, a tool says "=" and the model goes on: the tool's tokens carry no loss.
    await episode.generate(max_new_tokens=2)
    await episode.generate("=", max_new_tokens=2)
    return episode.end()

def sevens(sample):
    turns = sample.metadata["turns"]
    assert len(turns) == 2 and sample.completion == "".join(turns)
    return sample.completion.count("7") / 4
"""


@pytest.fixture
def rl(sums_model, tmp_path):
    pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
    from engine_trainer.config import RLConfig
    from engine_trainer.config.loading import from_tree
    from engine_trainer.rl.loop import train_rl

    (tmp_path / "own.py").write_text(ADDS)

    def run(name="out", **sections):
        base = {
            "engine": {
                "model": {"path": str(sums_model)},
                "device": "cpu",
                "optimizer": {"lr": 0.003},
            },
            "data": {"source": str(sums_model / "train.jsonl")},
            "run": {
                "output_dir": str(tmp_path / name),
                "steps": 2,
                "progress": False,
                "report": False,
                "tensorboard": False,
            },
            "reward": {"function": f"{tmp_path}/own.py:sevens"},
            "agent": {"function": f"{tmp_path}/own.py:add"},
            "rollout": {"n": 8, "max_new_tokens": 8},
            "algorithm": {"prompts_per_step": 8},
            "eval": {"source": str(sums_model / "test.jsonl"), "max_problems": 3},
        }
        for section, values in sections.items():
            base[section] = {**base.get(section, {}), **values}
        train_rl(from_tree(RLConfig, base))
        return tmp_path / name, [
            json.loads(line)
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]

    return run


@pytest.mark.slow
def test_a_whole_run_with_an_agent_repeats_exactly(rl):
    from safetensors.torch import load_file

    out, rows = rl()
    assert rows[1]["agent/turns"] == 2.0
    assert rows[1]["agent/tool_tokens"] == 1.0
    assert rows[1]["rollout/tokens"] == 64 * (rows[1]["rollout/response_length"] - 1)
    # The mismatch is measured on the model's tokens alone.
    assert rows[1]["mismatch/max"] < 1e-4 < rows[1]["train/grad_norm"]
    assert rows[0]["eval/problems"] == 3
    again, _ = rl("again")
    left, right = (load_file(folder / "hf" / "model.safetensors") for folder in (out, again))
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow
def test_it_learns_over_two_turns(rl):
    _, rows = rl(
        run={"steps": 25},
        algorithm={"prompts_per_step": 8},
        rollout={"n": 8, "max_new_tokens": 8},
        eval={"max_problems": 20, "samples": 2},
    )
    assert rows[0]["eval/reward"] < 0.2
    assert rows[-1]["eval/reward"] > 0.8


def test_a_tools_tokens_have_no_part_in_the_loss():
    from engine_trainer.placement.replica import Group, ScoredCompletion
    from engine_trainer.rewards import Score
    from engine_trainer.rl.learner import _document

    score = Score(total=1.0, parts={"r": 1.0}, correct=True)
    answer = ScoredCompletion(
        tokens=[5, 6, 7],
        log_probs=[-1.0, 0.0, -2.0],
        text="",
        finished=True,
        score=score,
        loss_weights=[1.0, 0.0, 1.0],
    )
    group = Group(
        prompt=Prompt(tokens=[1, 2], rendered="", text="", answer=None), completions=[answer]
    )
    document = _document(0, 0, group, answer, drop_cut=False, oldest=0)
    assert (document.mask, document.counted, answer.num_generated) == ([0, 0, 1, 0, 1], 2, 2)

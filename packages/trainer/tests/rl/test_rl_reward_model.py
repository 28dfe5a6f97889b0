"""RL whose reward is a model that `engine-train rm` has trained."""

from __future__ import annotations

import json

import pytest
import torch
from rl_runs import configure

from engine_trainer.config import RewardModelConfig
from engine_trainer.config.loading import from_tree
from engine_trainer.preferences.reward_model import train_reward_model
from engine_trainer.rl.loop import train_rl

# Torch 2.13 renames a collective under FSDP.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def trained(sums_model, tmp_path):
    """Train a reward model on sums for some steps, and return its folder."""
    rows = [json.loads(line) for line in (sums_model / "train.jsonl").read_text().splitlines()]
    pairs = [
        {"prompt": r["prompt"], "chosen": r["answer"], "rejected": r["answer"] * 3} for r in rows
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    tree = {
        "engine": {
            "model": {"path": str(sums_model)},
            "model_type": "value_model",
            "device": "cpu",
            "optimizer": {"lr": 0.003},
        },
        "data": {"source": str(tmp_path / "pairs.jsonl")},
        "batch_size": 16,
        "run": {
            "output_dir": str(tmp_path / "rm"),
            "steps": 5,
            "progress": False,
            "report": False,
            "tensorboard": False,
        },
    }
    return train_reward_model(from_tree(RewardModelConfig, tree)).folder / "hf"


@pytest.mark.slow
def test_the_reward_of_each_completion_is_the_models_score(sums_model, tmp_path):
    pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = trained(sums_model, tmp_path)
    config = configure(
        sums_model,
        tmp_path / "out",
        run={"steps": 2},
        reward={
            "name": "reward_model",
            "kwargs": {"path": str(folder), "device": "cpu"},
            "workers": 1,
            "timeout_s": 120.0,
        },
        eval={"source": str(sums_model / "test.jsonl"), "samples": 2, "max_problems": 5},
    )
    train_rl(config)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for step in (0, 2):
        file = tmp_path / "out" / "eval" / f"step-{step:06d}.jsonl"
        problems = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(problems) == 5
        for problem in problems:
            for completion in problem["completions"]:
                text = problem["question"] + completion["text"]
                ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
                with torch.inference_mode():
                    expected = model(input_ids=ids).logits[0, 0].item()
                assert completion["reward"] == pytest.approx(expected, abs=1e-4)
    log = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(log[1])["train/reward_std"] > 0

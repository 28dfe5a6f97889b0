"""Evaluation on held-out problems, with its rows, its random numbers and its standard error."""

from __future__ import annotations

import json
import math

import pytest
from rl_runs import configure

from engine_trainer.config import SFTConfig
from engine_trainer.config.loading import from_tree
from engine_trainer.data import Prompt, heldout_sets, load_tokenizer
from engine_trainer.placement.replica import Group, ScoredCompletion
from engine_trainer.rewards import Score
from engine_trainer.rl.experience import round_seed
from engine_trainer.rl.loop import train_rl
from engine_trainer.sampling.evaluate import summary
from engine_trainer.sampling.sampler import Sampler
from engine_trainer.sft import evaluate_sft, train_sft


def test_of_a_folder_of_several_splits_each_set_has_its_own(sums_model, tmp_path):
    folder = str(sums_model)  # train.jsonl and test.jsonl
    config = configure(
        sums_model,
        tmp_path,
        eval={
            "source": folder,
            "split": "test",
            "sets": {"seen": {"source": folder, "split": "train"}},
        },
    )
    tokenizer = load_tokenizer(config.data, config.engine.model)
    sets = heldout_sets(config.data, config.eval, tokenizer, config.engine.model, config.rollout)
    questions = {one.name: {p.text for p in one.problems.prompts} for one in sets}
    assert {name: len(texts) for name, texts in questions.items()} == {"": 20, "seen": 80}
    assert not questions[""] & questions["seen"]


def test_a_set_may_be_of_several_files(sums_model, tmp_path):
    files = [str(sums_model / "train.jsonl"), str(sums_model / "test.jsonl")]
    config = configure(sums_model, tmp_path, eval={"source": files})
    tokenizer = load_tokenizer(config.data, config.engine.model)
    (one,) = heldout_sets(config.data, config.eval, tokenizer, config.engine.model, config.rollout)
    assert len(one.problems) == 100


def test_every_evaluation_draws_with_the_runs_seed_and_its_own_temperature(
    sums_model, tmp_path, monkeypatch
):
    pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
    drawn = []
    sample = Sampler.sample

    def seen(self, prompts, *, n, temperature, seed):
        drawn.append((len(prompts), n, temperature, seed))
        return sample(self, prompts, n=n, temperature=temperature, seed=seed)

    monkeypatch.setattr(Sampler, "sample", seen)
    section = {
        "source": str(sums_model / "test.jsonl"),
        "samples": 2,
        "temperature": 0.9,
        "max_problems": 3,
    }
    train_rl(configure(sums_model, tmp_path / "out", run={"steps": 1, "seed": 7}, eval=section))
    assert drawn == [(3, 2, 0.9, 7), (8, 4, 1.0, round_seed(7, 1, 0)), (3, 2, 0.9, 7)]


@pytest.mark.slow
def test_eval_of_sft_measures_loss_and_accuracy_as_training_does(sums_model, tmp_path):
    pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
    test = str(sums_model / "test.jsonl")
    tree = {
        "engine": {"model": {"path": str(sums_model)}, "device": "cpu"},
        "data": {"source": str(sums_model / "train.jsonl")},
        "batch_size": 8,
        "reward": {"name": "exact"},
        "rollout": {"max_new_tokens": 4},
        "eval": {"source": test, "temperature": 0, "sets": {"few": {"source": test}}},
        "run": {
            "output_dir": str(tmp_path / "trained"),
            "steps": 1,
            "progress": False,
            "report": False,
            "tensorboard": False,
            "save_hf": False,
        },
    }
    tree["eval"]["sets"]["few"]["max_problems"] = 3
    trained = train_sft(from_tree(SFTConfig, tree)).folder
    first = json.loads((trained / "metrics.jsonl").read_text().splitlines()[0])
    tree["run"]["output_dir"] = str(tmp_path / "measured")
    figures = evaluate_sft(from_tree(SFTConfig, tree))
    assert figures == pytest.approx({k: v for k, v in first.items() if k.startswith("eval/")})
    assert {"eval/loss", "eval/accuracy", "eval/few/loss", "eval/few/accuracy"} <= figures.keys()
    assert figures["eval/few/problems"] == 3
    written = tmp_path / "measured"
    assert json.loads((written / "evaluation.json").read_text())["figures"] == figures
    assert len((written / "evaluation" / "step-000000.jsonl").read_text().splitlines()) == 20


def group(*correct: bool) -> Group:
    answers = [
        ScoredCompletion(
            tokens=[5, 1],
            log_probs=[-1.0, -1.0],
            text="",
            finished=True,
            weight_versions=[0, 0],
            score=Score(total=float(one), parts={}, correct=one),
        )
        for one in correct
    ]
    return Group(prompt=Prompt(tokens=[6], rendered="", text="", answer=None), completions=answers)


def test_the_standard_error_is_over_problems_by_hand():
    """Check the standard error of fractions 1, 1/2 and 0.

    The mean is 1/2, the variance (1/4 + 0 + 1/4) / (3 - 1) = 1/4, that of the mean of three 1/12.
    """
    figures = summary([group(True, True), group(True, False), group(False, False)])
    assert (figures["accuracy"], figures["problems"]) == (0.5, 3)
    assert figures["accuracy_stderr"] == pytest.approx(math.sqrt(1 / 12), rel=1e-12)
    # One problem gives no estimate of the spread.
    assert summary([group(True, False)])["accuracy_stderr"] == 0.0

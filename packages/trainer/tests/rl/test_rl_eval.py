"""Evaluation during training, with several held-out sets and several samples a problem."""

from __future__ import annotations

import json
from itertools import product

import pytest

from engine_trainer.config import RLConfig
from engine_trainer.config.loading import from_tree
from engine_trainer.errors import DataError
from engine_trainer.rl import loop as rl
from engine_trainer.rl.loop import train_rl
from engine_trainer.rl.sources import Synchronous
from engine_trainer.sampling.evaluate import Evaluator

pytest.importorskip("engine_fsdp", reason="the loop needs an engine")


@pytest.fixture
def run(sums_model, tmp_path):
    def train(evaluation, **sections):
        out = tmp_path / "out"
        tree = {
            "engine": {"model": {"path": str(sums_model)}, "device": "cpu"},
            "data": {"source": str(sums_model / "train.jsonl"), **sections.get("data", {})},
            "run": {
                "output_dir": str(out),
                "steps": 1,
                "progress": False,
                "report": False,
                "tensorboard": False,
                **sections.get("run", {}),
            },
            "reward": {"name": "exact"},
            "rollout": {"n": 2, "max_new_tokens": 4, **sections.get("rollout", {})},
            "algorithm": {"prompts_per_step": 4, **sections.get("algorithm", {})},
            "eval": evaluation,
        }
        train_rl(from_tree(RLConfig, tree))
        return out, [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    return train


@pytest.mark.slow
def test_each_evaluation_shows_the_same_problems(run, sums_model, capsys):
    evaluation = {"source": str(sums_model / "test.jsonl")}
    out, _ = run({**evaluation, "sets": {"few": {**evaluation, "max_problems": 3}}})
    text = capsys.readouterr().out
    sets = {"eval": [0, 6, 13], "eval/few": [0, 1, 2]}
    for (name, numbers), step in product(sets.items(), (0, 1)):
        _, _, after = text.partition(f"samples of {name} after step {step}:\n")
        lines = after.split("samples of ")[0].splitlines()
        shown = [int(line.split()[1].rstrip(":")) for line in lines if line.startswith("  problem")]
        assert shown == numbers, (name, step)
        path = out / "eval" / name.removeprefix("eval").strip("/") / f"step-{step:06d}.jsonl"
        problem = [json.loads(line) for line in path.read_text().splitlines()][numbers[1]]
        assert f"    question   {problem['question']}" in lines
        first = problem["completions"][0]["text"].strip("\n")
        assert any(line == f"    completion {first}" for line in lines)
    run({**evaluation}, run={"show_samples": 0, "resume": "never", "output_dir": f"{out}-2"})
    assert "samples of" not in capsys.readouterr().out


@pytest.mark.slow
def test_several_held_out_sets_by_name_with_votes(run, sums_model):
    test = str(sums_model / "test.jsonl")
    few = {"source": test, "max_problems": 3, "samples": 4}
    out, (before, after) = run(
        {
            "samples": 1,
            "temperature": 0,
            "source": test,
            "sets": {"few": {**few, "temperature": 1.0}, "one": {**few, "samples": 1}},
        }
    )
    assert (before["eval/problems"], before["eval/few/problems"], before["eval/one/problems"]) == (
        20,
        3,
        3,
    )
    assert {k for k in after if "@" in k} == {
        f"eval/few/{kind}@{k}"
        for kind, k in [("mean", 4), ("best", 2), ("best", 4), ("maj", 2), ("maj", 4)]
    }
    assert after["eval/few/mean@4"] == pytest.approx(after["eval/few/accuracy"])
    assert after["sync/tensors"] > 0
    rows = [
        json.loads(line)
        for line in (out / "eval" / "few" / "step-000001.jsonl").read_text().splitlines()
    ]
    assert [len(r["completions"]) for r in rows] == [4, 4, 4]
    assert rows[0]["completions"][0]["answer"] == rows[0]["completions"][0]["text"].strip()


@pytest.mark.slow
def test_nothing_is_generated_beside_an_evaluation(run, sums_model, monkeypatch):
    """Check that generation waits for an evaluation.

    Generation during training would otherwise draw with weights that the evaluation syncs in
    between.
    """
    told = []

    class Watched(Synchronous):
        def take(self, step):
            told.append("take")
            return super().take(step)

        def settle(self):
            told.append("settle")

    measure = Evaluator.measure
    monkeypatch.setattr(rl, "Synchronous", Watched)
    monkeypatch.setattr(
        Evaluator, "measure", lambda self, step: told.append("measure") or measure(self, step)
    )
    run(
        {"samples": 1, "max_problems": 2, "source": str(sums_model / "test.jsonl"), "every": 1},
        run={"steps": 2},
    )
    assert told == ["measure", *["take", "settle", "measure"] * 2]


@pytest.mark.slow
def test_a_model_is_measured_alone_as_a_run_measures_it(run, sums_model, capsys, caplog):
    from engine_trainer.cli import main

    held = {"source": str(sums_model / "test.jsonl"), "samples": 2, "max_problems": 5}
    out, (before, _) = run(held)
    metrics = (out / "metrics.jsonl").read_text()
    baseline = out / "eval" / "step-000000.jsonl"
    baseline.write_text("what the run measured")
    caplog.clear()
    assert main(["eval", str(out / "config.yaml"), "engine.schedule.warmup_steps=5"]) == 0
    assert "warmup" not in caplog.text  # nothing is trained
    figures = json.loads((out / "evaluation.json").read_text())["figures"]
    assert figures == {name: value for name, value in before.items() if name.startswith("eval/")}
    assert f"eval/accuracy {figures['eval/accuracy']:.4g}".split() in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]
    assert (out / "metrics.jsonl").read_text() == metrics
    assert baseline.read_text() == "what the run measured"
    assert len((out / "evaluation" / "step-000000.jsonl").read_text().splitlines()) == 5
    assert main(["eval", str(out / "config.yaml"), "eval=null"]) == 2
    assert "no problems to evaluate" in capsys.readouterr().err


def test_held_out_prompts_without_room_are_named_with_their_set_or_dropped(run, tmp_path, caplog):
    rows = [{"prompt": "1+" * 20 + "1", "answer": "1"}, {"prompt": "1+1=", "answer": "2"}]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held = {"sets": {"few": {"source": str(tmp_path / "held.jsonl")}}}
    with pytest.raises(
        DataError, match=r"(?s)held.jsonl:1.*1 of 2 rows of eval.sets.few.*data.on_too_long=drop"
    ):
        run(held, rollout={"max_new_tokens": 24})
    _, (before, _) = run(held, rollout={"max_new_tokens": 24}, data={"on_too_long": "drop"})
    assert before["eval/few/problems"] == 1
    assert "1 of 2 rows of eval.sets.few are too long and were dropped" in caplog.text


def test_prompts_without_room_are_dropped_and_counted(run, sums_model, tmp_path, caplog):
    """Drop a prompt of 41 tokens: the model has 64 positions, 24 of them for new tokens."""
    rows = [
        {"prompt": "1+" * 20 + "1", "answer": "1"},
        {"prompt": "1+1=", "answer": "2"},
        {"prompt": "2+1=", "answer": "3"},
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, (before, after) = run(
        None,
        data={"source": str(tmp_path / "own.jsonl"), "on_too_long": "drop"},
        rollout={"max_new_tokens": 24},
        algorithm={"prompts_per_step": 2},
    )
    assert (before["data/dropped"], before["data/truncated"]) == (1.0, 0.0)
    assert (
        "1 of 3 rows are too long and were dropped: "
        "the context minus rollout.max_new_tokens is 40" in caplog.text
    )
    assert (after["rollout/groups"], after["train/epoch"]) == (2.0, 1.0)

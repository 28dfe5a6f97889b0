"""``engine-train export``, and which checkpoint and dtype of a run are kept."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from importlib.metadata import version

import pytest
import torch
from rl_runs import configure, same, tensors_of

from engine_api.errors import CheckpointMismatch, ConfigError
from engine_trainer.cli import main
from engine_trainer.config import SFTConfig
from engine_trainer.config.loading import load_config, to_plain
from engine_trainer.rl.loop import train_rl
from engine_trainer.run.best import BestStep
from engine_trainer.run.checkpoints import Checkpoints
from engine_trainer.sampling.evaluate import Evaluator, evaluate_model
from engine_trainer.sft import train_sft

pytest.importorskip("engine_fsdp", reason="the runs need an engine")


@pytest.fixture(scope="module")
def trained(sums_model, tmp_path_factory):
    """A run with an adapter, saved after each step."""
    out = tmp_path_factory.mktemp("trained") / "run"
    engine = {
        "model": {"path": str(sums_model)},
        "device": "cpu",
        "optimizer": {"lr": 0.01},
        "lora": {"rank": 4, "alpha": 8.0},
    }
    train_rl(configure(sums_model, out, engine=engine, run={"save_every": 1, "keep": 0}))
    return out


def test_the_newest_checkpoint_is_the_exported_model_bit_for_bit(trained, tmp_path, capsys):
    assert main(["export", str(trained), str(tmp_path / "model")]) == 0
    assert "step-000003" in capsys.readouterr().out
    assert same(tmp_path / "model", trained / "hf")
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def test_an_earlier_checkpoint_is_an_earlier_model_in_another_dtype(trained, tmp_path):
    first = trained / "checkpoints" / "step-000001"
    assert main(["export", str(first), str(tmp_path / "whole")]) == 0
    assert main(["export", str(first), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert not same(tmp_path / "whole", trained / "hf")
    whole, half = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "half")
    assert {t.dtype for t in half.values()} == {torch.bfloat16}
    for name, tensor in whole.items():
        assert torch.equal(tensor.bfloat16(), half[name]), name
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


# peft 0.21 asks a model by a name that transformers 5.23 replaced.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_on_its_base_gives_the_logits_of_the_merged_model(trained, tmp_path, sums_model):
    peft = pytest.importorskip("peft", reason="the extra lora")
    from transformers import AutoModelForCausalLM

    assert main(["export", str(trained), str(tmp_path / "adapter"), "--adapter"]) == 0
    assert {p.name for p in (tmp_path / "adapter").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    tokens = torch.arange(2, 16).view(1, -1)
    merged = AutoModelForCausalLM.from_pretrained(trained / "hf").eval()
    base = AutoModelForCausalLM.from_pretrained(sums_model).eval()
    with torch.no_grad():
        plain = base(tokens).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(tokens).logits
        expected = merged(tokens).logits
    assert (adapted - plain).abs().max() > 1e-3
    torch.testing.assert_close(adapted, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "out"], "there is no checkpoint"),
        (["{run}", "{run}"], "is not empty"),
        (["{run}", "out", "engine.backend=nothing"], "no engine is called 'nothing'"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    trained, tmp_path, monkeypatch, capsys, arguments, words
):
    monkeypatch.chdir(tmp_path)
    assert main(["export", *(a.format(run=trained) for a in arguments)]) != 0
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_without_an_adapter_has_none_to_export(sft_file, tmp_path, capsys):
    folder = train_sft(load_config(SFTConfig, sft_file, [])).folder
    assert main(["export", str(folder), str(tmp_path / "adapter"), "--adapter"]) == 2
    assert "the run has no adapter" in capsys.readouterr().err
    (folder / "config.yaml").unlink()
    assert main(["export", str(folder), str(tmp_path / "exported")]) == 2
    assert "config.yaml" in capsys.readouterr().err


def test_the_exported_model_has_the_dtype_of_the_computation(sums_model, tmp_path):
    engine = {
        "model": {"path": str(sums_model)},
        "device": "cpu",
        "precision": {"compute": "bfloat16"},
    }
    train_rl(configure(sums_model, tmp_path / "half", engine=engine, run={"steps": 1}))
    assert {t.dtype for t in tensors_of(tmp_path / "half" / "hf").values()} == {torch.bfloat16}
    train_rl(
        configure(
            sums_model, tmp_path / "whole", engine=engine, run={"steps": 1, "hf_dtype": "float32"}
        )
    )
    assert {t.dtype for t in tensors_of(tmp_path / "whole" / "hf").values()} == {torch.float32}


def test_others_may_read_a_model_as_the_umask_says(sums_model, tmp_path):
    before = os.umask(0o027)
    try:
        train_rl(configure(sums_model, tmp_path / "run", run={"steps": 1}))
    finally:
        os.umask(before)
    files = [p for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != ".lock"]
    assert len(files) > 5
    wrong = {
        p.name: oct(p.stat().st_mode) for p in files if stat.S_IMODE(p.stat().st_mode) != 0o640
    }
    assert wrong == {}


# --- engine-train eval of a checkpoint --------------------------------------------------------


def test_a_checkpoint_is_measured_and_an_earlier_measurement_is_kept(trained, tmp_path, sums_model):
    """Measuring the checkpoint of a run gives what measuring its exported model gives."""
    lora = {"rank": 4, "alpha": 8.0}

    def measure(out, path, resume, **engine):
        config = configure(
            sums_model,
            tmp_path / out,
            engine={"model": {"path": str(path)}, "device": "cpu", **engine},
            run={"resume": str(resume), "seed": 3},
            eval={"source": str(sums_model / "test.jsonl"), "samples": 2, "temperature": 1.0},
        )
        evaluate_model(config)
        return json.loads((tmp_path / out / "evaluation.json").read_text())

    base = measure("one", sums_model, "auto", lora=lora)
    found = measure("one", sums_model, trained, lora=lora)
    exported = measure("two", trained / "hf", "auto")
    assert found["figures"] == exported["figures"]
    assert found["figures"] != base["figures"]
    assert (base["checkpoint"], base["step"]) == (None, 0)
    assert found["checkpoint"] == str(trained / "checkpoints" / "step-000003")
    assert (found["model"], found["step"]) == (str(sums_model), 3)
    assert found["eval"]["samples"] == 2
    assert found["data"] == to_plain(configure(sums_model, tmp_path))["data"]
    assert found["engine"]["lora"]["rank"] == 4
    manifest = trained / "checkpoints" / "step-000003" / "manifest.json"
    assert found["checkpoint_sha256"] == hashlib.sha256(manifest.read_bytes()).hexdigest()
    assert base["checkpoint_sha256"] is None
    assert found["engine_trainer"] == version("engine-trainer")
    assert json.loads((tmp_path / "one" / "evaluation-1.json").read_text()) == base
    (before,) = (tmp_path / "one" / "evaluation-1").iterdir()
    (after,) = (tmp_path / "one" / "evaluation").iterdir()
    assert (before.name, after.name) == ("step-000000.jsonl", "step-000003.jsonl")


def test_a_checkpoint_of_another_model_is_not_measured(trained, tmp_path, sums_model):
    config = configure(
        sums_model,
        tmp_path / "out",
        run={"resume": str(trained)},
        eval={"source": str(sums_model / "test.jsonl")},
    )
    with pytest.raises(CheckpointMismatch):
        evaluate_model(config)
    assert not (tmp_path / "out" / "evaluation.json").exists()


# --- the best step ----------------------------------------------------------------------------


def test_a_loss_is_better_when_it_is_lower_and_a_figure_that_is_no_number_never():
    loss = BestStep("eval/few/loss", None)
    found = [loss.note(i, {"eval/few/loss": v}) for i, v in enumerate([float("nan"), 3, 2, 4, 2])]
    assert found == [False, True, True, False, False]
    assert (loss.step, loss.value, loss.worse) == (2, 2, 2)
    accuracy = BestStep("eval/accuracy", 2)
    assert [accuracy.note(i, {"eval/accuracy": v}) for i, v in enumerate([0.1, 0.3, 0.2])] == [
        True,
        True,
        False,
    ]
    assert not accuracy.is_over
    accuracy.note(3, {"train/loss": 1.0})
    assert not accuracy.is_over
    accuracy.note(4, {"eval/accuracy": 0.3})
    assert accuracy.is_over
    again = BestStep("eval/accuracy", 2)
    again.restore(accuracy.state)
    assert again.state == accuracy.state
    with pytest.raises(ConfigError, match="it has eval/reward"):
        accuracy.note(5, {"eval/reward": 0.0})


def test_the_best_step_keeps_its_checkpoint_and_ends_the_run(
    sft_file, tmp_path, monkeypatch, capsys
):
    from engine_trainer import sft

    losses = iter([9.0, 5.0, 3.0, 4.0, 3.5, 3.2, 1.0])  # from before the first step on
    monkeypatch.setattr(sft, "heldout_loss", lambda *_: {"loss": next(losses)})
    arguments = [
        f"eval.source={tmp_path / 'rows.jsonl'}",
        "eval.every=1",
        "run.keep=1",
        "run.keep_best=eval/loss",
        "run.patience=3",
    ]
    outcome = train_sft(load_config(SFTConfig, sft_file, arguments))
    assert (outcome.step, outcome.total_steps) == (5, 6)
    said = capsys.readouterr().out
    assert "stopped after step 5: 3 evaluations in a row were not better than eval/loss 3" in said
    checkpoints = outcome.folder / "checkpoints"
    assert list(Checkpoints(checkpoints, keep=0).steps()) == [2, 5]
    assert (checkpoints / "best").read_text() == "step-000002"
    assert (outcome.folder / "hf").is_dir()
    assert main(["export", str(checkpoints / "best"), str(tmp_path / "exported")]) == 0
    assert "step-000002" in capsys.readouterr().out
    # The same command does not train on, and keeps the best one.
    train_sft(load_config(SFTConfig, sft_file, arguments))
    assert list(Checkpoints(checkpoints, keep=0).steps()) == [2, 5]


def test_the_best_step_of_rl_is_the_one_of_the_highest_accuracy(sums_model, tmp_path, monkeypatch):
    accuracies = iter([0.1, 0.3, 0.9, 0.5])  # from before the first step on
    monkeypatch.setattr(Evaluator, "measure", lambda *_: {"eval/accuracy": next(accuracies)})
    train_rl(
        configure(
            sums_model,
            tmp_path / "run",
            eval={"source": str(sums_model / "test.jsonl"), "every": 1},
            run={"keep": 1, "keep_best": "eval/accuracy"},
        )
    )
    checkpoints = tmp_path / "run" / "checkpoints"
    assert list(Checkpoints(checkpoints, keep=0).steps()) == [2, 3]
    assert (checkpoints / "best").read_text() == "step-000002"


def test_a_figure_that_evaluations_do_not_have_is_refused_before_the_first_step(sft_file, tmp_path):
    arguments = [f"eval.source={tmp_path / 'rows.jsonl'}", "run.keep_best=eval/los"]
    config = load_config(SFTConfig, sft_file, arguments)
    with pytest.raises(ConfigError, match="did you mean eval/loss"):
        train_sft(config)
    assert not list(tmp_path.glob("**/step-*"))


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["run.keep_best=accuracy"], "run.keep_best"),
        (["run.patience=3"], "run.patience"),
        (["run.keep_best=eval/loss"], "run.keep_best"),
    ],
)
def test_a_best_step_that_cannot_be_found_is_refused(sft_file, overrides, field):
    with pytest.raises(ConfigError) as caught:
        train_sft(load_config(SFTConfig, sft_file, overrides))
    assert caught.value.field == field

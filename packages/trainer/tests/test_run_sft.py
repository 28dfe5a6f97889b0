from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch
import yaml

from engine_api.errors import ConfigError, UnsupportedCapability
from engine_api.registry import EngineRegistry
from engine_trainer import sft
from engine_trainer.cli import main
from engine_trainer.config import SFTConfig
from engine_trainer.config.loading import load_config
from engine_trainer.data import load_tokenizer
from engine_trainer.errors import DataError
from engine_trainer.run.checkpoints import compare, fingerprint, list_defaults
from engine_trainer.sft import train_sft
from engine_trainer.telemetry.environment import read_starts
from engine_trainer.telemetry.logs import read_metrics
from engine_trainer.telemetry.metrics import explain


def run(file, *overrides):
    config = load_config(SFTConfig, file, overrides)
    return train_sft(config)


def table(outcome):
    return torch.load(outcome.folder / "hf" / "table.pt", weights_only=True)


def losses(outcome):
    return [row.get("train/loss") for row in read_metrics(outcome.folder / "metrics.jsonl")]


def test_it_learns_and_leaves_a_whole_folder(sft_file):
    outcome = run(
        sft_file,
        "run.steps=30",
        "run.report=true",
        "run.tensorboard=true",
        "run.save_every=10",
        "run.keep=2",
    )
    assert (outcome.step, outcome.total_steps) == (30, 30)
    values = losses(outcome)[1:]
    assert values[-1] < 0.5 * values[0]
    assert {p.name for p in outcome.folder.iterdir()} == {
        ".lock",
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "hf",
        "report.html",
    }
    assert sorted(p.name for p in (outcome.folder / "checkpoints").iterdir()) == [
        "latest",
        "step-000020",
        "step-000030",
    ]
    assert (outcome.folder / "hf" / "tokenizer.json").is_file()
    row = read_metrics(outcome.folder / "metrics.jsonl")[-1]
    assert row["step"] == 30
    assert row["train/epoch"] == 12.0
    assert row["train/tokens"] > row["train/learned_tokens"] == 8 * 5
    assert row["time/train"] > 0
    assert "perf/mfu" not in row
    rows = read_metrics(outcome.folder / "metrics.jsonl")
    unexplained = {name for one in rows for name in one if not explain(name)}
    assert unexplained == {"step", "time"}
    (start,) = read_starts(outcome.folder)
    assert (start.task, start.after, start.steps, start.ranks) == ("sft", 0, 30, 1)
    assert (start.backend, start.device) == ("bigram", "cpu")


def test_a_damaged_file_costs_the_report_and_not_the_run(sft_file, caplog):
    folder = sft_file.parent / "out"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "rollouts" / "step-000001.parquet").write_text("cut off")
    (folder / "eval").mkdir()
    stale = folder / "eval" / "step-000099.jsonl"
    stale.write_text("of an earlier run")
    outcome = run(sft_file, f"run.output_dir={folder}", "run.steps=1", "run.report=true")
    assert outcome.step == 1
    assert (outcome.folder / "hf").is_dir()
    assert "there is no new report" in caplog.text
    assert "not a Parquet file" in caplog.text
    # A new run forgets the evaluations of an earlier one.
    assert not stale.exists()


def test_the_schedule_ends_with_the_run(sft_file):
    outcome = run(sft_file, "engine.schedule.name=linear", "run.steps=4")
    rates = [row["train/lr"] for row in read_metrics(outcome.folder / "metrics.jsonl")[1:]]
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025])


def test_a_warmup_that_the_run_does_not_outlast_is_said(sft_file, caplog):
    run(sft_file, "engine.schedule.warmup_steps=50", "run.steps=4")
    assert "engine.schedule.warmup_steps is 50, but the run has 4 steps of" in caplog.text
    caplog.clear()
    run(sft_file, "engine.schedule.warmup_steps=3", "run.steps=4")
    assert "warmup_steps is" not in caplog.text


def test_heldout_loss_is_that_of_every_learned_token(sft_file, tmp_path):
    outcome = run(
        sft_file, f"eval.source={tmp_path / 'rows.jsonl'}", "eval.every=2", "eval.samples=0"
    )
    rows = read_metrics(outcome.folder / "metrics.jsonl")
    assert [r["step"] for r in rows if "eval/loss" in r] == [0, 2, 4, 6]
    assert rows[0]["eval/loss"] == pytest.approx(4.6, abs=0.1)  # ln of about 101 tokens
    assert rows[-1]["eval/loss"] < 4.0


def test_heldout_rows_that_are_trained_on_are_reported(sft_file, tmp_path, caplog):
    run(sft_file, f"eval.source={tmp_path / 'rows.jsonl'}", "eval.samples=0", "run.steps=1")
    assert "20 of 20 held-out prompts" in caplog.text


def test_rows_of_a_named_set_that_are_trained_on_are_reported_too(sft_file, tmp_path, caplog):
    rows = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "held.jsonl").write_text(rows.replace("say", "tell"))
    sets = (
        f"eval={{source: {tmp_path}/held.jsonl, "
        f"sets: {{seen: {{source: {tmp_path}/rows.jsonl, max_problems: 2}}}}}}"
    )
    config = load_config(SFTConfig, sft_file, [sets, "reward.name=exact"])
    sft._Data.load(config, load_tokenizer(config.data, config.engine.model))
    (said,) = [r.getMessage() for r in caplog.records if "held-out" in r.getMessage()]
    assert said.startswith("2 of 2 held-out prompts of seen are also in the training data")


def test_a_resumed_run_ends_as_one_that_was_left_alone(sft_file, tmp_path):
    alone = run(sft_file, f"run.output_dir={tmp_path / 'a'}", "run.steps=9")
    first = run(
        sft_file,
        f"run.output_dir={tmp_path / 'b'}",
        "run.steps=9",
        "run.save_every=4",
        "run.keep=0",
    )
    # The folder looks as after a kill in step 9: the last checkpoint is gone, and the log has more
    # steps than the remaining checkpoints.
    shutil.rmtree(first.folder / "checkpoints" / "step-000009")
    (first.folder / "checkpoints" / "latest").write_text("step-000008")
    with (first.folder / "metrics.jsonl").open("a") as log:
        log.write('{"step": 10, "tra')
    again = run(
        sft_file,
        f"run.output_dir={tmp_path / 'b'}",
        "run.steps=9",
        "run.save_every=4",
        "run.keep=0",
    )
    assert torch.equal(table(alone), table(again))
    assert losses(alone) == losses(again)


def test_a_newer_folder_that_latest_does_not_name_yet_is_taken(sft_file):
    folder = run(sft_file, "run.save_every=3").folder
    (folder / "checkpoints" / "latest").write_text("step-000003")
    assert run(sft_file, "run.steps=6").step == 6
    assert len(read_metrics(folder / "metrics.jsonl")) == 7


def test_what_a_kill_before_the_pointer_moved_left_undone_is_done_at_the_next_start(sft_file):
    """Nothing is left to train: no save would do it."""
    out = ("run.save_every=3", "run.keep=0")
    folder = run(sft_file, *out).folder / "checkpoints"
    (folder / "latest").rename(folder / "step-000006" / "latest")
    (folder / "latest").write_text("step-000003")
    run(sft_file, "run.save_every=3", "run.keep=1")
    assert (folder / "latest").read_text() == "step-000006"
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-000006"]
    assert not (folder / "step-000006/latest").exists()


def test_a_kill_in_the_save_of_a_longer_runs_model_leaves_the_former_one(
    sft_file, monkeypatch, bigram_class
):
    folder = run(sft_file).folder
    before = table(run(sft_file))
    (folder / "hf/notes").write_text("of the user")

    class Killed(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("engine_trainer.run.model_folder.replace_folder", die)
        with pytest.raises(Killed):
            run(sft_file, "run.steps=8")
    assert torch.equal(torch.load(folder / "hf/table.pt", weights_only=True), before)
    assert (folder / "hf/tokenizer.json").is_file()
    longer = run(sft_file, "run.steps=8")
    assert not torch.equal(table(longer), before)
    assert (folder / "hf/notes").read_text() == "of the user"
    assert not list(folder.glob("hf.*"))


def test_without_a_last_checkpoint_the_model_is_written_and_nothing_else(sft_file):
    outcome = run(sft_file, "run.save_last=false")
    assert outcome.step == outcome.total_steps
    assert (outcome.folder / "hf" / "table.pt").is_file()
    assert not list((outcome.folder / "checkpoints").glob("step-*"))


def test_a_finished_run_has_nothing_to_do_and_a_longer_one_goes_on(sft_file):
    before = table(run(sft_file))
    assert torch.equal(table(run(sft_file)), before)
    longer = run(sft_file, "run.steps=8")
    assert [r["step"] for r in read_metrics(longer.folder / "metrics.jsonl")] == list(range(9))


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("engine.options.foo=1", "engine.options.foo"),
        ("engine.model.attention=foo", "engine.model.attention"),
    ],
)
def test_what_an_engine_refuses_is_named_as_the_file_has_it(sft_file, override, field):
    pytest.importorskip("engine_fsdp", reason="the run needs an engine")
    with pytest.raises(ConfigError) as caught:
        run(sft_file, "engine.backend=fsdp2", "engine.model.init=random", override)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("batch_size=4", "batch_size"),
        ("run.seed=5", "run.seed"),
        ("data.max_length=99", "data.max_length"),
        ("engine.model.revision=x", "engine.model.revision"),
    ],
)
def test_resuming_with_what_matters_changed_is_refused(sft_file, override, field):
    folder = run(sft_file).folder
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError) as caught:
        run(sft_file, "run.steps=8", override)
    assert caught.value.field == field
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_resuming_with_more_rows_is_refused(sft_file):
    run(sft_file)
    rows = sft_file.parent / "rows.jsonl"
    rows.write_text(rows.read_text() + '{"prompt": "say a", "response": "abc"}\n')
    with pytest.raises(ConfigError, match="expected 20 rows as in step-000006, got 21"):
        run(sft_file, "run.steps=8")


def test_resuming_with_another_rate_is_allowed_and_said(sft_file, caplog):
    run(sft_file)
    run(sft_file, "run.steps=8", "engine.optimizer.lr=0.01")
    assert "engine.optimizer.lr: 0.1 -> 0.01" in caplog.text


def test_never_refuses_to_mix_two_runs(sft_file):
    run(sft_file)
    with pytest.raises(ConfigError, match="already holds a run"):
        run(sft_file, "run.resume=never")


def chunk_of(folder):
    written = yaml.safe_load((folder / "config.yaml").read_text())
    return written["engine"]["memory"]["logit_chunk"]


def test_a_resumed_run_keeps_what_was_chosen_for_auto(sft_file, caplog):
    folder = run(sft_file, "run.steps=1", "engine.memory.logit_chunk=7").folder
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="engine_trainer"):
        run(sft_file, "run.steps=2")
    (chosen,) = [r.getMessage() for r in caplog.records if "chosen:" in r.getMessage()]
    assert "engine.memory.logit_chunk=7 (as in step-000001)" in chosen
    assert chunk_of(folder) == 7
    # An explicit value is the user's.
    run(sft_file, "run.steps=3", "engine.memory.logit_chunk=9")
    assert chunk_of(folder) == 9


def test_a_key_that_is_newer_than_a_checkpoint_had_its_default_there(sft_file):
    def differ(then, *overrides):
        config = load_config(SFTConfig, sft_file, overrides)
        return compare(then, fingerprint(config), "there", list_defaults(config))

    now = fingerprint(load_config(SFTConfig, sft_file, ()))
    newer = ("data.on_bad_image", "engine.model.freeze", "optimizer.eps")
    then = {key: value for key, value in now.items() if key not in newer}
    assert differ(then) == []
    with pytest.raises(ConfigError, match="expected 'error' as in the checkpoint, got 'drop'"):
        differ(then, "data.on_bad_image=drop")
    # The processor compares what it makes of its settings.
    assert differ(then, "data.processor_kwargs.backend=pil") == []
    # A section that was null is none of a newer release.
    with pytest.raises(ConfigError, match=r"expected null as .* got .*rank: 16") as e:
        differ(then, "engine.lora.rank=16", "run.seed=9")
    assert (e.value.field, e.value.why.rpartition("; ")[2]) == ("engine.lora", "also: run.seed")
    with pytest.raises(ConfigError, match="expected a run of sft, got one of rl") as e:
        compare(now | {"kind": "rl"}, now | {"kind": "sft"}, "there")
    assert e.value.field == "run.output_dir"


def test_resuming_from_a_named_checkpoint(sft_file, tmp_path):
    folder = run(sft_file, "run.save_every=2", "run.keep=0").folder
    middle = folder / "checkpoints" / "step-000004"
    with pytest.raises(ConfigError, match="later checkpoints"):
        run(sft_file, f"run.resume={middle}")
    branch = run(sft_file, f"run.resume={middle}", f"run.output_dir={tmp_path / 'branch'}")
    assert [r["step"] for r in read_metrics(branch.folder / "metrics.jsonl")] == [5, 6]
    assert torch.equal(torch.load(folder / "hf" / "table.pt", weights_only=True), table(branch))
    with pytest.raises(ConfigError, match="expected auto, never or a checkpoint folder"):
        run(sft_file, "run.resume=nowhere")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_saves_and_goes_on_later(sft_file, tmp_path, number, monkeypatch):
    before = signal.getsignal(number)  # a shell's background job ignores SIGINT
    alone = run(sft_file, f"run.output_dir={tmp_path / 'alone'}")
    from engine_trainer import sft

    calls = []

    def loss(outputs, batch):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return sft_loss(outputs, batch)

    sft_loss = sft.sft_loss
    monkeypatch.setattr(sft, "sft_loss", loss)
    stopped = run(sft_file)
    assert (stopped.step, stopped.total_steps) == (3, 6)
    assert not (stopped.folder / "hf").exists()
    assert signal.getsignal(number) is before
    assert torch.equal(table(run(sft_file)), table(alone))


@pytest.fixture
def one_bad_step(monkeypatch):
    """The second step's loss is not a number."""
    from engine_trainer import sft

    calls = []

    def loss(outputs, batch):
        calls.append(1)
        whole = sft_loss(outputs, batch)
        return replace(whole, loss=whole.loss * float("nan")) if len(calls) == 2 else whole

    sft_loss = sft.sft_loss
    monkeypatch.setattr(sft, "sft_loss", loss)


def test_a_step_that_is_not_finite_is_skipped_said_and_logged_as_null(
    sft_file, capsys, one_bad_step
):
    outcome = run(sft_file, "run.steps=3")
    for line in (outcome.folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    rows = read_metrics(outcome.folder / "metrics.jsonl")
    assert [r.get("train/skipped") for r in rows] == [None, 0.0, 1.0, 0.0]
    assert rows[2]["train/loss"] is None
    assert "step 2 was skipped" in capsys.readouterr().out


def test_an_engine_that_cannot_export_is_refused_before_it_trains(sft_file, bigram_class):
    EngineRegistry.register(backend="poor", device="cpu")(bigram_class)
    try:
        with pytest.raises(UnsupportedCapability, match=r"run\.save_hf=false"):
            run(sft_file, "engine.backend=poor")
        assert run(sft_file, "engine.backend=poor", "run.save_hf=false").step == 6
    finally:
        EngineRegistry.unregister("poor")


def test_the_log_has_one_row_in_log_every_steps_and_the_last(sft_file):
    outcome = run(sft_file, "run.log_every=4")
    assert [r["step"] for r in read_metrics(outcome.folder / "metrics.jsonl")] == [0, 4, 6]


def test_what_was_measured_is_logged_between_the_logged_steps_too(sft_file, tmp_path):
    data = f"eval.source={tmp_path / 'rows.jsonl'}"
    outcome = run(sft_file, "run.steps=6", "run.log_every=5", data, "eval.every=2")
    rows = read_metrics(outcome.folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 2, 4, 6]
    assert [row["step"] for row in rows] == [0, 2, 4, 5, 6]


@pytest.mark.parametrize("steps", [2, 3])
def test_a_run_that_has_nothing_left_to_train_says_so(sft_file, capsys, steps):
    run(sft_file, "run.steps=3")
    assert "nothing is left" not in capsys.readouterr().out
    run(sft_file, f"run.steps={steps}", "engine.optimizer.lr=0.5")
    assert (
        f"nothing is left to train: the run has {steps} steps, and step-000003 is there"
        in capsys.readouterr().out
    )


def test_another_length_of_the_run_is_named_on_resume(sft_file, caplog):
    run(sft_file, "run.steps=2")
    run(sft_file, "run.steps=3")
    assert "run.steps: 2 -> 3" in caplog.text


def held_files(tmp_path):
    """Write two held-out files of different rows, and return them as ``eval`` in YAML."""
    rows = [{"prompt": f"tell {c}", "response": c * 3} for c in "abc"]
    for name, part in {"one": rows[:1], "two": rows[1:]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in part))
    return (
        f"eval={{source: {tmp_path}/one.jsonl, every: 3, "
        f"sets: {{two: {{source: {tmp_path}/two.jsonl}}}}}}"
    )


def test_the_loss_of_every_held_out_set_is_measured_under_its_name(sft_file, tmp_path):
    sets = held_files(tmp_path)
    rows = read_metrics(run(sft_file, sets).folder / "metrics.jsonl")
    names = ["eval/loss", "eval/perplexity", "eval/two/loss", "eval/two/perplexity"]
    for row in rows:
        found = sorted(name for name in row if name.startswith("eval/"))
        assert found == (names if row["step"] in (0, 3, 6) else []), row["step"]
    alone = run(
        sft_file, f"run.output_dir={tmp_path / 'b'}", f"eval.source={tmp_path / 'two.jsonl'}"
    )
    for step, values in ((0, rows[0]), (6, rows[6])):
        other = read_metrics(alone.folder / "metrics.jsonl")[step]
        assert values["eval/two/loss"] == pytest.approx(other["eval/loss"], rel=1e-6)
        assert values["eval/two/loss"] != pytest.approx(values["eval/loss"], rel=1e-4)


def test_eval_measures_the_losses_of_a_file_of_sft(sft_file, tmp_path, capsys):
    sets = held_files(tmp_path)
    trained = read_metrics(run(sft_file, sets, "run.steps=1").folder / "metrics.jsonl")[0]
    out = tmp_path / "out"
    assert main(["eval", str(sft_file), sets, f"run.output_dir={out}"]) == 0
    figures = json.loads((out / "evaluation.json").read_text())["figures"]
    assert figures == pytest.approx(
        {name: value for name, value in trained.items() if name.startswith("eval/")}
    )
    assert "eval/two/loss" in capsys.readouterr().out
    assert not (out / "checkpoints").exists()
    assert not (out / "hf").exists()
    # The file that a run leaves is one of sft, too.
    saved = tmp_path / "run" / "config.yaml"
    assert main(["eval", str(saved), f"run.output_dir={out}"]) == 0
    assert main(["eval", str(sft_file)]) == 2
    assert "there are no held-out documents" in capsys.readouterr().err
    assert main(["eval", str(sft_file), "--task", "dpo"]) == 2
    assert "expected one of rl, sft, got 'dpo'" in capsys.readouterr().err


def test_eval_of_sft_measures_the_checkpoint_that_resume_names(sft_file, tmp_path):
    sets = held_files(tmp_path)
    folder = run(sft_file, sets, "eval.every=1", "run.save_every=1", "run.keep=0").folder
    losses = {
        row["step"]: row["eval/loss"]
        for row in read_metrics(folder / "metrics.jsonl")
        if "eval/loss" in row
    }
    for step in (2, 6):
        checkpoint = folder / "checkpoints" / f"step-{step:06d}"
        out = tmp_path / f"measured-{step}"
        arguments = [sets, f"run.resume={checkpoint}", f"run.output_dir={out}"]
        assert main(["eval", str(sft_file), *arguments]) == 0
        found = json.loads((out / "evaluation.json").read_text())
        assert (found["checkpoint"], found["step"]) == (str(checkpoint), step)
        assert found["figures"]["eval/loss"] == pytest.approx(losses[step])
    assert losses[2] != pytest.approx(losses[6])


@pytest.mark.parametrize(
    ("key", "override"),
    [
        ("eval.samples", "eval={source: x, samples: 2}"),
        ("eval.sets.a.samples", "eval={source: x, sets: {a: {source: y, samples: 2}}}"),
        ("eval.samples", "eval={samples: 2, sets: {a: {source: y}}}"),
    ],
)
def test_completions_that_nothing_judges_are_refused(sft_file, key, override):
    with pytest.raises(ConfigError, match="without a reward, got 2") as caught:
        load_config(SFTConfig, sft_file, [override])
    assert caught.value.field == key
    load_config(SFTConfig, sft_file, [override, "reward.name=exact"])


@pytest.mark.parametrize(
    "override",
    ["eval={source: x, samples: 0}", "eval={source: x, samples: 0, sets: {a: {source: y}}}"],
)
def test_a_reward_that_scores_no_set_is_refused(sft_file, override):
    with pytest.raises(ConfigError, match="nothing reads it") as caught:
        load_config(SFTConfig, sft_file, [override, "reward.name=exact"])
    assert caught.value.field == "reward"


def test_problems_without_responses_are_measured_by_their_accuracy_alone(
    sft_file, tmp_path, caplog
):
    held_files(tmp_path)
    gold = {"prompt": "tell d", "reward_model": {"ground_truth": "d"}}
    (tmp_path / "gold.jsonl").write_text(json.dumps(gold) + "\n")
    sets = (
        f"eval={{source: {tmp_path}/one.jsonl, sets: {{gold: {{source: {tmp_path}/gold.jsonl}}}}}}"
    )
    config = load_config(SFTConfig, sft_file, [sets, "reward.name=exact"])
    caplog.set_level("INFO", logger="engine_trainer")
    data = sft._Data.load(config, load_tokenizer(config.data, config.engine.model))
    assert [one.name for one in data.heldout.problems] == ["", "gold"]
    assert list(data.heldout.documents) == [""]
    assert "the rows of eval.sets.gold have no responses" in caplog.text
    # Without a reward nothing is left to measure.
    config = load_config(SFTConfig, sft_file, [sets])
    with pytest.raises(DataError, match="no response column"):
        sft._Data.load(config, load_tokenizer(config.data, config.engine.model))


@pytest.mark.parametrize("held", [False, True])
def test_a_document_longer_than_the_models_context_is_named_before_the_run(
    sft_file, tmp_path, held
):
    (tmp_path / "long.jsonl").write_text(
        json.dumps({"prompt": "say a", "response": "abc" * 20}) + "\n"
    )
    source = ["eval.source" if held else "data.source", f"={tmp_path}/long.jsonl"]
    said = "1 of 1 rows of eval" if held else "1 of 1 rows are"
    with pytest.raises(
        DataError, match=rf"(?s)long\.jsonl:1.*6\d tokens, the context has 40.*{said}.*on_too_long"
    ):
        run(
            sft_file, "engine.model.config_overrides={max_position_embeddings: 40}", "".join(source)
        )


@pytest.mark.parametrize("way", ["drop", "truncate"])
def test_held_out_rows_that_are_too_long_are_dropped_or_cut_as_those_of_training_are(
    sft_file, tmp_path, caplog, way
):
    rows = [{"prompt": "say a", "response": "abc" * 20}, {"prompt": "say b", "response": "bca"}]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = run(
        sft_file,
        "engine.model.config_overrides={max_position_embeddings: 40}",
        f"data.on_too_long={way}",
        f"eval.source={tmp_path}/held.jsonl",
        "run.steps=1",
    )
    assert all("eval/loss" in row for row in read_metrics(outcome.folder / "metrics.jsonl"))
    done = {"drop": "dropped", "truncate": "cut"}[way]
    assert f"1 of 2 rows of eval are too long and were {done}: the context has 40" in caplog.text


def test_the_balance_loss_of_a_mixture_of_experts_is_a_figure(sft_file, model_folder):
    """The scores are nearly equal in new weights: each of two layers has a loss near 1."""
    if not any("fsdp2" in row.backends for _, row in EngineRegistry.rows()):
        pytest.skip("engine-fsdp is not installed")
    config = json.loads((model_folder / "config.json").read_text())
    config |= {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 4}
    config |= {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
    (model_folder / "config.json").write_text(json.dumps(config))
    overrides = (
        "engine.backend=fsdp2",
        "engine.device=cpu",
        "engine.model.init=random",
        "run.steps=1",
    )
    balanced = run(sft_file, *overrides, "engine.options.balance_loss=0.01", "run.report=true")
    rows = read_metrics(balanced.folder / "metrics.jsonl")
    assert rows[-1]["train/balance_loss"] == pytest.approx(2, rel=0.1)
    assert not {name for one in rows for name in one if not explain(name)} - {"step", "time"}
    assert "Balance loss" in (balanced.folder / "report.html").read_text()
    shutil.rmtree(balanced.folder)
    plain = run(sft_file, *overrides)
    assert "train/balance_loss" not in read_metrics(plain.folder / "metrics.jsonl")[-1]

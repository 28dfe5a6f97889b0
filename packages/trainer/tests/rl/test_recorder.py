"""The completions that an RL run keeps, compared with the numbers that its learner used."""

from __future__ import annotations

import errno
import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from rl_runs import configure, start, tree
from rollout_rows import rollouts_of, rows_of_step, without_clocks
from waiting import DEADLINE_S

from engine_api.comm import SingleComm
from engine_api.errors import ConfigError, EngineError
from engine_trainer.config.sections import RunSection
from engine_trainer.data import Prompt
from engine_trainer.placement.replica import Group, ScoredCompletion
from engine_trainer.rewards import Score, register
from engine_trainer.rl.experience import Experience
from engine_trainer.rl.kept_tokens import KeptTokens
from engine_trainer.rl.recorder import Recorder
from engine_trainer.telemetry.logs import Timers, read_metrics
from engine_trainer.telemetry.rollouts import (
    SCHEMA,
    RolloutFiles,
    files_of,
    path_of,
    read_rollouts,
)

PER_TOKEN = (
    "token_texts",
    "loss_mask",
    "rollout_log_probs",
    "old_log_probs",
    "entropy",
    "advantages",
    "weight_versions",
)


@pytest.fixture
def train():
    pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
    from engine_trainer.rl.loop import train_rl

    register("mixed")(lambda: lambda s: s.completion.count("7") + s.completion.count("1") / 3)
    return train_rl


@pytest.fixture
def trained_on(monkeypatch):
    """The batches of all updates, document by document, with the fields that the loss reads."""
    from engine_trainer.placement.spmd import SpmdEngines

    documents: list[dict] = []
    original = SpmdEngines.train

    def train(self, shards, loss, **settings):
        before = [o.log_probs for o in self.infer(shards)]
        for shard, log_probs in zip(shards, before, strict=True):
            ends = shard.boundaries
            documents.extend(
                {"tokens": shard.input_ids[a:b].tolist(), "before": log_probs[a:b].tolist()}
                | {name: values[a:b].tolist() for name, values in shard.fields.items()}
                for a, b in pairwise(ends)
            )
        return original(self, shards, loss, **settings)

    monkeypatch.setattr(SpmdEngines, "train", train)
    return documents


def pairs(rows: list[dict], documents: list[dict]) -> list[tuple[dict, dict, int]]:
    """Return each row with its document in the first update that has it, and where it begins."""
    first = {}
    for document in documents:
        first.setdefault(tuple(document["tokens"]), document)
    found = []
    for row in rows:
        document = first.get((*row["prompt_tokens"], *row["tokens"]))
        if document is not None:
            found.append((row, document, len(row["prompt_tokens"])))
    return found


def test_each_tokens_numbers_are_those_of_the_update(train, trained_on, sums_model, tmp_path):
    """With several updates a step, and a reference, everything is known before the first one."""
    config = configure(
        sums_model,
        tmp_path,
        run={"steps": 1, "rollouts": "all"},
        reward={"name": "mixed"},
        algorithm={"prompts_per_step": 8, "mini_batches": 2, "kl": {"coefficient": 0.1}},
    )
    train(config)
    rows = rows_of_step(tmp_path, 1)
    assert len(rows) == 8 * 4
    found = pairs(rows, trained_on)
    assert len(found) == 32
    for row, document, begin in found:
        for name in ("old_log_probs", "ref_log_probs", "advantages", "rollout_log_probs"):
            assert row[name] == document[name][begin:], name
        assert row["loss_mask"] == [weight > 0 for weight in document["loss_weight"][begin:]]
        assert all(value is not None and 0 <= value <= math.log(16) for value in row["entropy"])
        assert all(len(row[name]) == len(row["tokens"]) for name in (*PER_TOKEN, "ref_log_probs"))
    assert any(any(row["advantages"]) for row in rows)


def test_with_one_update_the_old_log_probs_are_its_own(train, trained_on, sums_model, tmp_path):
    train(
        configure(
            sums_model,
            tmp_path,
            run={"steps": 2, "rollouts": "all"},
            reward={"name": "mixed"},
            engine={
                "model": {"path": str(sums_model)},
                "device": "cpu",
                "optimizer": {"lr": 0.03},
                "memory": {"max_tokens": 40},
            },
        )
    )
    found = [p for step in (1, 2) for p in pairs(rows_of_step(tmp_path, step), trained_on)]
    assert len(found) > 32
    for row, document, begin in found:
        assert row["old_log_probs"] == pytest.approx(document["before"][begin:], abs=1e-5)
        assert row["advantages"] == document["advantages"][begin:]
        assert row["ref_log_probs"] is None
        assert None not in row["entropy"]
    # A completion without an advantage is not computed.
    left_out = [r for r in rows_of_step(tmp_path, 1) if r["old_log_probs"] is None]
    assert all(set(r["advantages"]) == {0.0} and all(r["loss_mask"]) for r in left_out)
    assert (
        len(found)
        + len(left_out)
        + sum(r["old_log_probs"] is None for r in rows_of_step(tmp_path, 2))
        == 64
    )


def test_a_row_says_what_was_asked_written_and_scored(train, sums_model, tmp_path):
    train(configure(sums_model, tmp_path, run={"steps": 1}, reward={"name": "mixed"}))
    (path,) = files_of(tmp_path / "rollouts")
    table = read_rollouts(path)
    assert pq.read_schema(path).equals(SCHEMA, check_metadata=False)
    rows = table.to_pylist()
    data = [json.loads(line) for line in (sums_model / "train.jsonl").read_text().splitlines()]
    for row in rows:
        file, _, number = row["problem"].rpartition(":")
        assert file == str(sums_model / "train.jsonl")
        assert data[int(number) - 1] == {"prompt": row["question"], "answer": row["answer"]}
        assert row["prompt"] == row["question"]
        assert "".join(row["token_texts"]).replace("<eos>", "").replace("<pad>", "") == row["text"]
        assert row["reward"] == row["shaped_reward"] == dict(row["reward_parts"])["mixed"]
        assert row["reward"] == row["text"].count("7") + row["text"].count("1") / 3
        assert row["finish_reason"] == ("stop" if row["tokens"][-1] == 1 else "length")
        assert row["weight_versions"] == [0] * len(row["tokens"])
        assert {"generate", "train"} <= dict(row["seconds"]).keys()
    assert {(r["group"], r["sample"]) for r in rows} == {(g, s) for g in range(8) for s in range(4)}
    shares = [r for r in read_metrics(tmp_path / "metrics.jsonl") if r["step"]]
    assert all(row["time/rollouts"] >= 0 for row in shares)


def test_a_resumed_run_replaces_the_steps_that_it_trains_again(train, sums_model, tmp_path):
    run = {"steps": 4, "save_every": 2, "keep": 0}
    train(configure(sums_model, tmp_path, run=run, reward={"name": "mixed"}))
    first = {step: rows_of_step(tmp_path, step) for step in range(1, 5)}
    # Those of a run that went further before it was killed.
    path_of(tmp_path / "rollouts", 5).write_bytes(path_of(tmp_path / "rollouts", 4).read_bytes())
    (tmp_path / "rollouts" / "step-000006.parquet.partial").write_bytes(b"PAR1")
    shutil.rmtree(tmp_path / "checkpoints" / "step-000004")
    run["resume"] = str(tmp_path / "checkpoints" / "step-000002")
    train(configure(sums_model, tmp_path, run=run, reward={"name": "mixed"}))
    again = {step: rows_of_step(tmp_path, step) for step in range(1, 5)}
    assert len(list((tmp_path / "rollouts").iterdir())) == 4
    for step in (1, 2):
        assert again[step] == first[step]
    for step in (3, 4):
        assert without_clocks(again[step]) == without_clocks(first[step])
        assert again[step][0]["time"] > first[4][0]["time"]
    assert [row["step"] for row in again[3]] == [3] * 32


def test_the_files_of_a_checkpoints_steps_are_on_the_disk_before_it(
    train, sums_model, tmp_path, monkeypatch
):
    from engine_trainer.run.checkpoints import Checkpoints

    there = []
    save = Checkpoints.save

    def note(self, policy, comm, step, *rest):
        there.append((step, path_of(tmp_path / "rollouts", step).is_file()))
        return save(self, policy, comm, step, *rest)

    monkeypatch.setattr(Checkpoints, "save", note)
    train(configure(sums_model, tmp_path, run={"steps": 3, "save_every": 1}))
    assert there == [(1, True), (2, True), (3, True)]


def test_a_file_that_cannot_be_written_ends_the_run_with_its_step_saved(
    train, sums_model, tmp_path, monkeypatch
):
    """The error is raised before a further step changes the weights, so that none is lost."""
    write = RolloutFiles._write

    def fail(self, step, build):
        if step == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, step, build)

    config = configure(sums_model, tmp_path, run={"steps": 4, "save_every": 0})
    with monkeypatch.context() as patch:
        patch.setattr(RolloutFiles, "_write", fail)
        with pytest.raises(EngineError, match="No space left"):
            train(config)
    assert [path.name for path in files_of(tmp_path / "rollouts")] == ["step-000001.parquet"]
    train(config)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl") if row["step"]] == [
        1,
        2,
        3,
        4,
    ]
    resumed = [int(path.stem[5:]) for path in files_of(tmp_path / "rollouts")]
    assert resumed == [1, 3, 4]


def test_an_evaluation_that_fails_loses_and_doubles_no_rows(
    train, sums_model, tmp_path, monkeypatch
):
    from engine_trainer.sampling.evaluate import Evaluator

    measure = Evaluator.measure

    def fail(self, step):
        if step == 2:
            raise ValueError("the evaluation fails")
        return measure(self, step)

    config = configure(
        sums_model,
        tmp_path / "failed",
        run={"steps": 3, "rollouts": "all"},
        eval={"source": str(sums_model / "test.jsonl"), "every": 2},
    )
    whole = replace(config, run=replace(config.run, output_dir=str(tmp_path / "whole")))
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "measure", fail)
        with pytest.raises(ValueError, match="evaluation fails"):
            train(config)
    second = path_of(tmp_path / "failed" / "rollouts", 2).read_bytes()
    train(config)
    assert path_of(tmp_path / "failed" / "rollouts", 2).read_bytes() == second
    train(whole)
    assert rollouts_of(tmp_path / "failed") == rollouts_of(tmp_path / "whole")
    assert len(rollouts_of(tmp_path / "whole")) == 3 * 32


def test_none_keeps_nothing_and_changes_nothing(train, sums_model, tmp_path):
    from rl_runs import same

    for name, keep in (("all", "all"), ("none", "none"), ("five", 5)):
        run = {"steps": 2, "rollouts": keep}
        train(configure(sums_model, tmp_path / name, run=run, reward={"name": "mixed"}))
    assert not (tmp_path / "none" / "rollouts").exists()
    assert len(rows_of_step(tmp_path / "five", 1)) == 5
    assert same(tmp_path / "all" / "hf", tmp_path / "none" / "hf")


def test_groups_without_a_difference_are_kept_and_are_not_learned_from(train, sums_model, tmp_path):
    train(
        configure(
            sums_model,
            tmp_path,
            run={"steps": 1, "rollouts": "all"},
            algorithm={"dynamic_sampling": {"enabled": True, "max_rounds": 3}},
        )
    )
    rows = rows_of_step(tmp_path, 1)
    (metrics,) = (r for r in read_metrics(tmp_path / "metrics.jsonl") if r["step"] == 1)
    by_group: dict[int, list[dict]] = {}
    for row in rows:
        by_group.setdefault(row["group"], []).append(row)
    learned = [group for group in by_group.values() if group[0]["learned"]]
    assert 0 < len(learned) == metrics["rollout/groups"] < len(by_group)
    for group in by_group.values():
        differ = len({row["reward"] for row in group}) > 1
        assert {row["learned"] for row in group} <= {differ}
        for row in group:
            if not row["learned"]:
                assert row["advantages"] is row["old_log_probs"] is None
                assert not any(row["loss_mask"])


AGENT = """
async def add(episode):
    await episode.generate(max_new_tokens=2)
    await episode.generate("=#", max_new_tokens=2)
    return episode.end()

def mixed(sample):
    return sample.completion.count("7") + sample.completion.count("1") / 3
"""


def test_a_conversations_tool_calls_are_named_and_carry_no_loss(
    train, trained_on, sums_model, tmp_path
):
    (tmp_path / "own.py").write_text(AGENT)
    sections = {
        "reward": {"name": None, "function": f"{tmp_path}/own.py:mixed"},
        "agent": {"function": f"{tmp_path}/own.py:add"},
        "rollout": {"n": 4, "max_new_tokens": 8},
    }
    train(configure(sums_model, tmp_path / "out", run={"steps": 1}, **sections))
    rows = rows_of_step(tmp_path / "out", 1)
    assert len(rows) == 32
    for row in rows:
        (call,) = row["tool_calls"]
        a, b = call["start"], call["end"]
        assert (call["result"], row["token_texts"][a:b]) == ("=#", ["=", "#"])
        model = [text for text in row["token_texts"][:a] if text not in ("<eos>", "<pad>")]
        assert call["call"] == "".join(model)
        counts = [True] * len(row["tokens"])
        counts[a:b] = [False] * 2
        assert row["loss_mask"] == counts
        assert row["rollout_log_probs"][a:b] == [0.0, 0.0]
        assert row["finish_reason"] in ("stop", "done")
    found = pairs(rows, trained_on)
    assert found
    for row, document, begin in found:
        assert row["old_log_probs"] == pytest.approx(document["before"][begin:], abs=1e-5)
        assert row["advantages"] == document["advantages"][begin:]


def experience(groups: int, n: int, learned: list[int]) -> Experience:
    """A step that learns from some of its groups."""
    score = Score(total=1.0, parts={"r": 1.0}, correct=True)
    completion = ScoredCompletion(tokens=[1], log_probs=[-1.0], text="", finished=True, score=score)
    prompt = Prompt(tokens=[1], rendered="", text="", answer=None)
    made = [Group(prompt=prompt, completions=[completion] * n) for _ in range(groups)]
    kept = [made[g] for g in learned]
    return Experience(groups=kept, position=0, metrics={}, generated=made)


@pytest.mark.parametrize(
    ("wanted", "numbers", "keep"),
    [
        (1, [(0, 0)], []),
        (6, [(0, 0), (0, 1), (0, 2), (0, 3), (4, 0), (4, 1)], [(1, 0), (1, 1)]),
        ("none", [], []),
        (100, [(g, s) for g in range(8) for s in range(4)], None),
        ("all", [(g, s) for g in range(8) for s in range(4)], None),
    ],
)
def test_a_number_takes_whole_groups_from_all_parts_of_a_step(tmp_path, wanted, numbers, keep):
    section = RunSection(output_dir=str(tmp_path), steps=1, rollouts=wanted)
    config = SimpleNamespace(run=section, rollout=SimpleNamespace(n=4))
    run = SimpleNamespace(
        folder=tmp_path, is_main=False, comm=SingleComm(), timers=Timers(), before_save=[]
    )
    recorder = Recorder(run, config, None)
    chosen = recorder.choose(experience(8, 4, [1, 4, 6]))
    assert [(c.number, c.sample) for c in recorder._chosen] == numbers
    assert chosen == ([(g, s) for g in range(3) for s in range(4)] if keep is None else keep)


def test_a_number_below_one_is_refused_with_the_way_to_keep_none():
    with pytest.raises(ConfigError, match=r"run.rollouts.*got 0\b(?s:.)*run.rollouts=none"):
        RunSection(output_dir="o", steps=1, rollouts=0)


def test_a_step_that_learns_from_nothing_has_no_tokens():
    assert not KeptTokens([], [], ())


@pytest.mark.slow
@pytest.mark.distributed
def test_rows_of_two_ranks_are_those_of_one(sums_model, tmp_path):
    """Ranks generate and learn from different completions, and the first one writes all of them."""
    sections = {"run": {"steps": 2, "rollouts": "all"}}
    for ranks in (1, 2):
        process = start(tmp_path, tree(sums_model, tmp_path / str(ranks), **sections), ranks)
        text, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, text
    one, two = (rows_of_step(tmp_path / str(ranks), 1) for ranks in (1, 2))
    assert len(one) == len(two) == 32
    assert any(row["old_log_probs"] for row in two)
    for a, b in zip(without_clocks(one), without_clocks(two), strict=True):
        for name in ("rollout_log_probs", "old_log_probs", "entropy"):
            left, right = a.pop(name), b.pop(name)
            assert (left is None) == (right is None)
            assert left is None or left == pytest.approx(right, abs=1e-4)
        assert a == b

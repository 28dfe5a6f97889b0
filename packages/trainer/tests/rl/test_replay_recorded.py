"""A recorded step is what the learner had, and every way in which it may be incomplete is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rl_runs import configure

from engine_api.errors import CheckpointMissing, ConfigError, EngineError
from engine_trainer.errors import DataError
from engine_trainer.rl.recorded import load_recorded_config, read_recorded_run, read_step
from engine_trainer.run.configurations import config_file
from engine_trainer.telemetry.rollouts import RUN_KEY, VERSION_KEY

AGENT = """
async def add(episode):
    await episode.generate(max_new_tokens=2)
    await episode.generate("=#", max_new_tokens=2)
    return episode.end()
"""


@pytest.fixture(scope="module")
def recorded(sums_model, tmp_path_factory):
    """A run of five steps with tools, checkpoints of steps 1 and 3, and what each step learned."""
    pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
    from engine_trainer.rl.learner import Learner
    from engine_trainer.rl.loop import train_rl

    learned: list = []
    learn = Learner.learn

    def note(self, groups, keep=()):
        learned.append(groups)
        return learn(self, groups, keep)

    folder = tmp_path_factory.mktemp("recorded")
    (folder / "own.py").write_text(AGENT)
    sections = {
        "agent": {"function": f"{folder}/own.py:add"},
        "rollout": {"n": 4, "max_new_tokens": 8},
        "algorithm": {
            "prompts_per_step": 4,
            "dynamic_sampling": {"enabled": True, "max_rounds": 3},
        },
    }
    run = {"steps": 4, "rollouts": "all", "save_every": 2, "keep": 0, "save_hf": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "learn", note)
        train_rl(configure(sums_model, folder / "run", run=run | {"steps": 2}, **sections))
        optimizer = {"lr": 0.001}
        engine = {"model": {"path": str(sums_model)}, "device": "cpu", "optimizer": optimizer}
        train_rl(configure(sums_model, folder / "run", run=run, engine=engine, **sections))
    return folder / "run", learned


@pytest.fixture
def run(recorded, tmp_path) -> Path:
    """A copy of the run that a test may damage."""
    return shutil.copytree(recorded[0], tmp_path / "run")


def comparable(groups) -> list:
    """Everything of groups that an update is computed from."""
    return [
        (
            group.prompt.tokens,
            [
                (
                    c.tokens,
                    c.log_probs,
                    c.finished,
                    c.loss_weights or [1.0] * len(c.tokens),
                    c.weight_versions,
                    c.score.total,
                    c.score.parts,
                )
                for c in group.completions
            ],
        )
        for group in groups
    ]


def test_the_groups_of_a_recorded_step_are_those_that_the_learner_had(recorded):
    folder, learned = recorded
    assert len(learned) == 4
    replaced = 0
    for step, groups in enumerate(learned, 1):
        found = read_step(folder, step)
        assert comparable(found.groups) == comparable(groups)
        assert found.learned == found.kept == sum(len(g.completions) for g in groups)
        replaced += len(found.rows) - found.kept
        for row, index in zip(found.rows, found.indices, strict=True):
            assert (index is not None) == row["learned"]
            if index is not None:
                assert groups[index[0]].completions[index[1]].tokens == row["tokens"]
    assert replaced, "dynamic sampling replaces groups whose rewards are equal"


def test_a_step_comes_with_its_configuration_and_what_leads_to_it(recorded):
    folder, _ = recorded
    found = read_recorded_run(folder, 4, ["engine.memory.max_tokens=64"])
    assert found.checkpoint == folder / "checkpoints" / "step-000002"
    assert [one.step for one in found.steps] == [3, 4]
    assert found.config.engine.memory.max_tokens == 64
    assert found.state["step"] == 2
    first = read_recorded_run(folder, 1)
    assert (first.checkpoint, [one.step for one in first.steps]) == (None, [1])
    rates = [load_recorded_config(folder, step).engine.optimizer.lr for step in (1, 2, 3, 4)]
    assert rates == [0.003, 0.003, 0.001, 0.001]
    assert config_file(folder, 2).name == "config-until-000002.yaml"


def rewrite(path: Path, **metadata: str) -> None:
    table = pq.read_table(path)
    named = {"run": RUN_KEY, "version": VERSION_KEY}
    new = {named[name]: value.encode() for name, value in metadata.items()}
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, **new}), path)


def test_what_is_missing_or_foreign_is_named(run):
    rollouts = run / "rollouts"
    cases: list[tuple[type[EngineError], str, int]] = [
        (ConfigError, "expected one of the run's 4 steps, got 5", 5),
        (ConfigError, "expected one of the run's 4 steps, got 0", 0),
    ]
    for kind, text, step in cases:
        with pytest.raises(kind, match=text):
            read_recorded_run(run, step)
    with pytest.raises(ConfigError, match=r"there is no .*config.yaml(?s:.)*folder of a run"):
        read_recorded_run(run / "nothing", 1)

    whole = (rollouts / "step-000004.parquet").read_bytes()
    rewrite(rollouts / "step-000004.parquet", run="f" * 32)
    with pytest.raises(DataError, match=r"got one of run ffffffff(?s:.)*restore the run's own"):
        read_recorded_run(run, 4)
    (rollouts / "step-000004.parquet").write_bytes(whole)
    rewrite(rollouts / "step-000004.parquet", version="2")
    with pytest.raises(DataError, match=r"expected version 1 .* got 2"):
        read_recorded_run(run, 4)
    (rollouts / "step-000004.parquet").write_bytes(whole)
    table = pq.read_table(rollouts / "step-000004.parquet")
    pq.write_table(table.slice(0, table.num_rows - 1), rollouts / "step-000004.parquet")
    with pytest.raises(DataError, match=r"expected all completions(?s:.)*rollouts: all"):
        read_recorded_run(run, 4)
    (rollouts / "step-000004.parquet").write_bytes(whole)

    (rollouts / "step-000003.parquet").unlink()
    with pytest.raises(CheckpointMissing, match=r"step 4 began with(?s:.)*no recording of step 3"):
        read_recorded_run(run, 4)
    with pytest.raises(DataError, match=r"recording of step 3 is gone(?s:.)*3 other steps"):
        read_recorded_run(run, 3)
    shutil.rmtree(run / "checkpoints")
    assert [one.step for one in read_recorded_run(run, 2).steps] == [1, 2]
    with pytest.raises(CheckpointMissing, match=r"no checkpoint, and no recording of step 3"):
        read_recorded_run(run, 4)

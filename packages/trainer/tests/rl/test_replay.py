"""A recorded step is what the learner had, and a replay of it is the step bit for bit."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from rank_runs import run_on_two_ranks
from rl_runs import configure, rows_of, tree

from engine_api.errors import CheckpointMissing, ConfigError, EngineError
from engine_trainer.cli import main
from engine_trainer.config import RLConfig
from engine_trainer.config.loading import from_tree, load_config
from engine_trainer.errors import DataError
from engine_trainer.replay.overridden import check_engine
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
            "mini_batches": 2,
            "kl": {"coefficient": 0.1, "where": "reward", "target": 0.1},
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


@pytest.mark.slow
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


def test_a_run_from_before_there_were_groups_decays_all_weights(recorded, tmp_path):
    folder, _ = recorded
    text = config_file(folder, 4).read_text()
    (line,) = [one for one in text.splitlines(keepends=True) if one.strip().startswith("decay:")]
    (tmp_path / "config.yaml").write_text(text.replace(line, ""))
    config = load_recorded_config(tmp_path, 4, ["engine.optimizer.weight_decay=0.5"])
    assert config.engine.optimizer.decay == "all"
    assert config.engine.optimizer.weight_decay == 0.5


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


def replayed(folder: Path, step: int, *overrides: str) -> dict:
    """The result of a replay in this process that ends as the command should."""
    status = main(["replay", str(folder), "--step", str(step), *overrides])
    result = json.loads((folder / "replay" / f"step-{step:06d}" / "replay.json").read_text())
    assert status == (0 if result["same_bits"] or result["surroundings"] else 1)
    return result


def test_a_replay_is_the_step_bit_for_bit(recorded, capsys):
    """The checkpoint is of two steps before, and the configuration changed in between.

    The run has tools and a KL whose coefficient adapts.
    """
    folder, _ = recorded
    result = replayed(folder, 4)
    text = capsys.readouterr().out
    assert "bit for bit, weights and optimizer included" in text
    assert (result["same_bits"], result["surroundings"]) == (True, {})
    assert (result["checkpoint"], result["steps"]) == ("step-000002", [3, 4])
    assert {one["name"] for one in result["tokens"]} == {
        "loss_mask",
        "old_log_probs",
        "ref_log_probs",
        "entropy",
        "advantages",
    }
    assert min(one["tokens"] for one in result["tokens"]) > 20
    kinds = {one["kind"] for one in result["states"]}
    assert kinds == {"weights", "exp_avg", "exp_avg_sq", "step"}
    logged = {row["step"]: row for row in rows_of(folder)}
    made = {row["step"]: row for row in rows_of(folder / "replay" / "step-000004")}
    assert set(made) == {3, 4}
    for step, row in made.items():
        assert row == {name: logged[step][name] for name in row}
        assert {"train/kl_coefficient", "train/grad_norm", "train/lr"} <= set(row)
    assert not (folder / "replay" / "step-000004" / "checkpoints").exists()
    first = replayed(folder, 1)
    assert (first["same_bits"], first["checkpoint"]) == (True, None)
    assert "no checkpoint of step 1" in first["uncompared"]


@pytest.mark.slow
def test_a_replay_sees_what_is_not_as_recorded(run, capsys):
    """Another learning rate, and a reward that was changed in the file."""
    result = replayed(run, 4, "engine.optimizer.lr=0.0011")
    different = {one["name"] for one in result["figures"] if one["recorded"] != one["now"]}
    assert "train/lr" in different
    (weights,) = (one for one in result["states"] if one["kind"] == "weights")
    assert weights["different"] > 0.9 * weights["numbers"]
    assert 0.05 < weights["change"] < 0.15, "the rate is a tenth higher"
    assert "although engine, machine and versions" in capsys.readouterr().out

    path = run / "rollouts" / "step-000004.parquet"
    table = pq.read_table(path)
    place = table["learned"].to_pylist().index(True)
    rewards = table["reward"].to_pylist()
    rewards[place] += 1.0
    at = table.schema.get_field_index("reward")
    pq.write_table(table.set_column(at, table.schema.field(at), [rewards]), path)
    tokens = {(one["name"], one["step"]): one for one in replayed(run, 4)["tokens"]}
    assert tokens["advantages", 4]["different"] > 0
    assert tokens["old_log_probs", 4]["different"] == 0
    assert tokens["advantages", 3]["different"] == 0
    assert "token " in tokens["advantages", 4]["where"]


@pytest.mark.slow
def test_a_replay_on_another_engine_differs_by_rounding(recorded):
    pytest.importorskip("engine_minimal", reason="the other engine is an example")
    tolerances = pytest.importorskip("engine_conformance.tolerances")
    folder, _ = recorded
    result = replayed(folder, 4, "engine.backend=minimal")
    assert result["surroundings"]["backend"] == ["fsdp2", "minimal"]
    assert not result["same_bits"]
    bound = tolerances.tolerance("log_probs").atol
    for one in result["tokens"]:
        assert one["largest"] <= (0.0 if one["name"] == "loss_mask" else bound), one
    figures = {one["name"]: one for one in result["figures"] if one["step"] == 3}
    norms = figures["train/grad_norm"]
    relative = abs(norms["now"] / norms["recorded"] - 1)
    assert relative <= tolerances.tolerance("ratio_grad_norm").rtol
    changes = {one["kind"]: one["change"] for one in result["states"]}
    assert changes["weights"] <= 1e-2
    assert changes["step"] == 0


@pytest.mark.slow
def test_a_replay_reads_no_data_and_overwrites_nothing(run, tmp_path, capsys):
    """Data may be gone; data of another name would be another run's."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "notes.txt").write_text("mine")
    command = ["replay", str(run), "--step", "3"]
    assert main([*command, f"run.output_dir={own}"]) == 2
    assert "files that are not of a replay" in capsys.readouterr().err
    assert main([*command, "data.source=/nowhere.jsonl"]) == 2
    assert "expected" in (text := capsys.readouterr().err) and "data.source" in text
    assert main([*command, f"run.output_dir={tmp_path / 'new'}"]) == 0
    assert main([*command, f"run.output_dir={tmp_path / 'new'}"]) == 0
    assert (own / "notes.txt").read_text() == "mine"
    assert main(["replay", str(run), "--step", "9"]) == 2
    assert "give a number from 1 to 4" in capsys.readouterr().err


@pytest.mark.slow
def test_a_replay_on_another_engine_says_all_that_must_be_overridden(run, capsys):
    """The configuration of a run on a GPU, whose settings the other engine does not have."""
    pytest.importorskip("engine_minimal", reason="the other engine is an example")
    config = yaml.safe_load((run / "config.yaml").read_text())
    kept = {"kept_activations": 0.5}
    config["engine"]["memory"] |= {"compile": True, "recompute": "full", **kept}
    config["engine"]["options"] = {"compile_mode": "max-autotune"}
    config["engine"]["precision"]["compute"] = "bfloat16"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    command = ["replay", str(run), "--step", "4", "engine.backend=minimal"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "minimal does not have all that the run's configuration asks for" in said
    overrides = said.split("add to the command: ")[1].split()
    assert set(overrides) == {
        "engine.memory.compile=false",
        "engine.memory.recompute=none",
        "engine.memory.kept_activations=0",
        "engine.precision.compute=float32",
        "engine.options={}",
    }
    assert main([*command, *overrides]) == 0
    result = json.loads((run / "replay" / "step-000004" / "replay.json").read_text())
    assert result["surroundings"]["backend"] == ["fsdp2", "minimal"]


def test_the_options_that_an_engine_has_stay_where_others_are_removed(sums_model, tmp_path):
    known = {"compile_mode": "max-autotune", "verify_model": False}
    given = tree(sums_model, tmp_path, engine={"options": {"checkpoint": "megatron", **known}})
    with pytest.raises(ConfigError) as caught:
        check_engine(from_tree(RLConfig, given))
    assert "it lacks the options checkpoint" in caught.value.why
    _, _, overrides = caught.value.remedy.partition("add to the command: ")
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(given))
    config = load_config(RLConfig, tmp_path / "rl.yaml", shlex.split(overrides))
    assert config.engine.options == known
    check_engine(config)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_replay_on_two_ranks_is_the_step_of_two_ranks(sums_model, tmp_path):
    """The critic's weights are compared, too; on one rank the sums have another order."""
    pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
    (tmp_path / "own.py").write_text("def mixed(s): return s.completion.count('7') / 4")
    config = tree(
        sums_model,
        tmp_path / "run",
        run={"steps": 3, "rollouts": "all", "save_every": 1, "keep": 0, "save_hf": False},
        reward={"name": None, "function": f"{tmp_path}/own.py:mixed"},
        algorithm={"prompts_per_step": 4, "advantage": "gae", "critic": {}, "mini_batches": 2},
    )
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(config))
    commands = [["rl", str(tmp_path / "rl.yaml")], ["replay", str(tmp_path / "run"), "--step", "3"]]
    said = run_on_two_ranks(tmp_path, commands)
    place = tmp_path / "run" / "replay" / "step-000003"
    result = json.loads((place / "replay.json").read_text())
    assert (result["same_bits"], result["surroundings"]) == (True, {}), said
    assert {one["engine"] for one in result["states"]} == {"policy", "critic"}
    alone = replayed(tmp_path / "run", 3)
    assert alone["surroundings"]["ranks"] == ["2", "1"]
    assert max(one["largest"] for one in alone["tokens"]) <= 1e-4

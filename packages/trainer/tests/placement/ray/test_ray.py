"""The loop on a Ray cluster.

It gives the same bits as without one, survives a worker's death, and refuses configurations before
anything starts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from ray_runs import local_cluster, on_ray, reshaped, result_of, start, tree
from waiting import DEADLINE_S, until

from engine_api.errors import ConfigError

ray = pytest.importorskip("ray", reason="the extra ray")
pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

from engine_trainer.placement.ray.calls import WorkerLost  # noqa: E402 - behind importorskip
from engine_trainer.rewards import RewardError  # noqa: E402
from engine_trainer.rl.on_ray import train_on_ray  # noqa: E402


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Path:
    """Return the file of faults, empty."""
    return tmp_path_factory.mktemp("faults") / "plan.json"


@pytest.fixture(scope="module", autouse=True)
def cluster(plan):
    with local_cluster(6, plan):
        yield


def test_workers_run_at_the_priority_of_the_run():
    assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0)


PPO = {"advantage": "gae", "critic": {"optimizer": {"lr": 0.003}}, "mini_batches": 2}


@pytest.fixture(scope="module")
def alone(sums_model, tmp_path_factory):
    """Return the folder of the GRPO run on two ranks of torchrun, without Ray."""
    return torchrun(sums_model, tmp_path_factory.mktemp("alone") / "out")


def torchrun(model: Path, out: Path, **sections):
    process = start(tree(model, out, **sections), out.parent / "run.yaml", ranks=2)
    text, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, text
    return result_of(out)


def fault(
    worker: str, method: str, nth: int = 1, when: str = "before", do: object = "kill"
) -> dict:
    return {"worker": worker, "method": method, "nth": nth, "when": when, "do": do}


def test_two_engine_ranks_on_ray_give_the_bits_of_torchrun(sums_model, tmp_path, alone):
    train_on_ray(on_ray(sums_model, tmp_path / "out", run={"profile_steps": [2]}))
    assert result_of(tmp_path / "out") == alone
    traces = {path.name for path in (tmp_path / "out" / "profile" / "step-000002").iterdir()}
    assert traces == {"engine-0.json.gz", "engine-1.json.gz"}
    row = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    for worker in ("engine-0", "engine-1"):
        assert row[f"worker/{worker}/train_s"] > 0
        assert row[f"worker/{worker}/generate_and_score_s"] > 0
        assert 0 <= row[f"worker/{worker}/idle"] <= 1
    assert row["time/generate"] > 0


@pytest.mark.nightly
def test_a_teachers_states_on_ray_give_the_bits_of_torchrun(sums_model, tmp_path):
    """Its documents are longer than the policy's, so that states move between the ranks."""
    small = reshaped(sums_model, tmp_path / "teacher", hidden_size=48)
    teacher = {"engine": {"model": {"path": str(small)}}, "prompt_template": "#{answer}#{prompt}"}
    sections = {"algorithm": {"teacher": teacher}, "run": {"steps": 2}}
    train_on_ray(on_ray(sums_model, tmp_path / "out", **sections))
    result = result_of(tmp_path / "out")
    assert result == torchrun(sums_model, tmp_path / "alone", **sections)
    assert all(row["train/teacher_kl"] > 0 for row in result[1] if "train/teacher_kl" in row)


@pytest.mark.nightly
def test_ppo_killed_between_policy_and_critic_ends_as_one_left_alone(sums_model, tmp_path, plan):
    sections = {"algorithm": PPO, "run": {"steps": 2}}
    train_on_ray(on_ray(sums_model, tmp_path / "alone", **sections))
    plan.write_text(
        json.dumps(
            [
                fault("engine-0", "infer"),
                fault("engine-1", "train", nth=3),
                fault("engine-0", "save", nth=2),
            ]
        )
    )
    train_on_ray(on_ray(sums_model, tmp_path / "out", **sections))
    assert json.loads(plan.read_text()) == []
    assert result_of(tmp_path / "out") == result_of(tmp_path / "alone")
    assert all(row["critic/updates"] == 2 for row in result_of(tmp_path / "out")[1])


@pytest.mark.nightly
def test_killed_in_each_phase_beside_the_engine_it_ends_as_one_left_alone(
    sums_model, tmp_path, plan, alone
):
    plan.write_text(
        json.dumps(
            [
                fault("engine-0", "generate_and_score", when="after"),
                fault("engine-1", "train"),
                fault("engine-0", "save", when="after"),
                fault("engine-1", "sync", nth=2),
            ]
        )
    )
    train_on_ray(on_ray(sums_model, tmp_path / "out", ray={"restarts": 5}))
    assert json.loads(plan.read_text()) == []
    assert result_of(tmp_path / "out") == alone


@pytest.mark.nightly
def test_killed_in_each_phase_apart_from_the_engine_it_ends_as_one_left_alone(
    sums_model, tmp_path, plan, alone
):
    plan.write_text(
        json.dumps(
            [
                fault("rollout-0", "generate_and_score"),
                fault("rollout-1", "receive", nth=2),
                fault("engine-0", "send", nth=2),
            ]
        )
    )
    train_on_ray(on_ray(sums_model, tmp_path / "out", ray={"rollouts": 2, "restarts": 3}))
    assert json.loads(plan.read_text()) == []
    assert result_of(tmp_path / "out") == alone


@pytest.mark.nightly
def test_a_worker_that_hangs_is_lost_within_the_deadline(sums_model, tmp_path, plan):
    plan.write_text(json.dumps([fault("engine-1", "generate_and_score", do="hang")]))
    # On a busy machine the calls before it, which import torch, take a minute and more.
    section = {"restarts": 0, "timeout_s": 240.0, "start_timeout_s": 300.0}
    lost = r"(?s)engine-1 \(generate_and_score\).*no response within 240 s"
    with pytest.raises(WorkerLost, match=lost):
        train_on_ray(on_ray(sums_model, tmp_path / "out", ray=section))
    until(lambda: ray.available_resources().get("CPU", 0) >= 6)  # Ray counts with a delay


def test_a_reward_that_raises_is_its_own_error_and_not_repeated(sums_model, tmp_path):
    with pytest.raises(RewardError, match="KeyError"):
        train_on_ray(on_ray(sums_model, tmp_path / "out", reward={"name": "broken"}))
    assert not list((tmp_path / "out").glob("checkpoints/*"))


def test_a_cluster_that_is_too_small_is_refused_with_what_is_missing(sums_model, tmp_path):
    with pytest.raises(
        ConfigError, match=r"(?s)5 CPU missing.*11 workers of 1 CPU each.*has 6 CPU"
    ):
        train_on_ray(on_ray(sums_model, tmp_path / "out", ray={"engines": 8, "rollouts": 3}))
    with pytest.raises(ConfigError, match=r"(?s)2 GPU missing.*has 6 CPU and 0 GPU"):
        train_on_ray(on_ray(sums_model, tmp_path / "out", engine={"device": "cuda"}))
    assert not (tmp_path / "out").exists()


def test_a_module_that_workers_cannot_import_is_named(sums_model, tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)ray.imports.*'nowhere' cannot be imported"):
        train_on_ray(on_ray(sums_model, tmp_path / "out", ray={"imports": ["nowhere"]}))

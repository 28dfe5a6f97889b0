"""Generation during training, with slices that continue after a sync.

The staleness of runs is bounded and reported.
"""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from ray_runs import Judge, Words, configure, local_cluster, on_ray, rows_of
from rollout_rows import rollouts_of

from engine_api.config import ModelSource
from engine_api.errors import ConfigError, RolloutError
from engine_api.registry import RolloutRegistry
from engine_api.rollout import SamplingParams
from engine_trainer.data import Prompt
from engine_trainer.placement.replica import Group, Replica, ScoredCompletion
from engine_trainer.rewards import Score
from engine_trainer.rl.experience import Experience, staleness_figures
from engine_trainer.rl.learner import Learner, _document
from engine_trainer.telemetry.logs import Timers

pytest.importorskip("ray", reason="the extra ray")
# Torch 2.13 renames a collective under FSDP.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

from engine_trainer.placement.ray.partial_rollouts import PartialRollouts  # noqa: E402 - behind importorskip


def replica_of(model) -> tuple[Replica, dict[str, torch.Tensor]]:
    from safetensors.torch import load_file

    rollout = RolloutRegistry.create(
        name="local",
        device="cpu",
        model=ModelSource(path=str(model)),
        pad_token_id=0,
        eos_token_ids=(1,),
    )
    weights = load_file(model / "model.safetensors")
    rollout.update_weights(iter(weights.items()), 0)
    return Replica(rollout, Judge(), Words(), Timers()), weights


def prompts(*tokens: list[int]) -> list[tuple[int, Prompt]]:
    return [
        (10 + i, Prompt(tokens=list(t), rendered="", text="", answer=None))
        for i, t in enumerate(tokens)
    ]


def run(
    continuing: PartialRollouts, new, between=lambda count: None, times=30
) -> dict[int, list[ScoredCompletion]]:
    found = dict(continuing.advance(new, seed=1))
    for count in range(1, times):
        between(count)
        found |= dict(continuing.advance([], seed=1 + count))
    return found


def test_a_rollout_that_only_ever_gives_nothing_is_no_endless_wait(sums_model):
    replica, _ = replica_of(sums_model)
    real = replica.rollout.generate

    def nothing(*asked):
        return [
            replace(c, tokens=[], log_probs=[], weight_versions=[], finish_reason="length")
            for c in real(*asked)
        ]

    replica.rollout.generate = nothing
    continuing = PartialRollouts(
        replica, SamplingParams(n=1, max_new_tokens=12, temperature=0.0), 3
    )
    with pytest.raises(RolloutError, match="100 slices without a token"):
        run(continuing, prompts([6, 2, 7, 3]), times=150)


@pytest.mark.parametrize("size", [1, 3, 5, 100])
def test_slices_add_up_to_what_one_generation_says(sums_model, size):
    replica, _ = replica_of(sums_model)
    sampling = SamplingParams(n=1, max_new_tokens=12, temperature=0.0)
    given = prompts([6, 2, 7, 3], [8, 2, 9, 3, 4], [10])
    whole = replica.rollout.generate([p.tokens for _, p in given], sampling)
    found = run(PartialRollouts(replica, sampling, size), given)
    assert {key: answers[0].tokens for key, answers in found.items()} == {
        10 + c.prompt_index: c.tokens for c in whole
    }
    for completion in whole:
        answer = found[10 + completion.prompt_index][0]
        assert answer.finished == (completion.finish_reason == "stop")
        torch.testing.assert_close(
            torch.tensor(answer.log_probs), torch.tensor(completion.log_probs), atol=1e-4, rtol=0
        )


def test_what_was_begun_goes_on_with_new_weights_and_each_token_says_which(sums_model):
    replica, weights = replica_of(sums_model)
    sampling = SamplingParams(n=3, max_new_tokens=9, temperature=1.0)
    found = run(
        PartialRollouts(replica, sampling, 2),
        prompts([6, 2, 7, 3], [8, 2, 9, 3]),
        lambda count: replica.rollout.update_weights(iter(weights.items()), count),
    )
    answers = [a for group in found.values() for a in group]
    assert len(answers) == 6
    for answer in answers:
        assert len(answer.tokens) == len(answer.log_probs) == len(answer.weight_versions) <= 9
        assert answer.weight_versions == [i // 2 for i in range(len(answer.tokens))]
        assert answer.finished or len(answer.tokens) == 9
    assert len({tuple(a.tokens) for a in answers}) > 3  # completions of one prompt differ


def completion(versions: list[int]) -> ScoredCompletion:
    return ScoredCompletion(
        tokens=[5] * len(versions),
        log_probs=[-1.0] * len(versions),
        text="",
        finished=True,
        score=Score(total=1.0, parts={}, correct=True),
        weight_versions=versions,
    )


def test_tokens_of_weights_that_are_too_old_carry_no_loss_and_are_counted():
    group = Group(
        prompt=prompts([6, 2])[0][1], completions=[completion([3, 4, 5]), completion([5, 5])]
    )
    figures = staleness_figures([group], version=6, oldest=5)
    assert figures == {
        "rollout/staleness": pytest.approx(8 / 5),
        "rollout/staleness_max": 3.0,
        "rollout/stale_tokens": 2.0,
        "rollout/continued": 0.5,
    }
    assert _document(0, 0, group, group.completions[0], False, 5).mask == [0, 0, 0, 0, 1]
    assert _document(0, 1, group, group.completions[1], False, 5).mask == [0, 0, 1, 1]


def test_what_a_tool_said_is_neither_stale_nor_fresh():
    """Put a tool's two tokens between turns of versions 3 and 6.

    They carry the version of the turn before.
    """
    said = replace(completion([3, 3, 3, 6]), loss_weights=[1.0, 0.0, 0.0, 1.0])
    # A tool's text comes before the model's first token, where the model failed.
    never = replace(completion([-1, -1]), loss_weights=[0.0, 0.0])
    figures = staleness_figures(
        [Group(prompt=prompts([6])[0][1], completions=[said, never])], version=6, oldest=5
    )
    assert figures == {
        "rollout/staleness": 1.5,
        "rollout/staleness_max": 3.0,
        "rollout/stale_tokens": 1.0,
        "rollout/continued": 0.5,
    }
    alone = staleness_figures(
        [Group(prompt=prompts([6])[0][1], completions=[never])], version=6, oldest=5
    )
    assert set(alone.values()) == {0.0}


def test_the_oldest_version_counts_updates(sums_model, tmp_path):
    algorithm = {"mini_batches": 2, "epochs": 3, "correction": {"weight": "token"}}
    config = on_ray(
        sums_model,
        tmp_path,
        ray={"rollouts": 1},
        overlap={"mode": "full", "max_staleness": 2},
        algorithm=algorithm,
    )
    here = SimpleNamespace(config=config, policy=SimpleNamespace(weight_version=20))
    assert Learner.oldest_version.fget(here) == 20 - 2 * 6
    here.config = configure(sums_model, tmp_path)
    assert Learner.oldest_version.fget(here) == -1


def test_the_state_of_a_step_names_what_is_under_way():
    assert Experience(groups=[], position=9, metrics={}).state == {"position": 9}
    assert Experience(groups=[], position=9, metrics={}, pending=[4, 7]).state == {
        "position": 9,
        "pending": [4, 7],
    }


def test_overlap_without_replicas_of_its_own_or_without_a_correction_is_refused(
    sums_model, tmp_path
):
    mode = {"mode": "one_step_off"}
    with pytest.raises(ConfigError, match=r"(?s)overlap.mode.*replicas of their own"):
        configure(sums_model, tmp_path, overlap=mode)
    with pytest.raises(ConfigError, match=r"(?s)overlap.mode.*replicas of their own"):
        on_ray(sums_model, tmp_path, overlap=mode)
    with pytest.raises(ConfigError, match=r"(?s)overlap.mode.*needs a correction"):
        on_ray(
            sums_model,
            tmp_path,
            ray={"rollouts": 1},
            overlap=mode,
            algorithm={"correction": {"weight": "none"}},
        )


# --- on a cluster -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Yield the file of faults, see ``ray_faults``."""
    plan = tmp_path_factory.mktemp("faults") / "plan.json"
    with local_cluster(4, plan):
        yield plan


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.nightly
def test_one_step_off_is_one_step_behind_and_reproducible(cluster, sums_model, tmp_path):
    from engine_trainer.rl.on_ray import train_on_ray

    sections = {
        "overlap": {"mode": "one_step_off"},
        "run": {"steps": 4},
        "eval": {"source": str(sums_model / "test.jsonl"), "every": 2},
    }
    for name in ("a", "b"):
        train_on_ray(
            on_ray(sums_model, tmp_path / name, ray={"engines": 1, "rollouts": 1}, **sections)
        )
    first = rows_of(tmp_path / "a")
    second = rows_of(tmp_path / "b")
    assert first == second
    # A step without a difference in rewards makes no version.
    behind = [0, *(r["train/updates"] for r in first[1:-1])]
    assert (
        [r["rollout/staleness"] for r in first[1:]]
        == [r["rollout/staleness_max"] for r in first[1:]]
        == behind
    )
    assert max(behind) == 1
    assert all(r["rollout/stale_tokens"] == 0 for r in first[1:])
    assert [r["step"] for r in first if "eval/accuracy" in r] == [0, 2, 4]
    kept = rollouts_of(tmp_path / "a")
    assert kept == rollouts_of(tmp_path / "b")
    # The version of a step's tokens is that of the step before.
    updates = [int(r["train/updates"]) for r in first[1:]]
    versions = [
        {v for r in kept if r["step"] == s for v in r["weight_versions"]} for s in (1, 2, 3, 4)
    ]
    assert versions == [{0}, {0}, {updates[0]}, {sum(updates[:2])}]


@pytest.mark.slow
@pytest.mark.distributed
def test_fully_asynchronous_staleness_is_bounded_and_a_death_loses_no_prompt(
    cluster, sums_model, tmp_path
):
    from engine_trainer.rl.on_ray import train_on_ray

    sections = {
        "overlap": {"mode": "full", "max_staleness": 1, "slice_tokens": 2},
        "rollout": {"max_new_tokens": 8, "batch_size": 16},
        "run": {"steps": 6, "save_every": 3, "rollouts": "all"},
    }
    out = tmp_path / "out"
    # After the checkpoint of step 3 its unfinished prompts are drawn again.
    cluster.write_text(
        json.dumps(
            [{"worker": "rollout-1", "method": "receive", "nth": 4, "when": "before", "do": "kill"}]
        )
    )
    train_on_ray(on_ray(sums_model, out, ray={"engines": 1, "rollouts": 2}, **sections))
    assert json.loads(cluster.read_text()) == []
    rows = rows_of(out)
    assert [r["step"] for r in rows] == list(range(1, 7))
    assert all(r["rollout/groups"] == 8 for r in rows)
    assert max(r["rollout/staleness_max"] for r in rows) >= 1
    manifest = json.loads((out / "checkpoints" / "step-000006" / "manifest.json").read_text())
    state = manifest["extra"]["loop"]
    dropped = sum(r["rollout/dropped_groups"] for r in rows)
    pending = state.get("pending", [])  # left out where nothing is under way
    assert state["position"] - len(pending) == 6 * 8 + dropped
    assert len(pending) <= 8  # a step ahead: what is begun by then is not too old when it is taken
    kept = rollouts_of(out)
    assert sum(r["learned"] for r in kept) == 6 * 8 * 4
    stale = sum(not m for r in kept if r["learned"] for m in r["loss_mask"])
    assert stale == sum(r["rollout/stale_tokens"] for r in rows)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.nightly
def test_it_learns_while_replicas_never_stop(cluster, sums_model, tmp_path):
    from engine_trainer.rl.on_ray import train_on_ray

    sections = {
        "overlap": {"mode": "full", "max_staleness": 2, "slice_tokens": 1},
        "run": {"steps": 40, "save_every": 0},
    }
    out = tmp_path / "out"
    train_on_ray(on_ray(sums_model, out, ray={"engines": 1, "rollouts": 1}, **sections))
    rows = rows_of(out)
    # A single sync comes in the middle of a completion by chance; if none of forty does, that is a
    # defect.
    assert any(r["rollout/continued"] > 0 for r in rows)
    assert any(len(set(r["weight_versions"])) > 1 for r in rollouts_of(out))
    rewards = [r["train/reward"] for r in rows]
    assert sum(rewards[:5]) / 5 < 0.1
    assert sum(rewards[-5:]) / 5 > 0.6

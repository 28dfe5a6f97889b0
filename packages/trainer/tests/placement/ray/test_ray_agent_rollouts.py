"""Conversations during training, with turns in slices that continue after a sync.

Tools block no other conversation; the last tests run on a cluster.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace

import pytest
import torch
from ray_runs import local_cluster, on_ray, rows_of
from waiting import until

from engine_api.config import ModelSource
from engine_api.errors import RolloutError
from engine_api.registry import RolloutRegistry
from engine_api.rollout import SamplingParams
from engine_trainer.agent import AgentError, AgentLoop
from engine_trainer.config.sections import AgentSection, DataSection
from engine_trainer.data import Prompt, load_tokenizer
from engine_trainer.placement.replica import Replica, ScoredCompletion
from engine_trainer.rewards import Score
from engine_trainer.telemetry.logs import Timers

pytest.importorskip("ray", reason="the extra ray")
# Torch 2.13 renames a collective under FSDP.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

from engine_trainer.placement.ray.agent_rollouts import AgentRollouts  # noqa: E402 - behind importorskip

AGENTS = """
import asyncio, pathlib, sys, time

async def ask_twice(episode):
    await episode.generate(max_new_tokens=5)
    await episode.generate("=", max_new_tokens=4)
    return episode.end()

def wait_to_go():
    while not pathlib.Path(__file__).with_name("go").exists():
        time.sleep(0.01)

async def slow_tool(episode):
    await episode.generate(max_new_tokens=2)
    if episode.prompt.text == "slow":
        await asyncio.to_thread(wait_to_go)
    await episode.generate("=", max_new_tokens=2)
    return episode.end()

async def hasty(episode):
    try:
        async with asyncio.timeout(0.05):
            await episode.generate(max_new_tokens=2)
    except TimeoutError:
        pass
    return episode.end()

async def fails(episode):
    await episode.generate(max_new_tokens=2)
    if episode.prompt.text == "wrong":
        raise KeyError("tool")
    return episode.end()

async def leaves(episode):
    sys.exit(3)

async def leaves_from_within(episode):  # a task of its own takes the event loop along
    async def away():
        sys.exit(3)
    if episode.prompt.text == "wrong":
        await asyncio.create_task(away())
    asyncio.create_task(away())
    await episode.generate(max_new_tokens=2)
    return episode.end()

async def interrupts(episode):
    raise KeyboardInterrupt

async def blocks(episode):
    wait_to_go()
    return episode.end()

async def endless(episode):
    while True:
        await asyncio.sleep(0.01)
"""


class Judge:
    def score(self, samples):
        return [Score(total=1.0, parts={}, correct=True) for _ in samples]

    def close(self):
        pass


@pytest.fixture
def replica_of(sums_model, tmp_path):
    from safetensors.torch import load_file

    (tmp_path / "own.py").write_text(AGENTS)
    made = []

    def make(name: str, **section) -> tuple[Replica, dict[str, torch.Tensor]]:
        source = ModelSource(path=str(sums_model))
        rollout = RolloutRegistry.create(
            name="local", device="cpu", model=source, pad_token_id=0, eos_token_ids=(1,)
        )
        weights = load_file(sums_model / "model.safetensors")
        rollout.update_weights(iter(weights.items()), 0)
        tokenizer = load_tokenizer(DataSection(source="unread"), source)
        agent = AgentLoop(AgentSection(function=f"{tmp_path}/own.py:{name}", **section), tokenizer)
        return Replica(rollout, Judge(), tokenizer, Timers(), agent), weights

    def conversing(name: str, size: int = 2, *, n: int = 1, temperature: float = 0.0, **section):
        replica, weights = make(name, **section)
        sampling = SamplingParams(n=n, max_new_tokens=12, temperature=temperature)
        made.append(AgentRollouts(replica, replica.agent, sampling, size))
        return made[-1], replica, weights

    yield conversing
    for one in made:
        one.close()
        one.close()


def prompts(*tokens: list[int], text: str = "") -> list[tuple[int, Prompt]]:
    return [
        (10 + i, Prompt(tokens=list(t), rendered="", text=text, answer=None))
        for i, t in enumerate(tokens)
    ]


def run(
    conversing: AgentRollouts, new, between=lambda count: None
) -> dict[int, list[ScoredCompletion]]:
    found = dict(conversing.advance(new, seed=1))
    for count in range(1, 200):
        if len(found) == len(new):
            return found
        between(count)
        found |= dict(conversing.advance([], seed=1 + count))
    raise AssertionError("it did not end")


GIVEN = [6, 2, 7, 3], [8, 2, 9, 3, 4], [10]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_slices_add_up_to_what_whole_turns_say(replica_of, size):
    conversing, replica, _ = replica_of("ask_twice", size)
    given = prompts(*GIVEN)
    whole = replica.generate_and_score(
        [p for _, p in given], SamplingParams(n=1, max_new_tokens=12, temperature=0.0)
    )
    found = run(conversing, given)
    for (key, _), (want,) in zip(given, whole, strict=True):
        (got,) = found[key]
        assert (got.tokens, got.loss_weights, got.text, got.finished) == (
            want.tokens,
            want.loss_weights,
            want.text,
            want.finished,
        )
        assert (got.figures, got.score) == (want.figures, want.score)
        torch.testing.assert_close(
            torch.tensor(got.log_probs), torch.tensor(want.log_probs), atol=1e-4, rtol=0
        )


def test_turns_go_on_with_new_weights_and_each_token_says_which(replica_of):
    conversing, replica, weights = replica_of("ask_twice", 2, n=3, temperature=1.0)
    # Every token carries the version of the weights of the slice that made it.
    made: list[tuple[int, int]] = []
    real = replica.rollout.generate

    def generate(asked, sampling):
        completions = real(asked, sampling)
        made.extend(
            (token, version)
            for c in completions
            for token, version in zip(c.tokens, c.weight_versions, strict=True)
        )
        return completions

    replica.rollout.generate = generate
    found = run(
        conversing,
        prompts(*GIVEN[:2]),
        lambda count: replica.rollout.update_weights(iter(weights.items()), count),
    )
    answers = [a for group in found.values() for a in group]
    assert len(answers) == 6
    for answer in answers:
        assert (
            len(answer.tokens)
            == len(answer.log_probs)
            == len(answer.weight_versions)
            == len(answer.loss_weights)
        )
        assert answer.weight_versions == sorted(answer.weight_versions)
        tool = answer.loss_weights.index(0.0)
        assert (
            answer.weight_versions[tool]
            == answer.weight_versions[tool - 1]
            < answer.weight_versions[-1]
        )
        assert answer.figures["turns"] == 2.0
    said = [
        pair
        for a in answers
        for *pair, w in zip(a.tokens, a.weight_versions, a.loss_weights, strict=True)
        if w
    ]
    assert sorted(map(tuple, said)) == sorted(made)
    assert len({tuple(a.tokens) for a in answers}) > 3  # conversations of one prompt differ


def test_a_tool_holds_neither_the_other_conversations_nor_a_sync(replica_of, tmp_path):
    conversing, replica, weights = replica_of("slow_tool", 2)
    slow = [(1, Prompt(tokens=[6], rendered="", text="slow", answer=None))]
    (quick,) = prompts([7])
    found: dict[int, list[ScoredCompletion]] = {}
    new = [*slow, quick]
    count = 0
    while 1 not in found:
        found |= dict(conversing.advance(new, count))  # it returns, though the tool does not
        new = []
        count = count + 1
        replica.rollout.update_weights(iter(weights.items()), count)
        if 10 in found and count > 2:
            (tmp_path / "go").touch()
    (answer,) = found[1]
    assert answer.weight_versions[-1] > answer.weight_versions[0] + 1


def test_no_more_conversations_run_than_there_are_places_for(replica_of):
    conversing, replica, _ = replica_of("ask_twice", 100, n=5, concurrency=2)
    sizes: list[int] = []
    real = replica.rollout.generate
    replica.rollout.generate = lambda asked, sampling: (
        sizes.append(len(asked)) or real(asked, sampling)
    )
    found = run(conversing, prompts(*GIVEN))
    assert [len(answers) for answers in found.values()] == [5, 5, 5]
    assert 1 <= max(sizes) <= 2


def test_a_turn_that_nobody_waits_for_any_more_is_dropped(replica_of):
    conversing, replica, _ = replica_of("hasty", 1)
    real = replica.rollout.generate
    replica.rollout.generate = lambda *asked: time.sleep(0.2) or real(*asked)
    ((_, (answer,)),) = run(conversing, prompts(*GIVEN[:1])).items()
    assert answer.tokens == []


def test_what_fails_is_counted_and_one_too_many_ends_it(replica_of):
    wrong = prompts(*GIVEN, text="wrong")
    conversing, _, _ = replica_of("fails", max_failures=3)
    found = run(conversing, wrong)
    assert [a.problem for (a,) in found.values()] == ["it raised KeyError: 'tool'"] * 3
    with pytest.raises(AgentError, match="failed trajectories: 4"):
        run(conversing, wrong[:1])


def test_a_function_that_exits_is_a_failure(replica_of):
    conversing, _, _ = replica_of("leaves")
    with pytest.raises(AgentError, match="raised SystemExit: 3"):
        run(conversing, prompts(*GIVEN))


def test_a_task_that_exits_holds_no_conversation(replica_of):
    conversing, _, _ = replica_of("leaves_from_within", timeout_s=None)
    assert [a.problem for (a,) in run(conversing, prompts(*GIVEN)).values()] == [""] * 3
    with pytest.raises(AgentError, match=r"(?s)raised SystemExit: 3.*'wrong'"):
        run(conversing, prompts(*GIVEN, text="wrong"))


def test_a_function_that_interrupts_is_named_with_its_problem(replica_of):
    conversing, _, _ = replica_of("interrupts", timeout_s=None)
    with pytest.raises(AgentError, match=r"(?s)raised KeyboardInterrupt.*'this one'"):
        run(conversing, prompts(*GIVEN, text="this one"))


def test_a_rollout_that_only_ever_gives_nothing_is_no_endless_wait(replica_of):
    conversing, replica, _ = replica_of("ask_twice")
    real = replica.rollout.generate

    def nothing(*asked):
        return [
            replace(c, tokens=[], log_probs=[], weight_versions=[], finish_reason="length")
            for c in real(*asked)
        ]

    replica.rollout.generate = nothing
    with pytest.raises(RolloutError, match="100 slices without a token"):
        run(conversing, prompts(*GIVEN))


def test_a_tool_that_holds_the_event_loop_is_named(replica_of, tmp_path):
    conversing, _, _ = replica_of("blocks", timeout_s=0.3)
    conversing.advance(prompts(*GIVEN), seed=1)
    with pytest.raises(
        AgentError, match=r"(?s)blocked all conversations for longer than 0.3 s.*to_thread"
    ):
        until(lambda: conversing.advance([], seed=1))
    (tmp_path / "go").touch()


def test_a_rollout_that_fails_is_raised(replica_of):
    conversing, replica, _ = replica_of("ask_twice")

    def gone(*_):
        raise RolloutError("gone", where="there", remedy="none")

    replica.rollout.generate = gone
    with pytest.raises(RolloutError, match="gone"):
        run(conversing, prompts(*GIVEN))


def test_closing_leaves_no_thread(replica_of):
    conversing, _, _ = replica_of("endless", n=4)
    before = threading.active_count()
    assert conversing.advance(prompts(*GIVEN), 1) == []
    conversing.close()
    assert threading.active_count() == before - 1


# --- on a cluster -------------------------------------------------------------------------------

OWN = """
import asyncio

async def add(episode):
    await episode.generate(max_new_tokens=4)
    await asyncio.sleep(0.01)
    await episode.generate("=", max_new_tokens=3)
    return episode.end()
"""


@pytest.fixture
def cluster(tmp_path):
    """Yield the file of faults, see ``ray_faults``."""
    plan = tmp_path / "plan.json"
    with local_cluster(4, plan):
        yield plan


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.distributed
def test_conversations_go_on_over_syncs_and_a_death_loses_none(
    cluster, sums_model, tmp_path, monkeypatch
):
    from engine_trainer.placement.ray.launcher import OnRay
    from engine_trainer.rl.on_ray import train_on_ray

    asked: list[list[str]] = []
    probe = OnRay.probe_rollout

    def ask(launcher, section, device):
        asked.append(probe(launcher, section, device))
        return asked[-1]

    monkeypatch.setattr(OnRay, "probe_rollout", ask)
    (tmp_path / "own.py").write_text(OWN)
    sections = {
        "overlap": {"mode": "full", "max_staleness": 1, "slice_tokens": 2},
        "agent": {"function": f"{tmp_path}/own.py:add"},
        "eval": {"source": str(sums_model / "test.jsonl"), "every": 3},
        "rollout": {"max_new_tokens": 8, "batch_size": 16},
        "run": {"steps": 6, "save_every": 3},
    }
    # After the checkpoint of step 3 its unfinished conversations are started again.
    cluster.write_text(
        json.dumps(
            [{"worker": "rollout-1", "method": "receive", "nth": 6, "when": "before", "do": "kill"}]
        )
    )
    out = tmp_path / "out"
    train_on_ray(on_ray(sums_model, out, ray={"engines": 1, "rollouts": 2}, **sections))
    assert json.loads(cluster.read_text()) == []
    assert asked == [["", ""]], "of the two replicas, and not again after the restart"
    rows = rows_of(out)
    assert [r["step"] for r in rows] == list(range(7))
    steps = rows[1:]
    assert all(r["rollout/groups"] == 8 and 1.0 < r["agent/turns"] <= 2.0 for r in steps)
    assert max(r["rollout/staleness_max"] for r in steps) >= 1
    assert [r["step"] for r in rows if "eval/accuracy" in r] == [0, 3, 6]
    state = json.loads((out / "checkpoints" / "step-000006" / "manifest.json").read_text())[
        "extra"
    ]["loop"]
    dropped = sum(r["rollout/dropped_groups"] for r in steps)
    pending = state.get("pending", [])  # left out where nothing is under way
    assert state["position"] - len(pending) == 6 * 8 + dropped
    assert len(pending) <= 2 * 8


@pytest.mark.slow
@pytest.mark.distributed
def test_it_learns_over_turns_while_replicas_never_stop(cluster, sums_model, tmp_path):
    from engine_trainer.rl.on_ray import train_on_ray

    (tmp_path / "own.py").write_text(
        OWN.replace("max_new_tokens=4", "max_new_tokens=2").replace("=3", "=2")
    )
    sections = {
        "overlap": {"mode": "full", "max_staleness": 2, "slice_tokens": 2},
        "agent": {"function": f"{tmp_path}/own.py:add"},
        "rollout": {"n": 8, "max_new_tokens": 8},
        "run": {"steps": 40, "save_every": 0},
    }
    out = tmp_path / "out"
    train_on_ray(on_ray(sums_model, out, ray={"engines": 1, "rollouts": 1}, **sections))
    rows = rows_of(out)
    # A single sync comes in the middle of a conversation by chance; if none of forty does, that is
    # a defect.
    assert any(r["rollout/continued"] > 0 for r in rows)
    rewards = [r["train/reward"] for r in rows]
    assert sum(rewards[:5]) / 5 < 0.2
    assert sum(rewards[-5:]) / 5 > 0.6

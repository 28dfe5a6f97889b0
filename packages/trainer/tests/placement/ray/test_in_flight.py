"""Replicas whose rollout takes weights while it generates, with a scripted rollout."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray_runs import on_ray

from engine_api.errors import ConfigError, RolloutError, UnsupportedCapability
from engine_api.registry import RolloutRegistry
from engine_api.rollout import Completion, SamplingParams, SyncResult
from engine_trainer.config.sections import AgentSection
from engine_trainer.data import Prompt
from engine_trainer.placement.replica import Replica, RolloutSpec, create_rollout_in_flight
from engine_trainer.rewards import Score
from engine_trainer.telemetry.logs import Timers

pytest.importorskip("ray", reason="the extra ray")

from engine_trainer.placement.ray import in_flight_rollouts
from engine_trainer.placement.ray.in_flight_rollouts import InFlightRollouts
from engine_trainer.placement.ray.workers import RolloutWorker

SAMPLING = SamplingParams(n=2, max_new_tokens=4)


class Running:
    """A generation that ends when it is told to."""

    def __init__(self, prompt, sampling: SamplingParams) -> None:
        self.prompt = list(prompt)
        self.sampling = sampling
        self.failure: RolloutError | None = None
        self.over = False

    def done(self) -> bool:
        return self.over

    def result(self, timeout_s=None):
        assert self.over
        if self.failure:
            raise self.failure
        return [
            Completion(
                prompt_index=0,
                tokens=[5, place],
                log_probs=[-1.0, -1.0],
                weight_versions=[1, 2],
                finish_reason="stop",
            )
            for place in range(self.sampling.n)
        ]


class Scripted:
    """A rollout whose generations are ended by the test, and whose syncs may fail."""

    weight_version = 0
    tokens_generated = 0

    def __init__(self) -> None:
        self.submitted: list[Running] = []
        self.fails = False

    def submit(self, prompt, sampling):
        self.submitted.append(Running(prompt, sampling))
        return self.submitted[-1]

    def update_weights(self, export, version):
        list(export)
        if self.fails:
            for one in self.submitted:
                if not one.over:
                    one.over, one.failure = True, RolloutError("lost", where="x", remedy="y")
            raise RolloutError("the sync failed", where="x", remedy="y")
        return SyncResult(version=version)


class Judge:
    def score(self, samples):
        return [Score(total=1.0, parts={}, correct=True) for _ in samples]


class Words:
    def decode(self, tokens):
        return " ".join(map(str, tokens))


class Wire:
    @contextmanager
    def receive(self, address, rank):
        yield iter(())


def prompts(*tokens: list[int]) -> list[tuple[int, Prompt]]:
    return [
        (10 + i, Prompt(tokens=list(t), rendered="", text="", answer=None))
        for i, t in enumerate(tokens)
    ]


@pytest.fixture
def rollout(monkeypatch) -> Scripted:
    monkeypatch.setattr(in_flight_rollouts, "WAIT_S", 0.01)
    return Scripted()


@pytest.fixture
def worker(rollout) -> RolloutWorker:
    made = RolloutWorker("rollout-0")
    made._replica = Replica(rollout, Judge(), Words(), Timers(), why_sliced=None)
    made._wire = Wire()
    made.continuing(SAMPLING, 64)
    assert isinstance(made._under_way, InFlightRollouts)
    return made


def test_groups_are_submitted_once_and_returned_as_they_end(worker, rollout):
    assert worker.advance(prompts([6], [7]), 1) == ([], 0)
    assert worker.advance([], 2) == ([], 0)
    assert [one.prompt for one in rollout.submitted] == [[6], [7]]
    rollout.submitted[1].over = True
    rollout.tokens_generated = 4
    ((key, completions),), tokens = worker.advance([], 3)
    assert tokens == 4
    assert key == 11
    assert [c.tokens for c in completions] == [[5, 0], [5, 1]]
    assert [c.weight_versions for c in completions] == [[1, 2], [1, 2]]
    rollout.submitted[0].over = True
    assert [key for key, _ in worker.advance([], 4)[0]] == [10]
    assert worker.advance([], 5) == ([], 4)


def test_equal_prompts_of_one_call_and_of_different_calls_have_different_seeds(worker, rollout):
    worker.advance(prompts([6], [6]), 1)
    worker.advance(prompts([6]), 2)
    assert len({one.sampling.seed for one in rollout.submitted}) == 3


def test_a_call_returns_as_soon_as_a_group_is_complete(worker, rollout, monkeypatch):
    monkeypatch.setattr(in_flight_rollouts, "WAIT_S", 1e9)
    threading.Timer(0.02, lambda: setattr(rollout.submitted[0], "over", True)).start()
    assert [key for key, _ in worker.advance(prompts([6]), 1)[0]] == [10]


def test_a_generation_that_fails_is_raised(worker, rollout):
    worker.advance(prompts([6]), 1)
    rollout.submitted[0].failure = RolloutError("vLLM failed", where="x", remedy="y")
    rollout.submitted[0].over = True
    with pytest.raises(RolloutError, match="vLLM failed"):
        worker.advance([], 2)


def test_a_rollout_that_forgets_a_completion_is_named(worker, rollout):
    worker.advance(prompts([6]), 1)
    real = rollout.submitted[0].result
    rollout.submitted[0].result = lambda: real()[1:]
    rollout.submitted[0].over = True
    with pytest.raises(RolloutError, match=r"expected 2 completions of prompt 0 .*, got 1"):
        worker.advance([], 2)


def test_groups_that_a_failed_sync_ends_are_begun_again_and_complete_ones_are_kept(worker, rollout):
    """Check the repetition of a sync in an elastic run, which fails where a replica is lost."""
    worker.advance(prompts([6], [7]), 1)
    rollout.submitted[0].over = True
    rollout.fails = True
    with pytest.raises(RolloutError, match="the sync failed"):
        worker.receive("here", 0, 1)
    rollout.fails = False
    worker.receive("here", 0, 1)
    assert [key for key, _ in worker.advance([], 2)[0]] == [10]
    assert [one.prompt for one in rollout.submitted] == [[6], [7], [7]]
    assert rollout.submitted[2].sampling == rollout.submitted[1].sampling
    rollout.submitted[2].failure = RolloutError("vLLM failed", where="x", remedy="y")
    rollout.submitted[2].over = True
    with pytest.raises(RolloutError, match="vLLM failed"):
        worker.advance([], 3)


# --- the choice --------------------------------------------------------------------------------


class Made:
    """A rollout that refuses ``in_flight`` with the option ``old``."""

    def __init__(self, *, in_flight: bool = False, old: bool = False, broken: bool = False, **_):
        if broken:
            raise UnsupportedCapability("router_replay", where="rollout 'made'", remedy="y")
        if in_flight and old:
            raise UnsupportedCapability(
                "in_flight", where="rollout 'made'", why="it is old", remedy="leave old out"
            )
        self.in_flight = in_flight


@pytest.fixture
def spec(tmp_path):
    """Build the spec of a rollout that declares ``in_flight`` or not."""
    for name, declares in (("made", True), ("plain", False)):
        RolloutRegistry.register(backend=name, device="cpu", in_flight=declares)(Made)

    def make(name="made", in_flight="auto", **options) -> RolloutSpec:
        config = on_ray(tmp_path, tmp_path, rollout={"name": name, "options": options})
        return RolloutSpec(
            section=config.rollout,
            reward=config.reward,
            tokenizer=SimpleNamespace(pad_token_id=0, stop_token_ids=()),
            engine=config.engine,
            engine_config=config.engine.build(seed=0, total_steps=1),
            engine_device="cpu",
            in_flight=in_flight,
        )

    yield make
    RolloutRegistry.unregister("made")
    RolloutRegistry.unregister("plain")


def test_a_rollout_that_declares_it_takes_weights_in_flight(spec):
    for in_flight in ("auto", True):
        rollout, why = create_rollout_in_flight(spec(in_flight=in_flight))
        assert (rollout.in_flight, why) == (True, None)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"name": "plain"}, "does not declare"),
        ({"old": True}, "rollout 'made': it is old"),
        ({"in_flight": False}, "overlap.in_flight is false"),
    ],
)
def test_other_rollouts_generate_slices_and_the_reason_is_given(spec, asked, why):
    rollout, said = create_rollout_in_flight(spec(**asked))
    assert not rollout.in_flight
    assert why in said


def test_turns_of_an_agent_are_generated_in_slices(spec):
    agent = AgentSection(function="agent.py:run")
    rollout, said = create_rollout_in_flight(replace(spec(), agent=agent))
    assert not rollout.in_flight
    assert "agent" in said


@pytest.mark.parametrize("asked", [{"name": "plain"}, {"old": True}])
def test_what_must_be_in_flight_and_cannot_is_refused(spec, asked):
    with pytest.raises(UnsupportedCapability) as caught:
        create_rollout_in_flight(spec(in_flight=True, **asked))
    assert caught.value.capability == "in_flight"


def test_another_refusal_is_not_taken_for_this_one(spec):
    with pytest.raises(UnsupportedCapability) as caught:
        create_rollout_in_flight(spec(broken=True))
    assert caught.value.capability == "router_replay"


@pytest.mark.parametrize(
    ("sections", "remedy"),
    [
        ({"overlap": {"in_flight": True}}, "overlap.mode: full"),
        (
            {
                "overlap": {"in_flight": True, "mode": "full"},
                "ray": {"rollouts": 1},
                "agent": {"function": "agent.py:run"},
            },
            "leave overlap.in_flight out",
        ),
    ],
)
def test_in_flight_that_would_have_no_effect_is_refused(tmp_path, sections, remedy):
    with pytest.raises(ConfigError) as caught:
        on_ray(tmp_path, tmp_path, **sections)
    assert caught.value.field == "overlap.in_flight"
    assert remedy in caught.value.remedy

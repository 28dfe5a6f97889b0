"""What fully asynchronous experience gives out: replicas whose every generation is scripted, and done at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace

import pytest
from ray_runs import on_ray

from engine_api.comm import SingleComm
from engine_trainer.data import Prompt
from engine_trainer.learner import Learner
from engine_trainer.logs import Timers
from engine_trainer.replica import Answer, Group
from engine_trainer.rewards import Score

pytest.importorskip("ray", reason="the extra ray")

from engine_trainer.ray.calls import Call, Reply
from engine_trainer.ray.rollouts import Separate
from engine_trainer.ray.stream import FullyAsync

STEP = 2  # groups


class Replica:
    """A pool of one.

    ``versions``: of the answers' tokens, by position; else those of the last sync. ``flat``: positions whose answers are
    all worth the same.
    """

    timeout_s = 5.0

    def __init__(self, versions: Mapping[int, Sequence[list[int]]], flat: Sequence[int]) -> None:
        self.versions, self.flat, self.serves = versions, flat, 0
        self.drawn: list[list[int]] = []  # positions, by slice

    def call_all(self, *_) -> None:
        pass

    def start(self, _replica, method, new, _seed) -> Call:
        self.drawn.append([position for position, _ in new])
        found = [(position, self._answers(position)) for position, _ in new]
        return Call(ref=found, worker="rollout-0", method=method)

    def finish(self, calls) -> list[Reply]:
        return [Reply(value=call.ref, seconds=0.0) for call in calls]

    def _answers(self, position: int) -> list[Answer]:
        return [Answer(tokens=[5] * len(made), log_probs=[-1.0] * len(made), text="", finished=True, weight_versions=made,
                       score=Score(total=0.0 if position in self.flat else float(place), parts={}, correct=False))
                for place, made in enumerate(self.versions.get(position, [[self.serves], [self.serves]]))]  # fmt: skip


@pytest.fixture
def stream(tmp_path, monkeypatch):
    """Makes a stream over prompts whose one token is their position, at a policy of some version, and its replica."""
    monkeypatch.setattr("engine_trainer.ray.stream.first", lambda calls, _: list(calls))
    made: list[FullyAsync] = []

    def make(max_staleness=1, versions=None, flat=(), version=0, position=0, pending=(), **sections):
        algorithm = {"prompts_per_step": STEP, **sections.pop("algorithm", {})}
        config = on_ray(tmp_path, tmp_path, ray={"rollouts": 1}, overlap={"mode": "full", "max_staleness": max_staleness},
                        algorithm=algorithm, **sections)  # fmt: skip
        replica, policy = Replica(versions or {}, flat), SimpleNamespace(weight_version=version)
        rollouts = object.__new__(Separate)
        rollouts.pool, rollouts.held = replica, range(1)
        sampler = SimpleNamespace(rollouts=rollouts, timers=Timers(), sampling=lambda **_: None, policy=policy,
                                  sync=lambda: setattr(replica, "serves", policy.weight_version))  # fmt: skip
        data = [Prompt(tokens=[i], rendered="", text="", answer=None) for i in range(100)]
        made.append(FullyAsync(sampler, data, range(100), config, position=position, pending=pending,
                               oldest=lambda: policy.weight_version - max_staleness))  # fmt: skip
        return made[-1], policy, replica

    yield make
    for one in made:
        one.close()


def positions(groups: Sequence[Group]) -> list[int]:
    return [group.prompt.tokens[0] for group in groups]


def until_idle(one: FullyAsync) -> None:
    """Until the replica has done all that it may, as while a long step is trained on."""
    with one._changed:
        assert one._changed.wait_for(lambda: not one._has_work(), timeout=10)


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_replicas_that_are_faster_than_the_training_generate_nothing_that_is_too_old(stream, bound):
    one, policy, replica = stream(bound)
    taken = []
    for step in range(1, 9):
        experience = one.take(step)
        assert experience.metrics["rollout/dropped_groups"] == experience.metrics["rollout/stale_tokens"] == 0
        assert experience.metrics["rollout/staleness_max"] == min(step - 1, bound)
        taken += positions(experience.groups)
        until_idle(one)
        assert sum(map(len, replica.drawn)) == STEP * (step + bound)
        policy.weight_version += 1
    assert taken == list(range(8 * STEP))


def test_a_group_without_a_fresh_token_is_dropped_and_counted(stream):
    versions = {0: [[3, 4], [4]], 1: [[3, 4, 5], [4, 4]], 2: [[5], [6]]}  # from 5 on they are fresh
    one, _, _ = stream(versions=versions, version=6)
    first, second = one.take(1), one.take(2)
    assert (positions(first.groups), positions(second.groups)) == ([1, 2], [3, 4])
    assert [e.metrics["rollout/dropped_groups"] for e in (first, second)] == [1, 0]
    assert first.metrics["rollout/stale_tokens"] == 4
    for given, experience in ((3, first), (5, second)):  # what is neither given out nor dropped is under way
        assert experience.pending == list(range(given, experience.position))


def test_what_was_under_way_is_drawn_first_and_named_until_it_is_given_out(stream):
    """Two groups may be begun ahead, one at a time: of the six of the state the last two are still to be drawn then."""
    one, _, replica = stream(position=12, pending=(1, 3, 5, 7, 8, 9), rollout={"batch_size": 4})
    experience = one.take(1)
    assert (positions(experience.groups), experience.pending) == ([1, 3], [5, 7, 8, 9])
    assert experience.state == {"position": 12, "pending": [5, 7, 8, 9]}
    assert [positions(one.take(step).groups) for step in (2, 3, 4)] == [[5, 7], [8, 9], [12, 13]]
    assert all(len(drawn) == 1 for drawn in replica.drawn)


def test_groups_that_dynamic_sampling_refuses_are_drawn_anew_but_not_once_it_gives_up(stream):
    dynamic = {"dynamic_sampling": {"enabled": True, "max_rounds": 2}}
    one, policy, replica = stream(flat=(0, 1, 2, 5), algorithm=dynamic)
    first = one.take(1)
    until_idle(one)
    assert (positions(first.groups), first.metrics["rollout/uninformative_groups"]) == ([3], 0.75)
    assert sum(map(len, replica.drawn)) == 4 + STEP  # not the one that the step lacks
    policy.weight_version += 1
    second = one.take(2)
    assert (positions(second.groups), second.metrics["rollout/dropped_groups"]) == ([4, 6], 0)


def test_whatever_ends_the_thread_that_generates_is_raised_where_groups_are_waited_for(stream):
    def broken(*_):
        raise RuntimeError("nobody's error")

    one, _, replica = stream()
    replica.start = broken
    with pytest.raises(RuntimeError, match="nobody's error"):
        one.take(1)


def test_no_token_is_trained_on_that_is_older_than_the_bound(sums_model, tmp_path):
    """Two updates a step and one step behind: of a policy of version 7 all from version 5 on."""
    trained = []

    class Done(Exception):
        pass

    def train(shares, *_, **__):
        trained.extend(shares)
        raise Done

    config = on_ray(sums_model, tmp_path, ray={"rollouts": 1}, overlap={"mode": "full", "max_staleness": 1},
                    algorithm={"epochs": 2, "old_log_probs": "rollout", "correction": {"weight": "none"}})  # fmt: skip
    policy = SimpleNamespace(weight_version=7, dp_size=1, held=(0,), train=train)
    answers = [Answer(tokens=[5] * len(made), log_probs=[-1.0] * len(made), text="", finished=True, weight_versions=made,
                      score=Score(total=float(len(made)), parts={}, correct=False))
               for made in ([3, 4, 5, 7], [5, 6], [4, 4, 4])]  # fmt: skip
    group = Group(prompt=Prompt(tokens=[6, 2], rendered="", text="", answer=None), answers=answers)
    with pytest.raises(Done):
        Learner(SimpleNamespace(policy=policy, timers=Timers(), comm=SingleComm()), config).learn([group])
    (share,) = trained
    counted = [share.loss_weight[a:b].tolist() for a, b in pairwise(share.cu_seqlens.tolist())]
    assert sorted(counted) == [[0, 0, 0, 0, 1, 1], [0, 0, 1, 1]]  # of the third no token counts: it is left out

"""Fully asynchronous experience, with replicas whose generations are scripted and immediate."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from ray_runs import on_ray
from waiting import DEADLINE_S, NEVER_S

from engine_api.comm import SingleComm
from engine_trainer.data import Prompt
from engine_trainer.placement.replica import Group, ScoredCompletion
from engine_trainer.rewards import Score
from engine_trainer.rl.learner import Learner
from engine_trainer.telemetry.logs import Timers

pytest.importorskip("ray", reason="the extra ray")

from engine_trainer.placement.ray.calls import Call, Reply, WorkerFailed, WorkerLost
from engine_trainer.placement.ray.rollouts import SeparateRollouts
from engine_trainer.rl.fully_async import FullyAsync

STEP = 2  # groups


class Losing(SeparateRollouts):
    """Replicas of an elastic run, whose work in ``dying`` ends them."""

    elastic = True

    def __init__(self, pool, size: int) -> None:
        self.pool = pool
        self.alive = list(range(size))
        self.dying: set[int] = set()
        self.admitted = 0

    def serving(self) -> list[int]:
        return list(self.alive)

    def admit(self) -> None:
        """Let a new replica join where none is left."""
        if not self.alive:
            self.admitted += 1
            self.alive = [10 + self.admitted]

    def reply(self, replica, call):
        if replica in self.dying:
            self.alive.remove(replica)
            return None
        return super().reply(replica, call)

    def check_attempts(self, attempts: int) -> None:
        if attempts > 2:
            raise WorkerLost("the same group again", where="here", remedy="none")


class Replicas:
    """A pool, of one unless more are ``held`` by the rollouts.

    ``versions`` are those of the completions' tokens, by position, and by default those of the last
    sync. ``flat`` are positions whose completions all have the same reward. Replicas in ``slow`` do
    not end their slices.
    """

    timeout_s = NEVER_S

    def __init__(self, versions: Mapping[int, Sequence[list[int]]], flat: Sequence[int]) -> None:
        self.versions, self.flat, self.serves = versions, flat, 0
        self.drawn: list[list[int]] = []  # positions, by slice
        self.by_replica: dict[int, int] = {}  # groups
        self.slow: set[int] = set()

    def call_all(self, *_) -> None:
        pass

    def start(self, replica, method, new, _seed) -> Call:
        self.drawn.append([position for position, _ in new])
        self.by_replica[replica] = self.by_replica.get(replica, 0) + len(new)
        found = [(position, self._answers(position)) for position, _ in new]
        return Call(ref=found, worker=f"rollout-{replica}", method=method)

    def ready(self, calls, seconds) -> list[Call]:
        done = [
            call for call in calls if int(call.worker.removeprefix("rollout-")) not in self.slow
        ]
        time.sleep(0 if done else min(seconds, 0.02))
        return done

    def finish(self, calls) -> list[Reply]:
        return [Reply(value=(call.ref, 0), seconds=0.0) for call in calls]

    def _answers(self, position: int) -> list[ScoredCompletion]:
        return [
            ScoredCompletion(
                tokens=[5] * len(made),
                log_probs=[-1.0] * len(made),
                text="",
                finished=True,
                weight_versions=made,
                score=Score(
                    total=0.0 if position in self.flat else float(place), parts={}, correct=False
                ),
            )
            for place, made in enumerate(
                self.versions.get(position, [[self.serves], [self.serves]])
            )
        ]


@pytest.fixture
def stream(tmp_path, monkeypatch):
    """Build a stream and its replicas, at a policy of some version.

    The only token of a prompt is its position.
    """
    made: list[FullyAsync] = []

    def make(
        max_staleness=1,
        versions=None,
        flat=(),
        version=0,
        position=0,
        pending=(),
        replicas=1,
        elastic=False,
        in_flight=False,
        **sections,
    ):
        algorithm = {"prompts_per_step": STEP, **sections.pop("algorithm", {})}
        config = on_ray(
            tmp_path,
            tmp_path,
            ray={"rollouts": 1},
            overlap={"mode": "full", "max_staleness": max_staleness},
            algorithm=algorithm,
            **sections,
        )
        replica, policy = Replicas(versions or {}, flat), SimpleNamespace(weight_version=version)
        monkeypatch.setattr("engine_trainer.rl.fully_async.ready", replica.ready)
        rollouts = object.__new__(SeparateRollouts)
        rollouts.pool, rollouts.local_replicas = replica, range(replicas)
        if elastic:
            rollouts = Losing(replica, replicas)
        rollouts.in_flight = in_flight
        sampler = SimpleNamespace(
            rollouts=rollouts,
            timers=Timers(),
            sampling=lambda **_: None,
            policy=policy,
            sync=lambda: setattr(replica, "serves", policy.weight_version),
        )
        data = [Prompt(tokens=[i], rendered="", text="", answer=None) for i in range(100)]
        made.append(
            FullyAsync(
                sampler,
                data,
                range(100),
                config,
                position=position,
                pending=pending,
                oldest=lambda: policy.weight_version - max_staleness,
            )
        )
        return made[-1], policy, replica

    yield make
    for one in made:
        one.close()


def positions(groups: Sequence[Group]) -> list[int]:
    return [group.prompt.tokens[0] for group in groups]


def until_idle(one: FullyAsync) -> None:
    """Until the replica has done all that it may, as while a long step is trained on."""
    with one._changed:
        assert one._changed.wait_for(lambda: not one._has_work(), timeout=DEADLINE_S)


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_replicas_that_are_faster_than_the_training_generate_nothing_that_is_too_old(stream, bound):
    one, policy, replica = stream(bound)
    taken = []
    for step in range(1, 9):
        experience = one.take(step)
        assert (
            experience.metrics["rollout/dropped_groups"]
            == experience.metrics["rollout/stale_tokens"]
            == 0
        )
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
    # Positions that are neither returned nor dropped are pending.
    for given, experience in ((3, first), (5, second)):
        assert experience.pending == list(range(given, experience.position))


def test_what_was_under_way_is_drawn_first_and_named_until_it_is_given_out(stream):
    """Begin two groups ahead, one at a time.

    The last two of the state's six groups are still to be drawn then.
    """
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


@pytest.mark.parametrize("ends", [SystemExit(0), KeyboardInterrupt()])
def test_an_exit_in_the_thread_that_generates_ends_the_run_as_an_error(stream, ends):
    def leaves(*_):
        raise ends

    one, _, replica = stream()
    replica.start = leaves
    with pytest.raises(WorkerFailed, match=f"generation ended by {type(ends).__name__}"):
        one.take(1)


def test_groups_without_any_token_of_the_model_are_taken_not_drawn_anew_for_ever(stream):
    one, _, _ = stream(versions={position: [[], []] for position in range(100)}, version=6)
    experience = one.take(1)
    assert positions(experience.groups) == [0, 1]
    assert (
        experience.metrics["rollout/dropped_groups"] == experience.metrics["rollout/staleness"] == 0
    )


def test_replicas_share_what_may_be_begun(stream):
    """Four groups of the first step and the one ahead; one replica has places for all of them."""
    one, policy, replica = stream(replicas=2)
    one.take(1)
    until_idle(one)
    assert replica.by_replica == {0: 2, 1: 2}
    for step in range(2, 6):
        policy.weight_version += 1
        one.take(step)
        until_idle(one)
    assert abs(replica.by_replica[0] - replica.by_replica[1]) <= 1


def test_an_idle_replica_begins_while_anothers_slice_runs(stream):
    """Draw other groups for a replica whose groups teach nothing, whatever the second one does."""
    dynamic = {"dynamic_sampling": {"enabled": True, "max_rounds": 3}}
    one, _, replica = stream(flat=(0, 1), replicas=2, algorithm=dynamic)
    replica.slow.add(1)
    assert positions(one.take(1).groups) == [4, 5]
    replica.slow.clear()


def test_a_replica_that_hangs_is_lost_though_others_go_on(stream):
    one, _, replica = stream(replicas=2)
    replica.timeout_s = 0.5
    replica.slow.add(1)
    real = replica.start

    def unfinished(*given) -> Call:
        time.sleep(0.02)
        return replace(real(*given), ref=[])

    replica.start = unfinished
    with pytest.raises(WorkerLost, match=r"rollout-1 \(advance\)"):
        one.take(1)


def test_the_groups_of_a_lost_replica_go_to_the_others_before_any_new_one(stream):
    one, policy, replica = stream(replicas=2, elastic=True)
    one._rollouts.dying = {1}
    taken = []
    for step in range(1, 5):
        taken += positions(one.take(step).groups)
        policy.weight_version += 1
    assert sorted(taken) == list(range(4 * STEP))
    # The two replicas have a half each of what may be begun at first.
    assert sorted(p for drawn in replica.drawn[:3] for p in drawn) == [0, 1, 2, 2, 3, 3]


def test_where_no_replica_is_left_a_new_one_joins_while_groups_are_waited_for(stream):
    one, _, _ = stream(elastic=True)
    one._rollouts.dying = {0}
    assert positions(one.take(1).groups) == [0, 1]
    assert one._rollouts.admitted == 1


def test_a_group_that_ends_one_replica_after_the_other_ends_the_run(stream):
    one, _, _ = stream(elastic=True)
    one._rollouts.dying = set(range(100))
    with pytest.raises(WorkerLost, match="the same group again"):
        one.take(1)


def test_a_group_goes_to_the_replica_with_the_fewest_tokens_left(stream):
    one, _, _ = stream(replicas=2, rollout={"max_new_tokens": 100})
    with one._changed:
        one._wanted = 1
        # Slices have 64 tokens.
        one._under_way = {0: {90: 0}, 1: {91: 1}}
        one._drawn = {90, 91}
        given = one._draw([0, 1], running=())
    assert {replica: len(new) for replica, new in given.items()} == {0: 0, 1: 1}


def test_without_slices_a_group_goes_to_the_replica_with_the_fewest_groups(stream):
    one, _, _ = stream(replicas=2, in_flight=True, rollout={"max_new_tokens": 100})
    with one._changed:
        one._wanted = 1
        # The calls in which groups were waited for say nothing of their tokens.
        one._under_way = {0: {90: 900, 91: 900}, 1: {92: 0}}
        one._drawn = {90, 91, 92}
        given = one._draw([0, 1], running=())
    assert {replica: len(new) for replica, new in given.items()} == {0: 0, 1: 0}
    with one._changed:
        one._wanted = 2
        given = one._draw([0, 1], running=())
    assert {replica: len(new) for replica, new in given.items()} == {0: 0, 1: 1}


def test_without_slices_a_replica_that_generates_no_token_is_lost(stream):
    one, _, replica = stream(in_flight=True)
    replica.timeout_s = 0.5
    replica.start = lambda number, method, *_: Call(
        ref=[], worker=f"rollout-{number}", method=method
    )
    replica.finish = lambda calls: [Reply(value=(call.ref, 7), seconds=0.2) for call in calls]
    with pytest.raises(WorkerLost, match=r"no token was generated in 0\.5 s"):
        one.take(1)


def test_without_slices_a_group_may_take_as_long_as_tokens_come(stream):
    one, _, replica = stream(in_flight=True)
    replica.timeout_s = 0.5
    real = replica.start
    calls = count()

    def start(number, *given) -> Call:
        call = real(number, *given)
        held.extend(call.ref)
        # Far beyond the time within which a token must come.
        ready = held[:] if next(calls) == 20 else []
        return replace(call, ref=ready)

    held: list[Any] = []
    replica.start = start
    replica.finish = lambda calls: [
        Reply(value=(call.ref, next(tokens)), seconds=0.2) for call in calls
    ]
    tokens = count()
    assert positions(one.take(1).groups) == [0, 1]


def test_without_slices_the_groups_of_a_replica_that_hangs_go_to_the_others(stream):
    one, _, replica = stream(replicas=2, elastic=True, in_flight=True)
    replica.timeout_s = 0.5
    real = replica.start

    def start(number, *given) -> Call:
        call = real(number, *given)
        return replace(call, ref=[]) if number == 1 else call

    replica.start = start
    replica.finish = lambda calls: [Reply(value=(call.ref, 0), seconds=0.2) for call in calls]
    one._rollouts.lose = lambda number, _: one._rollouts.alive.remove(number)
    taken: set[int] = set()
    for step in range(1, 50):
        taken |= set(positions(one.take(step).groups))
        if {2, 3} <= taken:
            break
    assert {0, 1, 2, 3} <= taken


def test_no_token_is_trained_on_that_is_older_than_the_bound(sums_model, tmp_path):
    """Two updates a step and one step behind: of a policy of version 7 all from version 5 on."""
    trained = []

    class Done(Exception):
        pass

    def train(shards, *_, **__):
        trained.extend(shards)
        raise Done

    config = on_ray(
        sums_model,
        tmp_path,
        ray={"rollouts": 1},
        overlap={"mode": "full", "max_staleness": 1},
        algorithm={"epochs": 2, "old_log_probs": "rollout", "correction": {"weight": "none"}},
    )
    policy = SimpleNamespace(weight_version=7, dp_size=1, local_dp_ranks=(0,), train=train)
    answers = [
        ScoredCompletion(
            tokens=[5] * len(made),
            log_probs=[-1.0] * len(made),
            text="",
            finished=True,
            weight_versions=made,
            score=Score(total=float(len(made)), parts={}, correct=False),
        )
        for made in ([3, 4, 5, 7], [5, 6], [4, 4, 4])
    ]
    group = Group(
        prompt=Prompt(tokens=[6, 2], rendered="", text="", answer=None), completions=answers
    )
    with pytest.raises(Done):
        Learner(SimpleNamespace(policy=policy, timers=Timers(), comm=SingleComm()), config).learn(
            [group]
        )
    (shard,) = trained
    counted = [shard.loss_weight[a:b].tolist() for a, b in pairwise(shard.cu_seqlens.tolist())]
    # No token of the third counts, so it is left out.
    assert sorted(counted) == [[0, 0, 0, 0, 1, 1], [0, 0, 1, 1]]

"""The places of an elastic run's replicas, with processes that are scripted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from waiting import DEADLINE_S, NEVER_S, until

from engine_trainer.config.sections import RaySection

pytest.importorskip("ray", reason="the extra ray")

from engine_trainer.placement.ray import replicas
from engine_trainer.placement.ray.calls import Pool, Reply, WorkerFailed, WorkerLost
from engine_trainer.placement.ray.meter import Meter
from engine_trainer.placement.ray.replicas import Replicas, ReplicasLost, Starter, State


class Process:
    """An actor whose calls succeed, fail with an error of ``outcomes`` or (``...``) never end."""

    def __init__(self, name: str, outcomes: dict[str, object]) -> None:
        self.name = name
        self.outcomes = outcomes
        self.call = SimpleNamespace(remote=self._start)

    def _start(self, method: str, *_: object) -> tuple[Process, str]:
        return self, method

    def outcome(self, method: str) -> object:
        return self.outcomes.get(method)


def is_done(call) -> bool:
    process, method = call.ref
    return process.outcome(method) is not ...


def finish(calls, *_: object) -> list[Reply]:
    for call in calls:
        process, method = call.ref
        if (error := process.outcome(method)) is not None:
            raise error
    return [Reply(value=None, seconds=0.0) for _ in calls]


@pytest.fixture
def places(monkeypatch):
    """Build the places of two replicas, whose successors have the given outcomes in turn."""
    monkeypatch.setattr(replicas, "ready", lambda calls, _: [c for c in calls if is_done(c)])
    monkeypatch.setattr(replicas, "finish", finish)
    monkeypatch.setattr(replicas.cluster, "kill", lambda _: None)
    made: list[Replicas] = []

    def make(*successors: dict[str, object], **section) -> Replicas:
        left = list(successors)
        pool = Pool("rollout", [Process("first", {}), Process("second", {})], NEVER_S, Meter())
        pool.finish = finish
        starter = Starter(
            actor=lambda rank: Process(f"successor of {rank}", left.pop(0) if left else {}),
            setup=lambda rank: (),
        )
        given = {"timeout_s": NEVER_S, "start_timeout_s": NEVER_S} | section
        made.append(Replicas(pool, starter, RaySection(rollouts=2, elastic=True, **given)))
        made[-1].note_weights(made[-1].members(State.BUILT))
        return made[-1]

    yield make
    for one in made:
        one.close()


DIED = WorkerLost("the worker died", where="rollout")


def wait_for(places: Replicas, state: State, count: int) -> None:
    with places.changed:
        assert places.changed.wait_for(
            lambda: len(places.members(state)) == count, timeout=DEADLINE_S
        )


def lose_all(places: Replicas) -> None:
    for member in places.members(State.SERVING):
        places.lose(member.key, DIED)


def test_a_successor_serves_once_it_has_weights_and_figures_say_how_long_it_took(places):
    one = places()
    first, second = one.members(State.SERVING)
    one.lose(second.key, DIED)
    one.lose(second.key, DIED)  # another call of the same process
    assert one.members(State.SERVING) == [first]
    wait_for(one, State.BUILT, 1)
    assert one.figures() == {"replicas/serving": 1.0, "replicas/lost": 1.0}
    one.note_weights(one.members(State.BUILT))
    figures = one.figures()
    assert figures.pop("replicas/rejoin_s") > 0
    assert figures == {"replicas/serving": 2.0, "replicas/lost": 0.0}


def test_a_process_that_ends_while_idle_is_replaced(places):
    one = places()
    member = one.members(State.SERVING)[0]
    member.actor.outcomes["ping"] = DIED
    until(lambda: member not in one.members(State.SERVING))
    wait_for(one, State.BUILT, 1)


def test_a_start_that_fails_is_tried_again_and_then_given_up(places):
    broken = WorkerFailed("no memory", where="rollout-0")
    one = places({"make_rollout": broken}, {"setup": broken}, restarts=2)
    one.lose(one.members(State.SERVING)[0].key, DIED)
    wait_for(one, State.GIVEN_UP, 1)
    one.require_some()
    one.lose(one.members(State.SERVING)[0].key, DIED)
    wait_for(one, State.BUILT, 1)


def test_losses_count_from_the_last_call_that_succeeded(places):
    one = places(restarts=1)
    for _ in range(3):
        key = one.members(State.SERVING)[0].key
        one.note_success(key)
        one.lose(key, DIED)
        wait_for(one, State.BUILT, 1)
        one.note_weights(one.members(State.BUILT))
    one.lose(one.members(State.SERVING)[0].key, DIED)
    wait_for(one, State.GIVEN_UP, 1)


def test_where_none_is_left_and_none_starts_in_time_the_cause_is_said(places):
    one = places({"setup": ...}, {"setup": ...}, start_timeout_s=0.2)
    lose_all(one)
    one.require_some()
    wait_for(one, State.GIVEN_UP, 2)
    with pytest.raises(ReplicasLost, match=r"(?s)no replica is left.*no response within 0.2 s"):
        one.require_some()


def test_a_start_without_room_goes_on_while_others_serve(places):
    one = places(*[{"setup": ...}] * 3, restarts=1, start_timeout_s=0.2)
    one.lose(one.members(State.SERVING)[0].key, DIED)
    wait_for(one, State.BUILT, 1)
    assert not one.members(State.GIVEN_UP)

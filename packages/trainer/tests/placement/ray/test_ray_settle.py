"""Calls of a sync of which some fail, on a clock and with calls that are scripted."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from engine_api.errors import PeerError, RolloutError

pytest.importorskip("ray", reason="the extra ray")

from ray.exceptions import ActorDiedError, RayTaskError

from engine_trainer.placement.ray import calls, elastic
from engine_trainer.placement.ray.calls import (
    Call,
    Reply,
    WorkerLost,
    WorkerSilent,
    choose,
    require_running,
    settle,
)

OK = Reply(value=None, seconds=0.0)
REFUSED = RolloutError("it does not fit", where="rollout-1")


def raised(error: Exception) -> RayTaskError:
    return RayTaskError("call", "a traceback", error)


@dataclass(frozen=True, eq=False)
class Ref:
    """A call's result, which is there from ``at`` on."""

    at: float
    outcome: object


@pytest.fixture
def script(monkeypatch):
    """Return a function that makes calls that end at a time with a reply or an error."""
    now = [0.0]

    def wait(refs, timeout, num_returns=1):
        done = [ref for ref in refs if ref.at <= now[0] + timeout]
        first = sorted(done, key=lambda ref: ref.at)[:num_returns]
        now[0] = max(now[0], first[-1].at) if first else now[0] + timeout
        return first, [ref for ref in refs if ref not in first]

    def get(ref):
        if isinstance(ref.outcome, Exception):
            raise ref.outcome
        return ref.outcome

    monkeypatch.setattr(calls, "ray", SimpleNamespace(wait=wait, get=get))
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def call(worker: str, at: float, outcome: object) -> Call:
        return Call(ref=Ref(at, outcome), worker=worker, method="call")

    return call


NEVER = float("inf")


def test_the_engine_may_take_its_time_after_a_replica_has_died(script):
    receiving = [script("rollout-0", 1, ActorDiedError()), script("rollout-1", 301, OK)]
    sending = [script("engine-0", 300, OK)]
    found = settle([*receiving, *sending], 3600, receivers=receiving, grace_s=60)
    assert isinstance(found[0], WorkerLost)
    assert found[1:] == [OK, OK]


def test_replicas_that_hang_are_lost_soon_after_the_engine_has_ended(script):
    receiving = [script("rollout-0", 1, raised(REFUSED)), script("rollout-1", NEVER, OK)]
    sending = [script("engine-0", 300, raised(PeerError("a replica failed")))]
    found = settle([*receiving, *sending], 3600, receivers=receiving, grace_s=60)
    assert found[0] is REFUSED
    assert isinstance(found[1], WorkerSilent)
    assert "60 s after the failure of another process" in str(found[1])
    assert "timeout_s" not in str(found[1])
    assert calls.time.monotonic() == 360


def test_calls_that_do_not_wait_for_each_other_have_their_whole_deadline(script):
    found = settle([script("a", 1, ActorDiedError()), script("b", 99, OK)], 100)
    assert found[1] == OK


def test_the_error_of_a_replica_comes_before_those_that_it_caused():
    assert choose([PeerError("the sync has ended"), REFUSED, PeerError("a replica failed")]) is (
        REFUSED
    )


def test_a_silent_engine_does_not_hide_the_error_of_a_replica():
    silent = WorkerSilent("no response")
    with pytest.raises(RolloutError, match="does not fit"):
        elastic._require_engines([PeerError("ended"), REFUSED, silent], [silent])
    with pytest.raises(WorkerSilent):
        elastic._require_engines([PeerError("the engine is silent"), silent], [silent])
    died = WorkerLost("the worker died")
    with pytest.raises(WorkerLost, match="died"):
        elastic._require_engines([REFUSED, died], [died])
    elastic._require_engines([REFUSED, PeerError("a replica failed")], [PeerError("…")])


def test_the_sender_hears_of_a_replica_that_raised_and_of_one_that_died(script):
    runs = script("rollout-0", NEVER, OK)
    require_running([runs.ref, script("rollout-1", 0, OK).ref])
    with pytest.raises(PeerError, match=r"(?s)a replica failed.*does not fit"):
        require_running([runs.ref, script("rollout-1", 0, raised(REFUSED)).ref])
    with pytest.raises(PeerError, match="process has ended"):
        require_running([runs.ref, script("rollout-1", 0, ActorDiedError()).ref])

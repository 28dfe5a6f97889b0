"""Experience that is generated during the step before, from replicas that may be lost."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from waiting import until

pytest.importorskip("ray", reason="the extra ray")

from engine_trainer.placement.ray.elastic import ElasticRollouts
from engine_trainer.placement.ray.replicas import State
from engine_trainer.rl.experience import Experience
from engine_trainer.rl.sources import OneStepOff
from engine_trainer.telemetry.logs import Timers


class Rollouts(ElasticRollouts):
    """Replicas by state, all keys; ``brought`` has those that received weights one by one."""

    def __init__(self, **by_state: list[int]) -> None:
        self.by_state = {State[name]: keys for name, keys in by_state.items()}
        self.brought: list[int] = []
        self.looks = 0
        replicas = SimpleNamespace(pool=[], members=self._members_in, require_some=self._look)
        policy = SimpleNamespace(weight_version=2)
        super().__init__(replicas, policy, Timers(), batch_size=1, attempts=1)

    def _look(self) -> None:
        self.looks += 1

    def _members_in(self, *states: State) -> list[SimpleNamespace]:
        return [SimpleNamespace(key=k) for s in states for k in self.by_state.get(s, [])]

    def _bring(self, members):
        self.brought += [member.key for member in members]
        self.by_state[State.BUILT] = []
        return []


def waited_for(rollouts: Rollouts) -> None:
    """Take a step whose generation ends after the source has looked at the replicas."""
    sampler = SimpleNamespace(
        rollouts=rollouts, timers=Timers(), sync=lambda: None, policy=rollouts._policy
    )
    done = threading.Event()

    def collect(step: int, position: int) -> Experience:
        assert done.wait()
        return Experience(groups=[], position=position + 1, metrics={})

    source = OneStepOff(sampler, collect, 0, lambda: 0, total_steps=1)
    watch = threading.Thread(target=lambda: (until(lambda: rollouts.looks > 2), done.set()))
    watch.start()
    source.take(1)
    watch.join()
    source.close()


def test_a_new_replica_waits_for_the_next_sync_while_another_one_serves():
    rollouts = Rollouts(SERVING=[0], BUILT=[7])
    waited_for(rollouts)
    assert rollouts.brought == []
    rollouts.admit()
    assert rollouts.brought == [7]


def test_a_new_replica_gets_the_weights_at_once_where_none_serves():
    rollouts = Rollouts(SERVING=[], BUILT=[7])
    waited_for(rollouts)
    assert rollouts.brought == [7]

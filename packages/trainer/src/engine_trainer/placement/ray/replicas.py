"""The replicas of an elastic run, which may be lost and are replaced (``ray.elastic``).

A replica has a place (a bundle of resources and a rank) and a key, which is new for each process
that takes the place. A thread notices processes that end while they have no work, and sees the new
ones through their start. Weights are brought by the thread that drives the engines (``elastic``).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from engine_api.errors import EngineError
from engine_trainer.config.sections import RaySection
from engine_trainer.placement.ray import cluster
from engine_trainer.placement.ray.calls import Call, Pool, WorkerLost, finish, ready, silent

LOOK_S = 0.1
"""Seconds between two looks at starting replicas."""
PING_S = 1.0
"""Seconds between two calls that notice whether an idle replica has ended."""
log = logging.getLogger("engine_trainer")


class ReplicasLost(EngineError):
    """No replica is left to generate, or a group ends every replica that generates it.

    New workers would not help, so that the run ends.
    """


@dataclass(frozen=True, kw_only=True)
class Starter:
    """The means to start a replica's process in its place.

    Attributes:
        actor: starts the process of a rank.
        setup: returns the arguments of its first call, ``setup``.
        build: the arguments of its second one, ``make_rollout``.
    """

    actor: Callable[[int], Any]
    setup: Callable[[int], Sequence[Any]]
    build: Sequence[Any] = ()


class State(Enum):
    """The state of a replica's place."""

    STARTING = "its process starts"
    BUILDING = "its rollout is built"
    BUILT = "it has no weights yet"
    SERVING = "it serves"
    GIVEN_UP = "it was lost too often"


@dataclass(frozen=True, kw_only=True)
class Member:
    """One replica's process.

    Attributes:
        key: number of the process among all that were started.
    """

    key: int
    rank: int
    actor: Any
    worker: str

    def start(self, method: str, *arguments: Any) -> Call:
        """Start one call, which fails if the process has ended."""
        return Call(
            ref=self.actor.call.remote(method, *arguments), worker=self.worker, method=method
        )


@dataclass(kw_only=True)
class _Place:
    """A replica's place, and the process that has it."""

    member: Member
    state: State
    call: Call | None = None
    """The call by which it starts, or the newest ping."""
    until: float = 0.0
    """Deadline of the start, or the time of the next ping."""
    losses: int = 0
    """Processes lost here since the last call that succeeded."""
    lost_at: float | None = None
    """The time at which it was lost, until it serves again."""


class Replicas:
    """The places of all replicas.

    All methods may be called by any thread. ``changed`` is notified when a place's state changes.

    Args:
        pool: its actors are replaced with the processes.

    Attributes:
        last: the newest error by which a process was lost.
    """

    def __init__(self, pool: Pool, starter: Starter, section: RaySection) -> None:
        self.pool = pool
        self.changed = threading.Condition()
        self._starter = starter
        self._section = section
        self._keys = itertools.count()
        self._places = [
            _Place(member=self._member(rank), state=State.BUILT) for rank in range(len(pool))
        ]
        self.last: EngineError | None = None
        self._failed: BaseException | None = None
        self._lost = 0
        self._rejoined: list[float] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="replicas", daemon=True)
        self._thread.start()

    def members(self, *states: State) -> list[Member]:
        """Return the processes whose places are in one of ``states``, by rank."""
        with self.changed:
            return [place.member for place in self._places if place.state in states]

    def lose(self, key: int, error: WorkerLost) -> None:
        """End a replica that does not respond or has ended, and start another one in its place.

        Nothing happens where its place has another process already.
        """
        with self.changed:
            for place in self._places:
                if place.member.key == key and place.state in (State.SERVING, State.BUILT):
                    self._replace(place, error)

    def note_success(self, key: int) -> None:
        """Note that a call of a replica has succeeded: its next loss is the first one."""
        with self.changed:
            for place in self._places:
                if place.member.key == key:
                    place.losses = 0

    def note_weights(self, members: Sequence[Member]) -> None:
        """Note that replicas have the current weights, and serve from now on."""
        with self.changed:
            keys = {member.key for member in members}
            for place in self._places:
                if place.member.key in keys and place.state is State.BUILT:
                    place.state = State.SERVING
                    if place.lost_at is not None:
                        seconds = time.monotonic() - place.lost_at
                        self._rejoined.append(seconds)
                        log.warning(
                            "%s serves again, %.1f s after it was lost",
                            place.member.worker,
                            seconds,
                        )
                    place.lost_at = None
            self.changed.notify_all()

    def require_some(self) -> None:
        """Raise ``ReplicasLost`` if no replica serves and none is being started."""
        with self.changed:
            if self._failed is not None:
                raise self._failed
            if any(place.state is not State.GIVEN_UP for place in self._places):
                return
            assert self.last is not None, "a place is given up after a loss"
            raise ReplicasLost(
                "no replica is left, and none could be started in place of the lost ones",
                where="ray.elastic",
                why=f"the last one: {self.last}",
                remedy="remove the cause, then start the run again: it continues from its last "
                "checkpoint. If starting takes longer than ray.start_timeout_s, raise that",
            ) from self.last

    def wait(self, seconds: float) -> None:
        """Wait until a place's state changes, at most ``seconds``."""
        with self.changed:
            self.changed.wait(seconds)

    def figures(self) -> dict[str, float]:
        """Return ``replicas/…`` since the last call."""
        with self.changed:
            figures = {
                "replicas/serving": float(
                    sum(place.state is State.SERVING for place in self._places)
                ),
                "replicas/lost": float(self._lost),
            }
            if self._rejoined:
                figures["replicas/rejoin_s"] = max(self._rejoined)
            self._lost = 0
            self._rejoined = []
        return figures

    def close(self) -> None:
        """Start no more processes (idempotent)."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # --- in the thread ----------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while not self._closed.wait(LOOK_S):
                with self.changed:
                    for place in self._places:
                        self._look(place)
        except BaseException as error:  # noqa: BLE001 - the loop raises it
            with self.changed:
                self._failed = error
                self.changed.notify_all()

    def _look(self, place: _Place) -> None:
        if place.state in (State.STARTING, State.BUILDING):
            self._look_at_start(place)
        elif place.state in (State.BUILT, State.SERVING):
            self._ping(place)

    def _look_at_start(self, place: _Place) -> None:
        """Take a place one state further if its call is done."""
        call = place.call
        assert call is not None
        if ready([call], 0.0):
            try:
                self.pool.finish([call])
            except EngineError as error:
                self._replace(place, error)
                return
            if place.state is State.STARTING:
                place.state = State.BUILDING
                place.call = place.member.start("make_rollout", *self._starter.build)
                place.until = time.monotonic() + self._section.timeout_s
            else:
                place.state = State.BUILT
                place.call = None
                place.until = 0.0
            self.changed.notify_all()
        elif time.monotonic() > place.until:
            self._replace(place, self._late(place, call))

    def _late(self, place: _Place, call: Call) -> WorkerLost:
        if place.state is State.BUILDING:
            return silent([call], self._section.timeout_s)
        return silent([call], self._section.start_timeout_s, setting="ray.start_timeout_s")

    def _ping(self, place: _Place) -> None:
        """Notice whether a process has ended. One that works answers later."""
        if place.call is not None and ready([place.call], 0.0):
            try:
                finish([place.call], 0.0)
            except WorkerLost as error:
                self._replace(place, error)
                return
            place.call = None
            place.until = time.monotonic() + PING_S
        if place.call is None and time.monotonic() >= place.until:
            place.call = place.member.start("ping")

    # --- inside, with the lock --------------------------------------------------------------------

    def _member(self, rank: int) -> Member:
        return Member(
            key=next(self._keys),
            rank=rank,
            actor=self.pool.actors[rank],
            worker=self.pool.worker(rank),
        )

    def _replace(self, place: _Place, error: EngineError) -> None:
        """End the process of a place, and start another one unless too many were lost there."""
        if self._closed.is_set():
            return
        cluster.kill([place.member.actor])
        self.last = error
        now = time.monotonic()
        if place.lost_at is None:
            place.lost_at = now
            self._lost += 1
        # The cluster may get room for it later, while the others serve.
        waits = place.state is State.STARTING and now > place.until
        alone = not any(
            other.state not in (State.STARTING, State.GIVEN_UP) for other in self._places
        )
        if not waits:
            place.losses += 1
        if place.losses > self._section.restarts or (waits and alone):
            place.state = State.GIVEN_UP
            log.warning("%s is lost for good: %s", place.member.worker, error)
        else:
            log.warning("%s is lost, and another one is started: %s", place.member.worker, error)
            rank = place.member.rank
            self.pool.actors[rank] = self._starter.actor(rank)
            place.member = self._member(rank)
            place.state = State.STARTING
            place.call = place.member.start("setup", *self._starter.setup(rank))
            place.until = now + self._section.start_timeout_s
        self.changed.notify_all()

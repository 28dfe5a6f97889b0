"""Calls of actors, each with a deadline.

A dead or silent worker becomes one clear error.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from engine_api.errors import EngineError, RankFailure, RolloutError
from engine_trainer.placement.ray.meter import Meter

SHOWN = 400
"""Maximum number of characters of Ray's own message in an error."""
GRACE_S = 5.0
"""Seconds that other calls have to fail, after a first one has: the cause may be theirs."""


class WorkerLost(EngineError):
    """A worker, or its node, ended or stopped responding.

    A restart from the last checkpoint may help.
    """


class WorkerFailed(EngineError):
    """A worker raised an error outside of the contract.

    It would raise it again after a restart.
    """


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The result of a worker's method.

    Attributes:
        seconds: duration on the worker's clock.
        phases: the seconds of its phases, by name.
    """

    value: Any
    seconds: float
    phases: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, kw_only=True)
class Call:
    """A running call of one actor."""

    ref: Any
    worker: str
    method: str


class Pool:
    """Actors of one kind, in the order of their ranks.

    Args:
        name: name of the kind; workers are called ``name-0``, ``name-1``, …
        actors: actors with a method ``call(method, *arguments) -> Reply``.
        timeout_s: deadline of a call in seconds.
        meter: receives the duration of each call.
    """

    def __init__(self, name: str, actors: Sequence[Any], timeout_s: float, meter: Meter) -> None:
        self.name = name
        self.actors = list(actors)
        self.timeout_s = timeout_s
        self.meter = meter
        for rank in range(len(self.actors)):
            meter.add(self.worker(rank))

    def __len__(self) -> int:
        return len(self.actors)

    def worker(self, rank: int) -> str:
        """Return a worker's name in errors and figures."""
        return f"{self.name}-{rank}"

    def start(self, rank: int, method: str, *arguments: Any) -> Call:
        """Start one call.

        ``finish`` waits for it.
        """
        return Call(
            ref=self.actors[rank].call.remote(method, *arguments),
            worker=self.worker(rank),
            method=method,
        )

    def start_all(self, method: str, *arguments: Any) -> list[Call]:
        """Start the same call on all workers."""
        return [self.start(rank, method, *arguments) for rank in range(len(self))]

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Make the same call on all workers, and return their values by rank."""
        return [reply.value for reply in self.finish(self.start_all(method, *arguments))]

    def finish(self, calls: Sequence[Call], *, start_timeout_s: float = 0.0) -> list[Reply]:
        """Wait for calls of any pool and return their replies in order.

        Raises the errors of the function ``finish``.

        Args:
            start_timeout_s: deadline of calls in which workers start, used where it is longer than
                that of a call.
        """
        if start_timeout_s > self.timeout_s:
            replies = finish(calls, start_timeout_s, setting="ray.start_timeout_s")
        else:
            replies = finish(calls, self.timeout_s)
        for call, reply in zip(calls, replies, strict=True):
            self.meter.note(call.worker, call.method, reply.seconds)
        return replies


def finish(
    calls: Sequence[Call], timeout_s: float, *, setting: str = "ray.timeout_s"
) -> list[Reply]:
    """Return every call's reply, in order.

    Args:
        setting: the key of the configuration that ``timeout_s`` comes from.

    Raises:
        WorkerLost: a worker died, its node was lost, or it did not answer within ``timeout_s``.
        WorkerFailed: it raised what is no ``EngineError``.
        EngineError: what it raised; of several the one that says most.
    """
    left = {call.ref: call for call in calls}
    replies: dict[Any, Reply] = {}
    failures: list[tuple[Call, RayError]] = []
    end = time.monotonic() + timeout_s
    while left:
        ready, _ = ray.wait(list(left), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            break
        for ref in ready:
            call = left.pop(ref)
            try:
                replies[ref] = ray.get(ref)
            except RayError as error:
                if not failures:
                    end = min(end, time.monotonic() + GRACE_S)
                failures.append((call, error))
    if failures:
        raise _telling(failures, list(left.values()))
    if left:
        raise silent(list(left.values()), timeout_s, setting=setting)
    return [replies[call.ref] for call in calls]


def settle(calls: Sequence[Call], timeout_s: float, grace_s: float) -> list[Reply | EngineError]:
    """Return every call's reply or error, in order, where some may fail without ending the run.

    Calls that do not respond within ``timeout_s``, or within ``grace_s`` after the first failure,
    are ``WorkerLost``.
    """
    left = {call.ref: call for call in calls}
    found: dict[Any, Reply | EngineError] = {}
    end = time.monotonic() + timeout_s
    failed = False
    while left:
        done, _ = ray.wait(list(left), timeout=max(0.0, end - time.monotonic()))
        if not done:
            break
        for ref in done:
            call = left.pop(ref)
            try:
                found[ref] = ray.get(ref)
            except RayError as error:
                found[ref] = _translate(call, error)
                if not failed:
                    end = min(end, time.monotonic() + grace_s)
                failed = True
    for ref, call in left.items():
        found[ref] = silent([call], grace_s if failed else timeout_s)
    return [found[call.ref] for call in calls]


def choose(errors: Sequence[EngineError]) -> EngineError:
    """Return the error that explains the others.

    A death comes first, then an error of its own, then one that a neighbour caused.
    """

    def rank(error: EngineError) -> int:
        order = [
            isinstance(error, WorkerLost),
            not isinstance(error, WorkerFailed | RankFailure),
            isinstance(error, WorkerFailed),
        ]
        return order.index(True) if any(order) else len(order)

    return min(errors, key=rank)


def require_running(refs: Sequence[Any]) -> None:
    """Raise ``RolloutError`` if a process has ended in the middle of one of its calls.

    A call that raised is none of these: its process tells the others by itself.
    """
    if not refs:
        return
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
    for ref in done:
        try:
            ray.get(ref)
        except RayTaskError:
            continue
        except RayError as error:
            raise RolloutError(
                "a replica's process has ended",
                where="weight sync",
                why=textwrap.shorten(str(error), SHOWN),
                remedy="see the worker's log in Ray's session folder",
            ) from error


def ready(calls: Sequence[Call], seconds: float) -> list[Call]:
    """Return the calls that are done, after waiting at most ``seconds`` for the first one."""
    done, _ = ray.wait([call.ref for call in calls], timeout=seconds)
    return [call for call in calls if call.ref in done]


def attempt(work: Callable[[], object]) -> None:
    """Call ``work`` and ignore errors of actors or clusters that no longer exist."""
    try:
        work()
    except (RayError, EngineError, ValueError):
        # Ray raises ValueError for an actor that it no longer knows.
        return


def _telling(failures: Sequence[tuple[Call, RayError]], left: Sequence[Call] = ()) -> EngineError:
    """Return the failure that explains the others (see ``choose``).

    Where all failed workers blame a neighbour, the workers ``left``, which do not respond, are
    lost.
    """
    found = choose([_translate(call, error) for call, error in failures])
    if not isinstance(found, RankFailure) or not left:
        return found
    return WorkerLost(
        "no response, and the other ranks no longer wait for it",
        where=_names(left),
        why=str(found),
        remedy="check whether that process was stopped, and see the worker's log in Ray's "
        "session folder",
    )


def _translate(call: Call, error: RayError) -> EngineError:
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, EngineError):
            return cause
        failed = WorkerFailed(
            f"{type(cause).__name__}: {cause}",
            where=f"{call.worker}, {call.method}",
            why=str(error),
            remedy="fix the code that raised it; the last checkpoint is intact",
        )
        failed.__cause__ = cause if isinstance(cause, BaseException) else None
        return failed
    # A worker that failed to start would fail again.
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return WorkerFailed(
            "the worker could not be created",
            where=call.worker,
            why=str(error),
            remedy="fix the code that raised it; every node needs the same packages",
        )
    died = isinstance(error, RayActorError)
    return WorkerLost(
        "the worker died" if died else "the worker cannot be reached",
        where=f"{call.worker}, {call.method}",
        why=textwrap.shorten(str(error), SHOWN),
        remedy="see the worker's log in Ray's session folder (out of memory? a lost node?)",
    )


def _names(calls: Sequence[Call]) -> str:
    return ", ".join(sorted(f"{c.worker} ({c.method})" for c in calls))


def silent(
    calls: Sequence[Call], timeout_s: float, *, setting: str = "ray.timeout_s"
) -> WorkerLost:
    """Return the error of calls that did not respond in time."""
    return WorkerLost(
        f"no response within {timeout_s:g} s",
        where=_names(calls),
        why="it hangs, or its work takes longer",
        remedy=f"raise {setting} if the work takes longer",
    )

"""Calls one reward function for many completions, each under its time limit; what goes wrong is an outcome, not an end."""

from __future__ import annotations

import asyncio
import math
import threading
import traceback
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from engine_api.errors import EngineError
from engine_trainer.functions import is_async, run_past_exits
from engine_trainer.rewards.deadline import DeadlineExceeded, deadline
from engine_trainer.rewards.sample import RewardFn, Sample, Verdict
from engine_trainer.threads import event_loop

GRACE_S = 2.0  # beyond its own limit, before a call that keeps its thread busy is interrupted from outside


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one call came to; ``value`` is None unless it gave a finite number.

    Attributes:
        problem: what it raised or returned instead; empty for a number and for a call that took too long.
        error: an error of the contract, which names its own remedy: data without an answer, say.
        cause: the exception itself, in the process where it was raised.
    """

    value: float | None = None
    problem: str = ""
    error: EngineError | None = None
    cause: BaseException | None = None

    @property
    def timed_out(self) -> bool:
        """Whether it took too long."""
        return self.value is None and not self.problem and self.error is None


def call_all(
    function: RewardFn, samples: Sequence[Sample], *, timeout_s: float | None, concurrency: int
) -> Iterator[tuple[int, Outcome]]:
    """``function`` of every sample, as (place in ``samples``, outcome), in the order in which they end.

    A plain function is called for one after the other, a coroutine function for up to ``concurrency`` at once.

    Raises ``ConfigError`` for a plain function with a time limit outside the main thread.
    """
    if is_async(function):
        return _side_by_side(function, samples, timeout_s, concurrency)
    return ((place, _call(function, sample, timeout_s)) for place, sample in enumerate(samples))


def _call(function: RewardFn, sample: Sample, timeout_s: float | None) -> Outcome:
    try:
        with deadline(timeout_s):
            value = function(sample)
    except DeadlineExceeded:
        return Outcome()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything; the scorer names it
        return _failed(error)
    return _checked(value)


def _side_by_side(
    function: RewardFn, samples: Sequence[Sample], timeout_s: float | None, concurrency: int
) -> Iterator[tuple[int, Outcome]]:
    waiting = list(enumerate(samples))[::-1]
    running: dict[asyncio.Task[Outcome], int] = {}
    # A coroutine that never awaits holds the loop, whose own limits then do not come: an alarm interrupts it.
    main = threading.current_thread() is threading.main_thread()
    limit = timeout_s + GRACE_S if timeout_s is not None and main else None

    async def advance() -> set[asyncio.Task[Outcome]]:
        while waiting and len(running) < concurrency:
            place, sample = waiting.pop()
            running[asyncio.create_task(_await(function, sample, timeout_s))] = place
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        return done

    with event_loop(GRACE_S) as loop:
        while waiting or running:
            with deadline(limit, again=True):
                done = run_past_exits(loop, advance())
            for task in done:
                yield running.pop(task), task.result()


async def _await(function: RewardFn, sample: Sample, timeout_s: float | None) -> Outcome:
    call = asyncio.create_task(_judge(function, sample))
    # Not wait_for: after the cancellation it waits for the call, which may pay no heed.
    done, _ = await asyncio.wait([call], timeout=timeout_s)
    if not done:
        call.cancel()
        return Outcome()
    return call.result()


async def _judge(function: RewardFn, sample: Sample) -> Outcome:
    """Within the task: an exit that leaves a task ends the event loop."""
    try:
        value = await cast("Awaitable[float]", function(sample))
    except (TimeoutError, DeadlineExceeded):
        return Outcome()
    except asyncio.CancelledError:  # its own: what ``_await`` has cancelled nobody reads
        return Outcome(problem="it was cancelled from inside")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - as in _call
        return _failed(error)
    return _checked(value)


def _failed(error: Exception | SystemExit) -> Outcome:
    if isinstance(error, EngineError):
        return Outcome(error=error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return Outcome(problem=f"it raised {type(error).__name__}: {error}{place}", cause=error)


def _checked(value: object) -> Outcome:
    try:
        number = value if isinstance(value, Verdict) else float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:
        return Outcome(problem=f"it returned {value!r}, not a number", cause=error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a number too large, or whatever its own __float__ raises
        said = f"{type(error).__name__}: {error}"
        return Outcome(problem=f"it returned a {type(value).__name__} that is no float: {said}", cause=error)
    if not math.isfinite(number):
        return Outcome(problem=f"it returned {float(number)}, not a finite number")
    return Outcome(value=number)

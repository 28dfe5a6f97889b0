"""Calls of one reward function for many completions, where a failure is an outcome, not an end."""

from __future__ import annotations

import asyncio
import inspect
import math
import pickle
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

from engine_api.errors import EngineError
from engine_trainer.extensions.functions import is_async, run_past_exits
from engine_trainer.rewards.deadline import DeadlineExceeded, alarm
from engine_trainer.rewards.sample import SHOWN, RewardFn, Sample, Verdict
from engine_trainer.utils.threads import event_loop

# Seconds beyond its own limit before a coroutine that blocks its event loop is interrupted from
# outside.
GRACE_S = 2.0
# Packages whose errors every process can unpickle.
KNOWN = ("engine_api", "engine_trainer")
Interrupts = tuple[type[BaseException], ...]
# Exceptions caused by the person who runs this process, and not by a reward.
OURS: Interrupts = (KeyboardInterrupt,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of one call.

    Attributes:
        value: The reward; None unless the call returned a finite number.
        problem: Description of what it raised or returned instead; empty for a number and for a
            call that took too long.
        error: An error of the contract, which names its own remedy (for data without an answer, for
            example).
        cause: The exception itself, in the process where it was raised.
    """

    value: float | None = None
    problem: str = ""
    error: EngineError | None = None
    cause: BaseException | None = None

    @property
    def timed_out(self) -> bool:
        """True if the call took too long."""
        return self.value is None and not self.problem and self.error is None


def call_all(
    function: RewardFn,
    samples: Sequence[Sample],
    *,
    concurrency: int,
    timeout_s: float | None = None,
    interrupts: Interrupts = OURS,
) -> Iterator[tuple[int, Outcome]]:
    """Yield (index in ``samples``, outcome) for every sample, in the order in which calls end.

    Args:
        function: The reward function. A plain one is called for one sample after the other.
        samples: The completions to score.
        concurrency: Number of calls of a coroutine function that run at once.
        timeout_s: Time limit of a call of a coroutine function. The limit of a plain function is
            kept by the process that started this one, because nothing inside a process can end a
            call for sure.
        interrupts: Exceptions that also end this loop. Any other exception is an outcome, whatever
            it derives from.
    """
    if is_async(function):
        return _side_by_side(function, samples, concurrency, timeout_s, interrupts)
    return ((place, _call(function, sample, interrupts)) for place, sample in enumerate(samples))


def shown(form: Callable[[Any], str], value: object) -> str:
    """Return the short, printable text of an unknown object, even if its own methods raise.

    ``form`` is ``str`` or ``repr``.
    """
    try:
        text = form(value)
        text = text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text)} characters)"
        return text.encode("utf-8", "backslashreplace").decode()
    except OURS:
        raise
    except BaseException as error:  # noqa: BLE001 - its own __str__ or __repr__ may raise anything
        return f"({type(error).__name__} when it was asked for its text)"


def plain(error: EngineError) -> EngineError:
    """Return the error in a form that every process can unpickle and show.

    An error of an unknown class becomes an ``EngineError`` with the same texts.
    """
    parts = {name: getattr(error, name, "") for name in ("what", "where", "why", "remedy")}
    ours = type(error).__module__.partition(".")[0] in KNOWN and all(
        type(part) is str for part in parts.values()
    )
    if ours and _can_travel(error):
        return error
    texts = {name: shown(str, part) for name, part in parts.items()}
    return EngineError(f"{type(error).__name__}: {texts.pop('what')}", **texts)


def _can_travel(error: EngineError) -> bool:
    try:
        pickle.dumps(error)
    except Exception:  # noqa: BLE001 - a field of it may be anything
        return False
    return True


def _call(function: RewardFn, sample: Sample, interrupts: Interrupts) -> Outcome:
    try:
        value = function(sample)
    except interrupts:
        raise
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything; the scorer names it
        return _failed(error)
    return _checked(value, interrupts)


def _side_by_side(
    function: RewardFn,
    samples: Sequence[Sample],
    concurrency: int,
    timeout_s: float | None,
    interrupts: Interrupts,
) -> Iterator[tuple[int, Outcome]]:
    waiting = list(enumerate(samples))[::-1]
    running: dict[asyncio.Task[Outcome], int] = {}
    # A coroutine that never awaits blocks the event loop, so that the loop's own time limits do not
    # work. An alarm interrupts it.
    main = threading.current_thread() is threading.main_thread()
    limit = timeout_s + GRACE_S if timeout_s is not None and main else None
    exits = tuple(kind for kind in (SystemExit, KeyboardInterrupt) if kind not in interrupts)

    async def advance() -> set[asyncio.Task[Outcome]]:
        while waiting and len(running) < concurrency:
            place, sample = waiting.pop()
            running[asyncio.create_task(_await(function, sample, timeout_s, interrupts))] = place
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        return done

    with event_loop(GRACE_S) as loop:
        while waiting or running:
            with nullcontext() if limit is None else alarm(limit, again=True):
                done = run_past_exits(loop, advance(), exits)
            for task in done:
                yield running.pop(task), task.result()


async def _await(
    function: RewardFn, sample: Sample, timeout_s: float | None, interrupts: Interrupts
) -> Outcome:
    call = asyncio.create_task(_await_score(function, sample, interrupts))
    # After cancelling a call, wait_for would wait for it, and the call may ignore the cancellation.
    done, _ = await asyncio.wait([call], timeout=timeout_s)
    if not done:
        call.cancel()
        return Outcome()
    return call.result()


async def _await_score(function: RewardFn, sample: Sample, interrupts: Interrupts) -> Outcome:
    """Await one call within its task, because an exit that leaves a task ends the event loop."""
    try:
        value = await cast("Awaitable[float]", function(sample))
    except (TimeoutError, DeadlineExceeded):
        return Outcome()
    # The function itself has cancelled the call. The outcome of a call that ``_await`` has
    # cancelled is not read.
    except asyncio.CancelledError:
        return Outcome(problem="it was cancelled from inside")
    except interrupts:
        raise
    except BaseException as error:  # noqa: BLE001 - as in _call
        return _failed(error)
    return _checked(value, interrupts)


def _failed(error: BaseException) -> Outcome:
    if isinstance(error, EngineError):
        return Outcome(error=plain(error), cause=error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return Outcome(
        problem=f"it raised {type(error).__name__}: {shown(str, error)}{place}", cause=error
    )


def _checked(value: object, interrupts: Interrupts) -> Outcome:
    """Return the outcome for a function's return value, free of the function's own types."""
    if inspect.iscoroutine(value):
        value.close()
        return Outcome(problem="it returned a coroutine, not a number: write it with async def")
    # float() would convert a text of digits.
    if isinstance(value, str | bytes | bytearray):
        return Outcome(problem=f"it returned {shown(repr, value)}, not a number")
    try:
        return _number(value)
    except interrupts:
        raise
    except (TypeError, ValueError) as error:
        return Outcome(problem=f"it returned {shown(repr, value)}, not a number", cause=error)
    except BaseException as error:  # noqa: BLE001 - a number too large, or whatever its own __float__ raises
        reason = f"{type(error).__name__}: {shown(str, error)}"
        return Outcome(
            problem=f"it returned a {type(value).__name__} that is not a float: {reason}",
            cause=error,
        )


def _number(value: Any) -> Outcome:
    number = float(value)
    if not math.isfinite(number):
        return Outcome(problem=f"it returned {number}, not a finite number")
    if not isinstance(value, Verdict):
        return Outcome(value=number)
    answer: object = value.answer
    if answer is None:
        return Outcome(value=Verdict(number))
    if not isinstance(answer, str):
        return Outcome(
            problem=f"it returned a Verdict whose answer is a {type(answer).__name__}, not text"
        )
    return Outcome(value=Verdict(number, str.__str__(answer)))

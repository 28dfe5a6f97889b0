"""A reward that returns or raises anything, as the completion requests in JSON.

It is loaded by its path, like a user's own file, in this process and in reward processes.
"""

from __future__ import annotations

import asyncio
import decimal
import fractions
import json
import sys

import numpy as np

from engine_api.errors import ConfigError, EngineError
from engine_trainer.rewards import RewardError, Verdict
from engine_trainer.rewards.deadline import DeadlineExceeded


class OwnError(Exception):
    pass


class OwnBase(BaseException):
    pass


class OwnEngineError(EngineError):
    pass


class Speechless(Exception):
    def __str__(self):
        raise OwnBase("of its text")

    __repr__ = __str__


class Locked(Exception):
    def __init__(self, *rest):
        super().__init__(*rest)
        self.lock = lambda: None

    def __reduce__(self):
        raise OwnError("not to be pickled")


class Odd:
    """A value whose every answer is an exception."""

    def __init__(self, error):
        self.error = error

    def __float__(self):
        raise self.error

    __repr__ = __str__ = __len__ = __iter__ = __float__

    def __getattr__(self, name):
        if name == "error":
            raise AttributeError(name)
        raise self.error


class Almost:
    def __init__(self, value):
        self.value = value

    def __float__(self):
        return self.value


class Number(float):
    def __float__(self):
        return float("inf")

    def __reduce__(self):
        raise OwnError("not to be pickled")


class Words(str):
    __slots__ = ()

    def __str__(self):
        raise OwnError("of a text")

    __repr__ = __reduce__ = __str__


class OwnVerdict(Verdict):
    def __reduce__(self):
        raise OwnError("not to be pickled")


def deep(number):
    made = []
    for _ in range(abs(int(number)) % 3000):
        made = [made]
    return made


async def coroutine():
    return 1.0


def generator():
    yield 1.0


VALUES = {
    "the number": lambda n, t: n,
    "none": lambda n, t: None,
    "bool": lambda n, t: n > 0,
    "nan": lambda n, t: float("nan"),
    "inf": lambda n, t: float("-inf"),
    "huge": lambda n, t: 10**400,
    "list of huge": lambda n, t: [10**5000],
    "text": lambda n, t: t,
    "digits": lambda n, t: "1.0",
    "bytes": lambda n, t: t.encode("utf-8", "surrogatepass"),
    "float32": lambda n, t: np.float32(0.5),
    "int64": lambda n, t: np.int64(3),
    "numpy bool": lambda n, t: np.bool_(True),
    "numpy text": lambda n, t: np.str_(t.replace("\0", "")),
    "0-d array": lambda n, t: np.array(0.5),
    "array": lambda n, t: np.array([0.5, n]),
    "object array": lambda n, t: np.array(Odd(OwnBase("within")), dtype=object),
    "decimal": lambda n, t: decimal.Decimal("0.1"),
    "signalling": lambda n, t: decimal.Decimal("sNaN"),
    "fraction": lambda n, t: fractions.Fraction(1, 3),
    "complex": lambda n, t: 1j,
    "odd keys": lambda n, t: {None: t, (1, 2): n, t: deep(n)},
    "deep": lambda n, t: deep(n),
    "odd": lambda n, t: Odd(OwnError(t)),
    "odd base": lambda n, t: Odd(OwnBase(t)),
    "odd value": lambda n, t: Odd(ValueError(t)),
    "almost": lambda n, t: Almost(t),
    "float of its own": lambda n, t: Number(n),
    "verdict": lambda n, t: Verdict(0.5, t),
    "verdict of words": lambda n, t: Verdict(0.5, Words(t)),
    "verdict of nothing": lambda n, t: float.__new__(Verdict, 0.5),
    "verdict of a lambda": lambda n, t: Verdict(0.5, lambda: t),
    "verdict of nan": lambda n, t: Verdict(float("nan"), t),
    "verdict of its own": lambda n, t: OwnVerdict(0.5, t),
    "coroutine": lambda n, t: coroutine(),
    "generator": lambda n, t: generator(),
    "function": lambda n, t: coroutine,
    "type": lambda n, t: Odd,
    "exception": lambda n, t: OwnError(t),
}
ERRORS = {
    "own": lambda n, t: OwnError(t),
    "own base": lambda n, t: OwnBase(t),
    "key": lambda n, t: KeyError(t),
    "stop": lambda n, t: StopIteration(n),
    "stop async": lambda n, t: StopAsyncIteration(n),
    "close": lambda n, t: GeneratorExit(t),
    "exit": lambda n, t: SystemExit(t),
    "recursion": lambda n, t: RecursionError(t),
    "memory": lambda n, t: MemoryError(t),
    "speechless": lambda n, t: Speechless(t),
    "locked": lambda n, t: Locked(t),
    "unicode": lambda n, t: UnicodeDecodeError("utf-8", b"x", 0, 1, t),
    "file": lambda n, t: FileNotFoundError(2, t, t),
    "pipe": lambda n, t: BrokenPipeError(t),
    "end of file": lambda n, t: EOFError(t),
    "group": lambda n, t: BaseExceptionGroup(t or "group", [OwnBase(t), OwnError(t)]),
    "engine": lambda n, t: EngineError(t, where=t, why=t, remedy=t),
    "config": lambda n, t: ConfigError(t, t),
    "own engine": lambda n, t: OwnEngineError(t),
    "engine of odd parts": lambda n, t: EngineError(
        Odd(OwnBase(t)), where=lambda: t, why=deep(n), remedy=Words(t)
    ),
    "locked engine": lambda n, t: ConfigError(Locked(t), t),
    "interrupt": lambda n, t: KeyboardInterrupt(t),
    # In a coroutine these two say that it took too long; the second is only the alarm's.
    "timeout": lambda n, t: TimeoutError(t),
    "deadline": lambda n, t: DeadlineExceeded(t),
    "cancelled": lambda n, t: asyncio.CancelledError(t),
}


def recurse():
    # It reads nothing on the way: a thousand copies of a long completion take a second.
    return recurse()


def score(sample):
    does = json.loads(sample.completion)
    kind, number, text = does["kind"], does["number"], does["text"]
    if kind == "reward error":
        raise RewardError(text, sample, text)
    if kind == "recurses":
        return recurse()
    if kind == "closes the streams":
        sys.stdout = sys.stderr = None
        return 1.0
    if kind in ERRORS:
        raise ERRORS[kind](number, text) from OwnError(text)
    return VALUES[kind](number, text)


async def ascore(sample):
    await asyncio.sleep(0)
    return score(sample)


async def nested(sample):
    return await asyncio.create_task(ascore(sample))


KINDS = ["reward error", "recurses", "closes the streams", *VALUES, *ERRORS]


def takes_all(sample, /, **kwargs):
    return float(len(kwargs))


def takes_none(sample):
    return 1.0

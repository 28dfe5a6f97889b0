"""Checks of a section's values, written as tables of intervals and of refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import get_args, get_type_hints

from engine_api.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Interval:
    """The numbers that a key accepts, in words and as a condition that NaN never meets."""

    words: str
    holds: Callable[[float], bool]


AT_LEAST_0 = Interval("a number of at least 0", lambda value: value >= 0)
AT_LEAST_1 = Interval("a number of at least 1", lambda value: value >= 1)
AT_LEAST_2 = Interval("a number of at least 2", lambda value: value >= 2)
ABOVE_0 = Interval("a number above 0", lambda value: value > 0)
FINITE_ABOVE_0 = Interval("a finite number above 0", lambda value: 0 < value < math.inf)
FRAMES_PER_SECOND = Interval(
    "a number from 0.001 to 1000",
    lambda value: value is not True and 1e-3 <= value <= 1000,
)
FRACTION = Interval("a number in [0, 1]", lambda value: 0 <= value <= 1)
INSIDE_0_1 = Interval("a number in (0, 1)", lambda value: 0 < value < 1)
FRACTION_ABOVE_0 = Interval("a number in (0, 1]", lambda value: 0 < value <= 1)


def require(section: str, part: object, intervals: Mapping[str, Interval]) -> None:
    """Raise ``ConfigError`` for the first field of ``part`` whose value is not in its interval.

    A null is accepted. Whether a field may be null is checked where the section is bound.
    """
    for name, interval in intervals.items():
        value = getattr(part, name)
        if value is None or interval.holds(value):
            continue
        may_be_null = type(None) in get_args(get_type_hints(type(part))[name])
        raise ConfigError(
            _key(section, name),
            f"expected {interval.words}, got {value}",
            remedy=f"give {interval.words}" + (", or null" if may_be_null else ""),
        )


# The parts are: true if it is wrong, then the key and the texts what, why and remedy of the error.
Refusal = tuple[bool, str, str, str, str]


def refuse(section: str, refusals: Iterable[Refusal]) -> None:
    """Raise ``ConfigError`` for the first refusal whose condition holds.

    An empty key is the section itself.
    """
    for wrong, name, what, why, remedy in refusals:
        if wrong:
            raise ConfigError(_key(section, name), what, why=why, remedy=remedy)


def _key(section: str, name: str) -> str:
    return f"{section}.{name}" if section and name else section or name

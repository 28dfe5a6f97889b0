"""Layout of the picture of the margins: one dot per row, one lane per group, a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine_conformance.report.view import lane, margin_text
from engine_conformance.results import BAD, Row

__all__ = ["Chart", "Dot", "Lane", "make_chart"]

# All lengths are in the picture's own units; the axis reaches from 1e-4 to 1e2.
WIDTH = 960.0
RADIUS = 3.6
_LOW = -4
_HIGH = 2
_LEFT = 264.0
_RIGHT = 888.0
# Start of the columns left and right of the axis.
_BITWISE = 160.0
_BEYOND = 906.0
_PITCH = 8.6
_COLUMNS_BITWISE = 9
_COLUMNS_BEYOND = 5
_TOP = 34.0
_PADDING = 7.0
_LEAST = 26.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """One row of the run.

    ``kind`` is a style: good, bad or deviation.
    """

    x: float
    y: float
    kind: str
    provisional: bool
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One group of cases, from ``top`` over ``height``."""

    label: str
    top: float
    height: float
    dots: list[Dot]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """The picture of all margins.

    ``ticks`` are positions and labels, ``limit`` is where the error equals the
    tolerance.
    """

    width: float
    height: float
    top: float
    limit: float
    right: float
    bitwise: float
    beyond: float
    radius: float
    ticks: list[tuple[float, str]]
    lanes: list[Lane]
    without: int
    """Number of rows that compared no numbers."""


def make_chart(rows: Sequence[Row]) -> Chart:
    """Place every row that has a margin and return the picture."""
    compared = [row for row in rows if row.outcome.margin is not None]
    groups: dict[str, list[Row]] = {}
    for row in compared:
        groups.setdefault(lane(row), []).append(row)
    top = _TOP
    lanes: list[Lane] = []
    for label, mine in groups.items():
        lanes.append(_lane(label, mine, top))
        top += lanes[-1].height
    return Chart(
        width=WIDTH,
        height=top + 8,
        top=_TOP,
        limit=_x(1.0),
        right=_RIGHT,
        bitwise=_BITWISE,
        beyond=_BEYOND,
        radius=RADIUS,
        ticks=[(_x(10.0**power), f"{10.0**power:g}") for power in range(_LOW, _HIGH + 1)],
        lanes=lanes,
        without=len(rows) - len(compared),
    )


def _x(margin: float) -> float:
    power = min(max(math.log10(margin), _LOW), _HIGH)
    return _LEFT + (power - _LOW) / (_HIGH - _LOW) * (_RIGHT - _LEFT)


def _positions(rows: Iterable[Row]) -> list[tuple[float, Row]]:
    found: list[tuple[float, Row]] = []
    bitwise = 0
    beyond = 0
    for row in rows:
        margin = row.outcome.margin or 0.0
        if margin == 0:
            found.append((_BITWISE + RADIUS + bitwise % _COLUMNS_BITWISE * _PITCH, row))
            bitwise += 1
        elif margin > 10**_HIGH:
            found.append((_BEYOND + RADIUS + beyond % _COLUMNS_BEYOND * _PITCH, row))
            beyond += 1
        else:
            found.append((_x(margin), row))
    return sorted(found, key=lambda pair: pair[0])


def _lane(label: str, rows: Iterable[Row], top: float) -> Lane:
    """Place the dots of a lane.

    A dot that would cover another moves to the nearest free level.
    """
    # The rightmost dot of each level; levels 0, 1, 2 … are at 0, -1, +1, -2 …
    last: list[float] = []
    placed: list[tuple[float, int, Row]] = []
    for x, row in _positions(rows):
        level = next((i for i, end in enumerate(last) if x - end >= _PITCH - 1e-6), len(last))
        last[level : level + 1] = [x]
        placed.append((x, level, row))
    height = max(_LEAST, len(last) * _PITCH + 2 * _PADDING)
    # With an even number of levels the lane's middle lies between two of them.
    middle = top + height / 2 + (_PITCH / 2 if len(last) % 2 == 0 else 0)
    dots = [
        _dot(row, x, middle + _PITCH * ((level + 1) // 2) * (-1 if level % 2 else 1))
        for x, level, row in placed
    ]
    return Lane(label=label, top=top, height=height, dots=dots)


def _dot(row: Row, x: float, y: float) -> Dot:
    status = row.outcome.status
    kind = "good"
    if status == "deviation":
        kind = "deviation"
    elif status in BAD or status == "suite-error":
        kind = "bad"
    title = f"{row.case} [{row.setting}]: {margin_text(row.outcome.margin)}, {status}"
    return Dot(x=round(x, 1), y=round(y, 1), kind=kind, provisional=row.provisional, title=title)

"""Where the picture of the margins draws what: one dot a row, one lane a group, a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine_conformance.report.view import lane, margin_text
from engine_conformance.results import BAD, Row

__all__ = ["Chart", "Dot", "Lane", "make_chart"]

# All lengths in the picture's own units; the axis reaches from 1e-4 to 1e2.
WIDTH, RADIUS = 960.0, 3.6
_LOW, _HIGH = -4, 2
_LEFT, _RIGHT = 264.0, 888.0
_BITWISE, _BEYOND = 160.0, 906.0  # where the columns left and right of the axis begin
_PITCH, _COLUMNS_BITWISE, _COLUMNS_BEYOND = 8.6, 9, 5
_TOP, _PADDING, _LEAST = 34.0, 7.0, 26.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """One row; ``kind`` is a style: good, bad or deviation."""

    x: float
    y: float
    kind: str
    provisional: bool
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One group, from ``top`` over ``height``."""

    label: str
    top: float
    height: float
    dots: list[Dot]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """The picture: ``ticks`` are positions and labels, ``limit`` is where the error equals the tolerance."""

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
    without: int  # rows that compared no numbers


def make_chart(rows: Sequence[Row]) -> Chart:
    """Place every row that has a margin."""
    compared = [row for row in rows if row.outcome.margin is not None]
    groups: dict[str, list[Row]] = {}
    for row in compared:
        groups.setdefault(lane(row), []).append(row)
    top, lanes = _TOP, list[Lane]()
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
    found, bitwise, beyond = list[tuple[float, Row]](), 0, 0
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
    """Dots that would lie on another one move up or down, to the nearest level that is free."""
    last: list[
        float
    ] = []  # the rightmost dot of each level; levels 0, 1, 2 … lie at 0, -1, +1, -2 …
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
    kind = (
        "deviation"
        if status == "deviation"
        else "bad"
        if status in BAD or status == "suite-error"
        else "good"
    )
    title = f"{row.case} [{row.setting}]: {margin_text(row.outcome.margin)}, {status}"
    return Dot(x=round(x, 1), y=round(y, 1), kind=kind, provisional=row.provisional, title=title)

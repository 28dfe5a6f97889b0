"""Curves of metrics as static SVG, whose labels are HTML so that a phone can show them.

The values are in titles of the picture, which a browser shows by itself, and the page's script
shows them beneath it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine_trainer.telemetry.metrics import explain
from engine_trainer.telemetry.series import Series

WIDTH = 1000
HEIGHT = 300
MOST_LINES = 5
MOST_POINTS = 300
"""Largest number of points of a line. Of more points the extremes of each stretch are drawn."""
LOGARITHMIC = 1000
"""Ratio of the largest to the smallest value from which a scale is logarithmic."""
_DOTS = 60
_TICKS = 4


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A vertical scale with the values that have a line."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_logarithmic: bool

    def place(self, value: float) -> float:
        """Return the distance of a value from the top, as a fraction of the height."""
        low, high, at = (self._on_axis(x) for x in (self.low, self.high, value))
        return 1.0 - (at - low) / (high - low)

    def _on_axis(self, value: float) -> float:
        return math.log10(value) if self.is_logarithmic else value


def scale_of(values: Sequence[float]) -> Scale:
    """Return a scale on which all values have a place, with round numbers as ticks."""
    low, high = min(values), max(values)
    if low > 0 and high / low >= LOGARITHMIC:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        powers = range(first, last + 1, max(1, math.ceil((last - first) / _TICKS)))
        ticks = tuple(10.0**power for power in powers)
        return Scale(low=10.0**first, high=10.0**last, ticks=ticks, is_logarithmic=True)
    if low == high:
        margin = abs(low) / 2 or 1.0
        low, high = low - margin, high + margin
    step = _round_step((high - low) / _TICKS)
    # A value that is a tick but for rounding needs no further tick.
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(step * number for number in range(first, last + 1))
    return Scale(low=ticks[0], high=ticks[-1], ticks=ticks, is_logarithmic=False)


def curve(
    title: str, lines: Sequence[Series], span: tuple[int, int], resumed: Collection[int] = ()
) -> str:
    """Return a figure of metrics over the steps ``span``.

    Args:
        title: title of the figure, as text.
        lines: the metrics; of more than ``MOST_LINES`` the first ones. Each has a value.
        span: the first and the last step of the page.
        resumed: the steps after which the run was resumed, which are marked.
    """
    shown = lines[:MOST_LINES]
    scale = scale_of([value for line in shown for value in line.values])
    across = _across(span)
    tips = "".join(
        f"<span><b>{html.escape(line.name)}</b> {html.escape(explain(line.name))}</span>"
        for line in shown
    )
    marks = "".join(
        _mark("resumed", across(step + 0.5), f"resumed after step {step}")
        for step in sorted(resumed)
        if span[0] <= step < span[1]
    )
    drawn = "".join(_line(line, index, across, scale) for index, line in enumerate(shown))
    lost = "".join(
        _mark("lost", across(step), f"step {step}: {line.name} is not finite")
        for line in shown
        for step in line.lost
    )
    ends = ", ".join(
        f"{line.name} from {line.values[0]:.4g} to {line.values[-1]:.4g}" for line in shown
    )
    return (
        f'<figure class="curve"><figcaption><span class="term" tabindex="0">{html.escape(title)}'
        f'<span class="tip" role="tooltip">{tips}</span></span>{_note(scale, lines)}'
        f'{_legend(shown)}</figcaption><div class="plot">{_labels(scale)}'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" tabindex="0" '
        f'aria-label="{html.escape(ends)}, steps {span[0]} to {span[1]}">'
        f"{_grid(scale)}{marks}{drawn}{lost}"
        f'<line class="cursor" y1="0" y2="{HEIGHT}"/>{_hits(shown, across)}</svg>'
        f'<div class="scale steps"><span>step {span[0]}</span><span>{span[1]}</span></div>'
        f'</div><p class="values">{_values(shown, _steps(shown)[-1])}</p></figure>'
    )


def _across(span: tuple[int, int]) -> Callable[[float], float]:
    first, last = span
    return lambda step: (step - first) / (last - first or 1) * WIDTH


def _round_step(size: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 and 10 times a power of ten that is at least ``size``."""
    power = 10.0 ** math.floor(math.log10(size))
    return power * next((x for x in (1, 2, 2.5, 5) if x * power >= size * (1 - 1e-9)), 10)


def _note(scale: Scale, lines: Sequence[Series]) -> str:
    notes = ["logarithmic"] if scale.is_logarithmic else []
    if len(lines) > MOST_LINES:
        notes.append(f"{MOST_LINES} of {len(lines)}; the others are below")
    return f" <small>{', '.join(notes)}</small>" if notes else ""


def _legend(lines: Sequence[Series]) -> str:
    if len(lines) == 1:
        (line,) = lines
        change = f"{_number(line.values[0])} → " if len(line.values) > 1 else ""
        return f'<span class="last">{change}<b>{_number(line.values[-1])}</b></span>'
    entries = "".join(
        f'<span class="line{index}">{html.escape(_short_name(line, lines))} '
        f"<b>{_number(line.values[-1])}</b></span>"
        for index, line in enumerate(lines)
    )
    return f'<span class="legend">{entries}</span>'


def _short_name(line: Series, lines: Sequence[Series]) -> str:
    """Return the part of the name in which the lines differ."""
    last = {one.name.rpartition("/")[2] for one in lines}
    if len(last) > 1 and len({one.group for one in lines}) == 1:
        return line.name.rpartition("/")[2]
    if len(last) > 1:
        return line.name
    group = line.group
    return group.removeprefix("eval/") if group != "eval" else "held-out"


def _labels(scale: Scale) -> str:
    texts = _distinct(scale.ticks)
    spans = "".join(
        f'<span style="top:{scale.place(tick) * 100:.2f}%">{text}</span>'
        for tick, text in zip(scale.ticks, texts, strict=True)
    )
    # The widest label gives the column its width.
    return f'<div class="ticks"><i aria-hidden="true">{max(texts, key=len)}</i>{spans}</div>'


def _distinct(ticks: Sequence[float]) -> list[str]:
    """Return the texts of ticks, with as many digits as it takes to tell them apart."""
    digits = 3
    texts = [_number(tick) for tick in ticks]
    while len(set(texts)) < len(texts):
        digits += 1
        texts = [f"{tick:.{digits}g}" for tick in ticks]
    return texts


def _grid(scale: Scale) -> str:
    places = [scale.place(tick) * HEIGHT for tick in scale.ticks]
    path = "".join(f"M0 {y:.1f}H{WIDTH}" for y in places)
    return f'<path class="grid" d="{path}"/>'


def _line(line: Series, index: int, across: Callable[[float], float], scale: Scale) -> str:
    path = ""
    dots = ""
    for stretch in _stretches(line):
        points = _thin(stretch)
        placed = [(across(step), scale.place(value) * HEIGHT) for step, value in points]
        path += "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        if len(line.values) <= _DOTS or len(points) == 1:
            dots += "".join(f"M{x:.1f} {y:.1f}h0" for x, y in placed)
    drawn = f'<path class="line line{index}" d="{path}"/>'
    return drawn + (f'<path class="dots line{index}" d="{dots}"/>' if dots else "")


def _stretches(line: Series) -> list[list[tuple[int, float]]]:
    """Return the points of a line, apart where a value between them is not finite."""
    found: list[list[tuple[int, float]]] = [[]]
    lost = iter([*line.lost, math.inf])
    gap = next(lost)
    for step, value in zip(line.steps, line.values, strict=True):
        if step > gap:
            found.append([])
            while step > gap:
                gap = next(lost)
        found[-1].append((step, value))
    return [stretch for stretch in found if stretch]


def _thin(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most ``MOST_POINTS`` points, which are the extremes of equal stretches."""
    count = MOST_POINTS // 2 - 1
    if len(points) <= MOST_POINTS:
        return list(points)
    edges = [1 + (len(points) - 2) * i // count for i in range(count + 1)]
    chosen = {0, len(points) - 1}
    for begin, end in pairwise(edges):
        places = range(begin, end)
        chosen |= {
            min(places, key=lambda i: points[i][1]),
            max(places, key=lambda i: points[i][1]),
        }
    return [points[i] for i in sorted(chosen)]


def _mark(kind: str, x: float, note: str) -> str:
    return (
        f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HEIGHT}">'
        f"<title>{html.escape(note)}</title></line>"
    )


def _steps(lines: Sequence[Series]) -> list[int]:
    return sorted({step for line in lines for step in [*line.steps, *line.lost]})


def _hits(lines: Sequence[Series], across: Callable[[float], float]) -> str:
    """Return areas, each as wide as its step, whose titles are the values of the step."""
    every = _steps(lines)
    steps = every[:: math.ceil(len(every) / MOST_POINTS)]
    steps += every[-1:] if steps[-1] != every[-1] else []
    places = [across(step) for step in steps]
    borders = [0.0, *((a + b) / 2 for a, b in pairwise(places)), float(WIDTH)]
    rects = "".join(
        f'<rect x="{begin:.1f}" width="{end - begin:.1f}" height="{HEIGHT}" data-x="{x:.1f}">'
        f"<title>{_values(lines, step)}</title></rect>"
        for step, x, (begin, end) in zip(steps, places, pairwise(borders), strict=True)
    )
    return f'<g class="hits">{rects}</g>'


def _values(lines: Sequence[Series], step: int) -> str:
    parts: list[str] = []
    for line in lines:
        name = f"{_short_name(line, lines)} " if len(lines) > 1 else ""
        if step in line.lost:
            parts.append(f"{name}not finite")
        elif (value := _value_at(line, step)) is not None:
            parts.append(f"{name}{value:.5g}")
    return html.escape(f"step {step}: {', '.join(parts)}")


def _value_at(line: Series, step: int) -> float | None:
    return dict(zip(line.steps, line.values, strict=True)).get(step)


def _number(value: float) -> str:
    """Return a number in few characters, such as 0.25, 12k and 3e-7."""
    size = abs(value)
    if 1e4 <= size < 1e12:
        power, unit = next((p, u) for p, u in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if size >= p)
        return f"{value / power:.3g}{unit}"
    text = f"{value:.0f}" if size >= 1e3 else f"{value:.3g}"
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else text

"""The result of a replay as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from engine_trainer.replay.again import Replayed

MOST_FIGURES = 12
"""Largest number of figures that are listed."""


def format_replay(replayed: Replayed) -> str:
    """Return the tables of what differs between a recorded step and its replay."""
    begin = replayed.checkpoint or "the model as the run began"
    steps = replayed.steps
    made = f"step {steps[-1]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    lines = [f"{made} of {replayed.folder}, made again from {begin}"]
    if replayed.unknown:
        lines.append("the run did not record its engine, machine and versions")
    if replayed.surroundings:
        rows = [(name, then, now) for name, (then, now) in replayed.surroundings.items()]
        lines += ["", *_table(("not as recorded", "then", "now"), rows)]
    lines += ["", *_tokens(replayed), "", *_figures(replayed), "", *_states(replayed), ""]
    return "\n".join([*lines, _verdict(replayed)])


def _tokens(replayed: Replayed) -> list[str]:
    rows = [
        (one.name, str(one.step), str(one.tokens), str(one.different), _g(one.largest), one.where)
        for one in replayed.tokens
    ]
    head = ("numbers of tokens", "step", "tokens", "different", "largest", "where")
    return list(_table(head, rows)) if rows else ["no token was trained on"]


def _figures(replayed: Replayed) -> list[str]:
    figures = replayed.figures
    if not figures:
        return ["figures: metrics.jsonl has none of these steps"]
    different = [one for one in figures if not one.same]
    lines = [f"figures: {len(different)} of {len(figures)} differ"]
    rows = [
        (one.name, str(one.step), _g(one.recorded, 9), _g(one.now, 9), _g(one.difference))
        for one in different[:MOST_FIGURES]
    ]
    if rows:
        lines += _table(("figure", "step", "then", "now", "difference"), rows)
    if len(different) > MOST_FIGURES:
        lines.append(f"… and {len(different) - MOST_FIGURES} more, in replay.json")
    return lines


def _states(replayed: Replayed) -> list[str]:
    if replayed.uncompared:
        return [f"weights are not compared: {replayed.uncompared}"]
    head = ("state", "numbers", "different", "largest", "of the change", "where")
    rows = [
        (
            f"{one.engine} {one.kind}",
            str(one.numbers),
            str(one.different),
            _g(one.largest),
            "-" if math.isnan(one.change) else _g(one.change),
            one.where,
        )
        for one in replayed.states
    ]
    return list(_table(head, rows))


def _verdict(replayed: Replayed) -> str:
    if replayed.same_bits:
        weights = "" if replayed.uncompared else ", weights and optimizer included"
        return f"the replay is the recorded step, bit for bit{weights}"
    if replayed.surroundings:
        return "the replay differs; engine, machine or versions are not those of the recording"
    return "the replay differs, although engine, machine and versions are those of the recording"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Yield the lines of a table whose last column is not padded."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(cells).rstrip()


def _g(value: float | None, digits: int = 3) -> str:
    return "not finite" if value is None else f"{value:.{digits}g}"

"""Lanes: threads that run items of a plan at the same time, each with ranks of its own.

One case keeps a core busy: while the ranks compute the oracle waits, and the other way round. The
rows are those of one lane, in the order of the plan.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch

from engine_conformance.plan import Item
from engine_conformance.ranks import stop_pools, use_lane
from engine_conformance.results import Row

__all__ = ["MOST_HANGS", "RunOne", "default_lanes", "rows_in_order"]

RunOne = Callable[[Item, Sequence[Row]], Row]
"""Running of one item, given the rows before it of which it must know."""

# An engine that hangs in one case hangs in many, and each takes its whole deadline.
MOST_HANGS = 3
# Each lane keeps a pool for every number of ranks, and the oracle's own work gains little by more.
_MOST = 4
_LOOK_SECONDS = 0.05


def default_lanes(device: str, *, rollout: bool) -> int:
    """Return how many lanes a run has that does not say it.

    There is one on an accelerator, whose memory lanes would share, and for a rollout, whose cases
    run alone.
    """
    if rollout or device != "cpu":
        return 1
    return min(_MOST, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)


def rows_in_order(items: Sequence[Item], run: RunOne, *, lanes: int) -> Generator[Row, None, None]:
    """Yield the row of each item in the items' order, whichever ends first.

    Lanes hand out no item behind one that hung. What they have run until then counts, unless it
    hung as well: deadlines are shorter after the first that hung, as they are in one lane.

    Args:
        items: the items to run.
        run: called with an item, and the rows of all items before it; in a lane, with no rows, as
            long as none hung.
        lanes: number of items that run at the same time.
    """
    rows: list[Row] = []
    with _Lanes(items, run, lanes) if lanes > 1 else _NoLanes() as ahead:
        for index, item in enumerate(items):
            hung = sum(row.outcome.status == "timeout" for row in rows)
            row = ahead.take(index)
            if row is None or hung >= MOST_HANGS or (hung and row.outcome.status == "timeout"):
                row = run(item, rows)
            rows.append(row)
            yield row


class _NoLanes:
    """Nothing is run ahead of its turn."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def take(self, index: int) -> Row | None:
        """Return None: no item was run."""
        del index


@dataclass(kw_only=True)
class _Progress:
    """The state that lanes share, under one lock.

    Attributes:
        next: index of the item that is handed out next.
        running: number of items that run.
        alone: whether one of them must run alone.
        ended: no item is handed out any more.
        rows: what has run, by index.
        error: the first error that was none of a case.
    """

    next: int = 0
    running: int = 0
    alone: bool = False
    ended: bool = False
    rows: dict[int, Row] = field(default_factory=dict[int, Row])
    error: BaseException | None = None


class _Lanes:
    """The threads."""

    def __init__(self, items: Sequence[Item], run: RunOne, lanes: int) -> None:
        self._items = items
        self._run = run
        self._progress = _Progress()
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"lane-{number}")
            for number in range(lanes)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._progress.ended = True
            self._changed.notify_all()
        while any(thread.is_alive() for thread in self._threads):
            # After an error or an interrupt no one waits for the rows. A lane may be about to
            # start ranks, and then has to be stopped once more.
            if kind is not None:
                stop_pools()
            for thread in self._threads:
                thread.join(_LOOK_SECONDS)

    def take(self, index: int) -> Row | None:
        """Wait for the row of an item, and return it, or None if no lane runs the item.

        Then no lane runs at all.
        """
        progress = self._progress
        with self._changed:
            self._changed.wait_for(
                lambda: progress.error or index in progress.rows or self._is_over(index)
            )
            if progress.error:
                raise progress.error
            return progress.rows.pop(index, None)

    def _is_over(self, index: int) -> bool:
        progress = self._progress
        return progress.ended and progress.next <= index and not progress.running

    def _work(self, number: int) -> None:
        use_lane(number)
        # Threads of torch are set for each thread of Python.
        torch.set_num_threads(1)
        while (index := self._begin()) is not None:
            self._end(index, self._run_one(index))

    def _begin(self) -> int | None:
        """Wait until the next item may run, and return its index, or None at the end."""
        progress = self._progress
        with self._changed:
            self._changed.wait_for(self._may_begin)
            if progress.ended or progress.next == len(self._items):
                progress.ended = True
                self._changed.notify_all()
                return None
            index = progress.next
            progress.next += 1
            progress.running += 1
            progress.alone = self._items[index].case.alone
            return index

    def _may_begin(self) -> bool:
        progress = self._progress
        if progress.ended or progress.next == len(self._items):
            return True
        alone = progress.alone or self._items[progress.next].case.alone
        return not (alone and progress.running)

    def _run_one(self, index: int) -> Row | BaseException:
        try:
            return self._run(self._items[index], ())
        # The main thread raises it, as it would without lanes.
        except BaseException as error:  # noqa: BLE001
            return error

    def _end(self, index: int, result: Row | BaseException) -> None:
        progress = self._progress
        with self._changed:
            progress.running -= 1
            if progress.running == 0:
                progress.alone = False
            if isinstance(result, Row):
                progress.rows[index] = result
                progress.ended |= result.outcome.status == "timeout"
            else:
                progress.error = progress.error or result
                progress.ended = True
            self._changed.notify_all()

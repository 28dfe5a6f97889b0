"""Tests of lanes: rows in the plan's order, whichever ends first, and as one lane has them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine_conformance import lanes, ranks
from engine_conformance.cases import Case, Target
from engine_conformance.cases._case import BOTH_PRECISIONS, LM
from engine_conformance.fixtures.pictures import (
    PictureOracle,
    draw_document,
    write_picture_model,
)
from engine_conformance.lanes import MOST_HANGS, default_lanes, rows_in_order
from engine_conformance.plan import Item
from engine_conformance.ranks import PoolsStopped, RankPool, close_pools, get_pool, use_lane
from engine_conformance.results import Outcome, Row, Status

LONG = 60.0


def make_item(name: str, *, alone: bool = False) -> Item:
    case = Case(
        id=name,
        function=lambda _: None,
        since="1.0",
        requires=(),
        probes=None,
        world=(1,),
        dtypes=BOTH_PRECISIONS,
        model_types=(LM,),
        profile="engine",
        quick=True,
        slow=False,
        provisional=False,
        partner=False,
        alone=alone,
        families=(),
    )
    return Item(case=case, target=Target(backend="none", root=Path()))


def make_row(item: Item, status: Status = "passed", message: str = "") -> Row:
    return Row(
        case=item.case.id,
        must="",
        profile="engine",
        group="core",
        setting=item.setting,
        outcome=Outcome(status=status, seconds=0.0, message=message),
    )


def run_all(
    items: Sequence[Item], run: Callable[[Item, Sequence[Row]], Row], *, lanes: int
) -> list[tuple[str, str, str]]:
    return [
        (row.case, row.outcome.status, row.outcome.message)
        for row in rows_in_order(items, run, lanes=lanes)
    ]


def test_rows_come_in_the_plans_order_whichever_ends_first() -> None:
    second_ended = threading.Event()

    def run(item: Item, _: Sequence[Row]) -> Row:
        if item.case.id == "0":
            assert second_ended.wait(LONG)
        else:
            second_ended.set()
        return make_row(item)

    items = [make_item(str(index)) for index in range(6)]
    assert [row[0] for row in run_all(items, run, lanes=2)] == list("012345")


@pytest.mark.parametrize("lanes", [2, 3])
def test_what_runs_alone_has_no_other_beside_it(lanes: int) -> None:
    running: set[str] = set()
    met: dict[str, set[str]] = {}
    looking = threading.Lock()

    def run(item: Item, _: Sequence[Row]) -> Row:
        with looking:
            running.add(item.case.id)
            for one in running:
                met.setdefault(one, set()).update(running)
        # Others may begin here, if any may run beside it.
        for _ in range(1000):
            os.sched_yield()
        with looking:
            running.remove(item.case.id)
        return make_row(item)

    items = [make_item(str(index), alone=index in (2, 3)) for index in range(8)]
    run_all(items, run, lanes=lanes)
    assert met["2"] == {"2"}
    assert met["3"] == {"3"}


@pytest.mark.parametrize("hanging", [{"1"}, {"0", "1"}, {"0", "2", "3"}, {"1", "2", "3", "5"}])
def test_hangs_are_reported_as_in_one_lane(hanging: set[str]) -> None:
    def run(item: Item, before: Sequence[Row]) -> Row:
        hung = [row.case for row in before if row.outcome.status == "timeout"]
        if len(hung) >= MOST_HANGS:
            return make_row(item, "not-run", f"stopped: {hung}")
        hangs = item.case.id in hanging
        return make_row(item, "timeout" if hangs else "passed", f"{hung}" if hangs else "")

    items = [make_item(str(index)) for index in range(8)]
    alone = run_all(items, run, lanes=1)
    for count in (2, 4):
        assert run_all(items, run, lanes=count) == alone


def test_no_lane_starts_an_item_behind_one_that_hung() -> None:
    started = list[str]()

    def run(item: Item, before: Sequence[Row]) -> Row:
        started.append(item.case.id)
        ahead = threading.current_thread() is not threading.main_thread()
        assert not (ahead and before)
        return make_row(item, "timeout" if item.case.id == "0" else "passed")

    items = [make_item(str(index), alone=True) for index in range(4)]
    assert [row[0] for row in run_all(items, run, lanes=2)] == list("0123")
    assert started == list("0123")


def test_an_error_that_is_no_cases_reaches_the_caller() -> None:
    def run(item: Item, _: Sequence[Row]) -> Row:
        if item.case.id == "1":
            raise LookupError(item.case.id)
        return make_row(item)

    with pytest.raises(LookupError):
        run_all([make_item(str(index)) for index in range(4)], run, lanes=2)
    close_pools()


class _Waiting(RankPool):
    """Ranks that never answer, until they are stopped."""

    def __init__(self) -> None:
        super().__init__(1)
        self.stopped = threading.Event()

    def stop(self) -> None:
        self.stopped.set()


def test_lanes_end_when_their_ranks_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    running = {_Waiting(), _Waiting()}
    monkeypatch.setattr(ranks, "_running", running)
    left = list(running)
    refused = list[str]()

    def run(item: Item, _: Sequence[Row]) -> Row:
        if item.case.id != "0":
            assert left.pop().stopped.wait(LONG)
            # An item that goes on after its call has failed cannot start ranks.
            with pytest.raises(PoolsStopped):
                get_pool(1).start()
            refused.append(item.case.id)
        return make_row(item)

    coming = rows_in_order([make_item(str(index)) for index in range(4)], run, lanes=2)
    assert next(coming).case == "0"
    while left:
        time.sleep(0.01)
    # So does an interrupt, which leaves the loop over the rows.
    coming.close()
    assert sorted(refused) == ["1", "2"], "no lane begins another item"
    assert not [one for one in threading.enumerate() if one.name.startswith("lane-")]
    running.clear()
    close_pools()


def test_each_lane_has_pools_of_its_own() -> None:
    found: list[RankPool] = []

    def look() -> None:
        use_lane(1)
        found.append(get_pool(1))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found[0] is not get_pool(1)
    use_lane(1)
    try:
        assert found[0] is get_pool(1)
    finally:
        use_lane(0)
        close_pools()


def test_lanes_are_used_on_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes.os, "sched_getaffinity", lambda _: set(range(16)))
    assert default_lanes("cpu", rollout=False) == 4
    assert default_lanes("cuda", rollout=False) == 1
    assert default_lanes("cpu", rollout=True) == 1


def test_lanes_that_share_an_oracle_with_images_have_the_gradients_of_one(tmp_path: Path) -> None:
    """The gradients once met in the model, where each lane cleared the other's."""
    oracle = PictureOracle(write_picture_model(tmp_path))
    documents = [[draw_document(seed, 3, (2, 4), 2), draw_document(seed + 9, 6)] for seed in (1, 2)]
    wanted = [oracle.gradients(one) for one in documents]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(5):
            found = list(threads.map(oracle.gradients, documents))
            for (loss, gradients), (own_loss, own) in zip(found, wanted, strict=True):
                assert loss == own_loss
                assert gradients.keys() == own.keys()
                for name, gradient in gradients.items():
                    assert (gradient is None) == (own[name] is None), name
                    assert gradient is None or torch.equal(gradient, own[name]), name


def test_lanes_that_load_the_oracle_at_once_leave_the_default_dtype_alone(tmp_path: Path) -> None:
    """Loading in float64 once made it the default of every thread, and mixed models' dtypes."""
    folder = write_picture_model(tmp_path)
    seen: set[torch.dtype] = set()

    def load(_: int) -> set[torch.dtype]:
        oracle = PictureOracle(folder)
        return {weight.dtype for weight in oracle.weights.values()}

    with ThreadPoolExecutor(3) as threads:
        loading = [threads.submit(load, number) for number in range(6)]
        while not all(one.done() for one in loading):
            seen.add(torch.get_default_dtype())
    assert seen == {torch.float32}
    assert [one.result() for one in loading] == [{torch.float64}] * 6

"""Tests of the rank pool: results by rank, failures of every kind, and a good call after each."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import Popen
from typing import IO

import pytest
import torch

from engine_conformance import rank_templates, ranks
from engine_conformance.rank_templates import Templates
from engine_conformance.ranks import (
    RankError,
    RankPool,
    RankProcess,
    close_pools,
    get_pool,
    launched_by,
)
from engine_conformance.seeds import use_seed

# Ranks that say which template they are of, without an import of torch.
LIGHT_TEMPLATE = """
import os
from multiprocessing.connection import Connection
from engine_conformance._rank_template import serve
from engine_conformance._rank_worker import RankReply
template = os.getpid()

def run(descriptor):
    pipe = Connection(descriptor)
    pipe.recv_bytes()
    while True:
        pipe.send(RankReply(kind="returned", value=template))
        if pipe.recv() is None:
            return

serve({}, run)
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def alone() -> Iterator[RankPool]:
    pool = RankPool(1)
    yield pool
    pool.close()


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def next_call_passes(pool: RankPool) -> None:
    want = {1: 1.0, 2: 3.0}[pool.world]
    assert pool.run("rank_functions:total", value=1.0) == [want] * pool.world


@pytest.mark.slow
def test_results_are_by_rank(pool: RankPool) -> None:
    assert pool.run("rank_functions:own", per_rank=[{"value": 5}, {"value": 6}]) == [5, 6]
    next_call_passes(pool)


@pytest.mark.slow
def test_a_launcher_starts_the_ranks_inside_its_context() -> None:
    started: list[int] = []

    def launch(descriptor: int, log: IO[bytes], environment: Mapping[str, str]) -> RankProcess:
        code = f"from engine_conformance._rank_worker import main; main({descriptor})"
        process = Popen(
            [sys.executable, "-P", "-c", code], pass_fds=[descriptor], env=environment, stdout=log
        )
        started.append(process.pid)
        return process

    with launched_by(launch), RankPool(1) as pool:
        assert list(pool.pids) == started
        next_call_passes(pool)
    assert len(started) == 1
    with RankPool(1) as pool:
        assert len(started) == 1


def test_a_rank_is_as_a_new_process_is(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.start()
    monkeypatch.chdir(tmp_path)
    with RankPool(2) as second:
        seen = pool.run("rank_functions:as_new") + second.run("rank_functions:as_new")

    for name in ("pid", "random", "numpy"):
        assert len({one[name] for one in seen}) == 4, name
    # An engine that depends on the order of a set fails on two ranks.
    assert seen[0]["hash"] != seen[1]["hash"]
    assert seen[2]["folder"] == seen[3]["folder"] == str(tmp_path)
    assert seen[2]["test"] == os.environ["PYTEST_CURRENT_TEST"]


@pytest.fixture
def templates(monkeypatch: pytest.MonkeyPatch) -> Iterator[Templates]:
    """Yield templates that import nothing, in place of those of other tests."""
    monkeypatch.setattr(rank_templates, "_COMMAND", LIGHT_TEMPLATE)
    monkeypatch.setattr(ranks, "_templates", Templates())
    yield ranks._templates
    ranks._templates.close()


def test_ranks_of_another_environment_are_of_another_template(
    templates: Templates, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    for value in ("1", "1", "2"):
        monkeypatch.setenv("READ_WHEN_IMPORTED", value)
        with RankPool(1) as pool:
            seen += pool.run("any:function")
    assert seen[0] == seen[1]
    assert seen[2] != seen[0]


def test_a_template_that_cannot_start_is_reported_as_its_rank(
    templates: Templates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_templates, "_COMMAND", "raise ImportError('no torch in {}')")
    with pytest.raises(RankError, match="no torch in") as caught:
        RankPool(1).start()
    assert caught.value.failures[0].kind == "died"
    assert "exit code 1" in caught.value.failures[0].text


def test_a_template_that_was_killed_is_started_again(templates: Templates) -> None:
    with RankPool(1) as pool:
        template = templates._running[0].process
        template.kill()
        template.wait()
        # Its rank lives on.
        assert pool.run("any:function") == [template.pid]
    with RankPool(1) as pool:
        assert pool.run("any:function") != [template.pid]


def test_ranks_are_reused_seeded_and_single_threaded(pool: RankPool) -> None:
    before = pool.pids
    first = pool.run("rank_functions:surroundings")
    use_seed(3)
    try:
        second = pool.run("rank_functions:surroundings")
    finally:
        use_seed(0)
    assert pool.pids == before
    assert (first[0]["seed"], second[1]["seed"]) == (0, 3)
    assert [seen["RANK"] for seen in first] == ["0", "1"]
    assert first[0]["OMP_NUM_THREADS"] == "1"
    assert first[0]["threads"] == 1
    assert first[0]["backend"] == "gloo"
    assert torch.equal(first[0]["random"], second[1]["random"])


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [("exit_on", "raised", "SystemExit: 7"), ("crash_on", "died", "in crash_on")],
)
def test_rank_that_dies_is_reported(alone: RankPool, function: str, kind: str, text: str) -> None:
    with pytest.raises(RankError, match=text) as caught:
        alone.run(f"rank_functions:{function}", rank=0)
    assert caught.value.failures[0].kind == kind
    assert alone.pids == ()
    next_call_passes(alone)


def test_rank_that_raises_is_told_from_its_victim(pool: RankPool) -> None:
    with pytest.raises(RankError, match="odd one out") as caught:
        pool.run("rank_functions:raise_on", rank=0)
    assert caught.value.failures[0].kind == "raised"
    assert caught.value.failures[0].exception == "builtins.KeyError"
    victim = caught.value.failures[1]
    assert victim.kind == "stalled"
    assert "barrier" in victim.text
    next_call_passes(pool)


@pytest.mark.slow
def test_stall_gives_every_stack_and_kills_own_processes(pool: RankPool) -> None:
    pids = pool.pids
    with pytest.raises(RankError, match=r"in stall_on") as caught:
        pool.run("rank_functions:stall_on", rank=0, deadline=10.0)
    assert [failure.kind for failure in caught.value.failures] == ["stalled", "stalled"]
    assert "barrier" in caught.value.failures[1].text
    assert not any(running(pid) for pid in pids)
    next_call_passes(pool)


def test_rank_that_died_while_idle_is_reported(alone: RankPool) -> None:
    alone.start()
    os.kill(alone.pids[0], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 0 died\nexit code -9"):
        alone.run("rank_functions:own", value=1)


def test_result_that_cannot_travel_is_an_error(pool: RankPool) -> None:
    with pytest.raises(RankError, match="pickle"):
        pool.run("rank_functions:unpicklable")


def test_what_the_error_of_a_job_held_is_let_go(pool: RankPool) -> None:
    pool.run("rank_functions:hold_by_error")
    pool.run("rank_functions:own", value=1)
    assert pool.run("rank_functions:still_held") == [[False], [False]]


def test_deadline_must_be_shorter_than_the_groups(pool: RankPool) -> None:
    with pytest.raises(ValueError, match="within the group's 900"):
        pool.run("rank_functions:own", value=1, deadline=1000.0)
    with pytest.raises(ValueError, match="world 0"):
        RankPool(0)


def test_cached_pool_of_one_has_a_group() -> None:
    pool = get_pool(1)
    assert get_pool(1) is pool
    assert pool.run("rank_functions:total", value=4.0) == [4.0]
    pids = pool.pids
    close_pools()
    assert not any(running(pid) for pid in pids)
    assert get_pool(1) is not pool
    close_pools()

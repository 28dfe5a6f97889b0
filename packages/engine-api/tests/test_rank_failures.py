"""Tests of failed ranks: every other rank names them, whatever it waits in."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import distributed_c10d

from engine_api import heartbeat
from engine_api.codec import CodecError
from engine_api.comm import SingleComm, together
from engine_api.connections import Process, hang_up
from engine_api.heartbeat import mark_as_agreed, watched, watched_each
from engine_api.stores import serve_store

PEERS = Path(__file__).with_name("rank_peers.py")
DEADLINE_S = 240.0
# A timeout that no test waits for.
LONG_S = 600.0
SHORT_S = 6.0
SAID = {
    "killed": "is gone (killed? out of memory?)",
    "stopped": ("is stopped (SIGSTOP?)", "it has been silent for"),
    "exits": "SystemExit: 3 (in call at step 3 (call 4))",
    "raises": 'KeyError: "this rank\'s own mistake" (in call at step 3 (call 4))',
}


@contextlib.contextmanager
def ranks(world, *arguments):
    """Start ``world`` processes of rank_peers over a store of this process.

    None of them outlives the block.
    """
    store = serve_store("127.0.0.1", world, DEADLINE_S)
    common = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(PEERS), *map(str, arguments)],
            env={**os.environ, **common, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        yield started
    finally:
        for process in started:
            # SIGKILL also ends a stopped process.
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize(
    ("world", "call"),
    [
        (2, "all_reduce"),
        (3, "together"),
        *(
            pytest.param(world, call, marks=pytest.mark.nightly)
            for world, call in (
                (3, "all_reduce"),
                (2, "all_gather"),
                (3, "all_gather"),
                (2, "together"),
            )
        ),
    ],
)
@pytest.mark.parametrize("how", sorted(SAID))
def test_every_other_rank_names_the_one_that_goes_away(how, world, call):
    limit = SHORT_S if how == "stopped" else LONG_S
    with ranks(world, how, call, limit) as started:
        *left, gone = started
        for process in left:
            end = time.monotonic() + DEADLINE_S
            said, errors = process.communicate(timeout=end - time.monotonic())
            assert process.returncode == 0, errors
            told = json.loads(said)
            assert list(told) == [str(world - 1)], "another rank is blamed"
            text = told[str(world - 1)]
            wanted = SAID[how]
            assert any(w in text for w in ([wanted] if isinstance(wanted, str) else wanted)), text
            assert f"process {gone.pid} on" in text, "its process and log are not named"
            assert "noticed in call at step 3 (call 4)" in text


def test_one_rank_alone_has_no_watch_and_no_thread():
    with watched("a call"):
        assert together(SingleComm(), lambda: 1) == [1]
    assert list(watched_each("an export", iter([1, 2]))) == [1, 2]
    assert heartbeat._current is None


@pytest.mark.parametrize("lost", [{}, {1: "it has been silent for 60 s"}])
def test_who_leaves_after_a_rank_was_lost_aborts_its_groups(monkeypatch, lost):
    """NCCL's end would wait for the lost rank for good."""
    aborted = []
    monkeypatch.setattr(heartbeat, "abort_groups", lambda: aborted.append(True))
    store = serve_store("127.0.0.1", 1, DEADLINE_S)
    watch = heartbeat.Watch("test", store, 0, [Process.this()], LONG_S)
    monkeypatch.setattr(heartbeat, "_current", watch)
    monkeypatch.setattr(heartbeat, "_members", 1)
    watch._gone.update(lost)
    heartbeat.Membership(watch).leave()
    assert aborted == [True] * len(lost)


class Group:
    """A group whose abort ends when all have begun, as where NCCL's kernels wait for each other."""

    def __init__(self, all_begun, error=None):
        self.all_begun = all_begun
        self.error = error

    def abort(self):
        self.all_begun.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error


def test_groups_are_aborted_at_once(monkeypatch):
    all_begun = threading.Barrier(3)
    groups = dict.fromkeys(Group(all_begun) for _ in range(3))
    monkeypatch.setattr(distributed_c10d, "_pg_names", groups)
    heartbeat.abort_groups()


def test_an_abort_that_fails_does_not_keep_other_groups_from_theirs(monkeypatch):
    all_begun = threading.Barrier(2)
    failing = RuntimeError("no such communicator")
    groups = dict.fromkeys([Group(all_begun, failing), Group(all_begun)])
    monkeypatch.setattr(distributed_c10d, "_pg_names", groups)
    with pytest.raises(ExceptionGroup) as caught:
        heartbeat.abort_groups()
    assert caught.value.exceptions == (failing,)


def test_connections_are_closed_although_a_group_cannot_be_aborted(monkeypatch):
    closed = []
    groups = dict.fromkeys([Group(threading.Barrier(1), RuntimeError("no such communicator"))])
    monkeypatch.setattr(distributed_c10d, "_pg_names", groups)
    monkeypatch.setattr(heartbeat, "hang_up", lambda others, spare: closed.append(len(others)))
    monkeypatch.setattr(heartbeat, "GRACE_S", 0.0)
    store = serve_store("127.0.0.1", 1, DEADLINE_S)
    watch = heartbeat.Watch("test", store, 0, [Process.this(), Process.this()], LONG_S)
    opened = watch.enter("a call", "engine")
    watch._gone[1] = "it is gone"
    watch._next_round()
    watch.stop()
    assert opened.aborted
    assert closed == [1]


def test_an_abandoned_export_closes_what_it_reads():
    closed = []

    def tensors():
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    reader = watched_each("an export", tensors())
    assert next(reader) == 1
    reader.close()
    assert closed == [True]


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (
            RuntimeError(
                "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
                "Connection closed by peer"
            ),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo/"), False),
    ],
)
def test_a_mistake_of_the_rank_itself_is_no_failure_of_a_collective(error, is_one):
    import torch.distributed  # noqa: F401 - whose errors are asked for

    assert heartbeat.is_distributed(error) is is_one


def test_an_error_of_which_all_ranks_heard_is_marked():
    error = CodecError("no")
    assert not heartbeat._is_agreed(error)
    assert heartbeat._is_agreed(mark_as_agreed(error))


def test_a_process_that_ended_is_gone_and_another_one_of_its_number_is_not_it():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
    here = Process.this()
    started = heartbeat_started(child.pid)
    peer = Process(
        pid=child.pid, started=started, kernel=here.kernel, host="", log="", addresses=()
    )
    assert not peer.is_gone()
    assert Process(
        pid=child.pid, started="1", kernel=here.kernel, host="", log="", addresses=()
    ).is_gone()
    assert not Process(
        pid=child.pid, started="1", kernel="another host", host="", log="", addresses=()
    ).is_gone()
    child.communicate("\n")
    assert peer.is_gone()


def heartbeat_started(pid):
    from engine_api.connections import _stat

    return _stat(pid)[1]


def test_only_connections_to_the_named_processes_are_shut_down():
    code = (
        "import socket,sys; s=socket.create_connection(('127.0.0.1', int(sys.argv[1]))); "
        "print(flush=True); sys.stdin.read()"
    )
    here = Process.this()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server.settimeout(DEADLINE_S)
        found = []
        for _ in range(2):
            child = subprocess.Popen(
                [sys.executable, "-c", code, str(server.getsockname()[1])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(child.communicate)
            connection = stack.enter_context(server.accept()[0])
            child.stdout.readline()
            peer = Process(
                pid=child.pid,
                started=heartbeat_started(child.pid),
                kernel=here.kernel,
                host="",
                log="",
                addresses=(),
            )
            found.append((peer, connection))
        (first, cut), (_, kept) = found
        assert hang_up([first], spare={server.getsockname()[1]}) == 0
        assert hang_up([first], spare=set()) == 1
        assert cut.recv(1) == b""
        kept.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            kept.recv(1)

"""Ranks that meet through the rendezvous store.

The store holds data only, and the error names a rank that is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from engine_api.codec import encode

DEADLINE_S = 240.0
PEER = """
import json, sys
from engine_api.errors import EngineError
from engine_trainer.placement.rendezvous import StoreComm
comm = StoreComm(float(sys.argv[1]))
try:
    print(json.dumps(["met", comm.all_gather({"rank": comm.rank, 1: (float("inf"), None)})\
[-1]["rank"]]), flush=True)
    if len(sys.argv) > 2 and comm.rank == 1:
        sys.stdin.read()  # until the test ends it
    print(json.dumps(["met again", len(comm.all_gather(None))]), flush=True)
except EngineError as error:
    print(json.dumps([type(error).__name__, str(error)]), flush=True)
"""
SETS = """
import sys
from torch.distributed import TCPStore
TCPStore("127.0.0.1", int(sys.argv[1]), None, False).set(sys.argv[2], sys.stdin.buffer.read())
"""
SERVES = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True)
print(store.port, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def ranks(world, port, *arguments):
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PEER, *map(str, arguments)],
            env={**environment, "RANK": str(rank)},
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
            process.kill()
            process.communicate()


@pytest.fixture
def store():
    """The launcher's store, as torchrun has it."""
    return dist.TCPStore(
        "127.0.0.1",
        0,
        None,
        is_master=True,
        timeout=timedelta(seconds=DEADLINE_S),
        wait_for_workers=False,
    )


def said(process):
    out, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    return [json.loads(line) for line in out.splitlines()]


class Runs:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


@pytest.mark.slow
def test_ranks_agree_through_the_launchers_store(store):
    with ranks(2, store.port, DEADLINE_S) as started:
        assert [said(process) for process in started] == [[["met", 1], ["met again", 2]]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("0/1", "pickle"),
        ("0/0", "another value"),
        ("process/0/1", "pickle"),
        ("0/1", "foreign class"),
    ],
)
def test_a_key_set_from_outside_runs_nothing_and_is_a_typed_error(store, tmp_path, key, kind):
    head = b'{"$":"class","c":"os.mkdir","v":[]}'
    value = {
        "pickle": pickle.dumps(Runs(tmp_path / "ran")),
        "another value": encode({"rank": 7}),
        "foreign class": b"EHC1" + len(head).to_bytes(8, "little") + head,
    }[kind]
    # Set from another process, before the ranks come.
    outside = [sys.executable, "-c", SETS, str(store.port), f"engine_trainer/{key}"]
    subprocess.run(outside, input=value, check=True)
    with ranks(2, store.port, 10.0) as started:
        found = [said(process) for process in started]
    assert not (tmp_path / "ran").exists()
    # The rank that owns the key finds it taken. The other rank reads a value that no rank wrote, or
    # waits for it in vain.
    assert found[int(key[-1])][-1][0] == "CodecError"
    assert all(rows[-1][0] in ("CodecError", "RankFailure") for rows in found), found


@pytest.mark.slow
def test_a_rank_that_dies_before_the_groups_are_made_is_named_at_once(store):
    with ranks(2, store.port, 10 * DEADLINE_S, "one stays away") as started:
        assert json.loads(started[1].stdout.readline()) == ["met", 1]
        started[1].kill()
        found = said(started[0])
    kind, text = found[-1]
    assert kind == "RankFailure"
    assert f"rank 1: its process {started[1].pid} on" in text
    assert "is gone" in text


@pytest.mark.slow
def test_a_stopped_rank_is_named_at_the_deadline(store):
    with ranks(2, store.port, 20.0, "one stays away") as started:
        assert json.loads(started[1].stdout.readline()) == ["met", 1]
        os.kill(started[1].pid, signal.SIGSTOP)
        kind, text = said(started[0])[-1]
    assert kind == "RankFailure"
    assert "is stopped" in text


@pytest.mark.slow
def test_a_lost_store_is_said_to_be_lost():
    server = subprocess.Popen(
        [sys.executable, "-c", SERVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        port = int(server.stdout.readline())
        with ranks(2, port, 10 * DEADLINE_S, "one stays away") as started:
            assert json.loads(started[1].stdout.readline()) == ["met", 1]
            server.kill()
            kind, text = said(started[0])[-1]
        assert kind == "RankFailure"
        assert "store" in text
    finally:
        server.kill()
        server.communicate()

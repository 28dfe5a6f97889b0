"""Store at which sender and receivers of a broadcast meet, and errors when it is not reached."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from plan_sources import rows, source
from waiting import NEVER_S

from rollout_fp8.export.plan import make_plan
from rollout_fp8.transports import collective
from rollout_fp8.transports.channel import PeerError
from rollout_fp8.transports.collective import (
    BroadcastGroup,
    CollectiveIncoming,
    CollectiveOutgoing,
    _store,
)

CPU = torch.device("cpu")


class Told:
    """Channel at whose other end a sender says where to join."""

    def __init__(self, port: int) -> None:
        self.port = port

    def receive(self, tag: str) -> tuple[Any, ...]:
        assert tag == "join"
        return "127.0.0.1", self.port, 1, 2


def test_a_store_that_a_receiver_does_not_reach_is_named_with_what_to_look_at() -> None:
    plan = make_plan(
        [source("w", rows((128, 128), 1))], dtype=torch.bfloat16, bucket_bytes=1 << 20
    ).wire
    with socket.socket() as held:  # bound and deaf: nothing else gets the port meanwhile
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        channel: Any = Told(port)
        with pytest.raises(
            PeerError, match=rf"cannot join .*127\.0\.0\.1:{port}[^$]*to do: .*reach"
        ):
            CollectiveIncoming(plan, CPU, timeout_s=1.0).open(channel)


def test_a_store_that_cannot_be_opened_is_named_with_what_to_look_at() -> None:
    with pytest.raises(
        PeerError, match=r"cannot open .*no-such-host\.invalid[^$]*to do: .*address of this host"
    ):
        CollectiveOutgoing(CPU, "no-such-host.invalid", timeout_s=1.0).open([])


def make_groups(monkeypatch, size: int) -> list[BroadcastGroup]:
    """Return the sender and its receivers, in one process, with a timeout that no test outlasts."""
    # The environment is not for threads to change.
    monkeypatch.setattr(collective, "_without_watchdog", nullcontext)
    store = _store("127.0.0.1", 0, size, NEVER_S)
    stores = [store, *(_store("127.0.0.1", store.port, size, NEVER_S) for _ in range(size - 1))]
    with ThreadPoolExecutor(size) as threads:
        made = [
            threads.submit(BroadcastGroup, stores[rank], rank, size, CPU, NEVER_S)
            for rank in range(size)
        ]
        return [future.result() for future in made]


def test_a_receiver_leaves_without_waiting_for_the_broadcasts_that_it_expects(monkeypatch) -> None:
    """Check that a sender does not wait for the group's timeout.

    A receiver that fails reports to its sender after it has left.
    """
    sender, leaves = make_groups(monkeypatch, 2)
    buffer = torch.zeros(1 << 20, dtype=torch.uint8)
    coming = [leaves.broadcast(buffer) for _ in range(2)]
    leaves.abort()
    coming.clear()
    # Only now does the first of them come, so that the group itself ends, too.
    sender.broadcast(buffer.clone())
    sender.abort()


# A sender whose receiver is there and expects nothing; the receiver leaves when its standard input
# is closed.
ENDS_WITH_A_BROADCAST_BEGUN = """
import os, subprocess, sys
import torch
from engine_api.stores import reach_store, serve_store
from rollout_fp8.transports.collective import BroadcastGroup

cpu, long_s = torch.device("cpu"), 3600.0
if len(sys.argv) > 2:
    group = BroadcastGroup(reach_store("127.0.0.1", int(sys.argv[2]), 2, long_s), 1, 2, cpu, long_s)
    sys.stdin.read()
    os._exit(0)
store = serve_store("127.0.0.1", 2, long_s)
# Its standard input is closed where this process's interpreter frees its modules: late.
command = [sys.executable, sys.argv[1], "-", str(store.port)]
receiver = subprocess.Popen(command, stdin=subprocess.PIPE)
group = BroadcastGroup(store, 0, 2, cpu, long_s)
begun = group.broadcast(torch.zeros(1 << 24, dtype=torch.uint8))
del begun
group.abort()
del group
sys.exit("the sync failed")
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_a_process_that_ends_after_it_left_a_broadcast_ends_as_it_wants_to(tmp_path) -> None:
    """Check that the process is not aborted when the others leave while its interpreter ends."""
    script = tmp_path / "sender.py"
    script.write_text(ENDS_WITH_A_BROADCAST_BEGUN)
    done = subprocess.run(
        [sys.executable, str(script), str(script)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "the sync failed"), done.stderr


def test_one_that_failed_and_keeps_its_error_holds_no_other(monkeypatch) -> None:
    """Check that a kept error keeps no connection.

    Over gloo, connections live as long as any reference to a broadcast over them.
    """
    sender, waits, leaves = make_groups(monkeypatch, 3)
    buffer = torch.zeros(1 << 20, dtype=torch.uint8)
    coming = [waits.broadcast(buffer) for _ in range(2)]
    leaves.abort()

    def send_three() -> None:
        for _ in range(3):
            sender.wait(sender.broadcast(buffer.clone()))

    with pytest.raises(PeerError, match="a broadcast failed") as kept:
        send_three()
    sender.abort()
    waits.abort()
    # This waits for the two broadcasts. They end because the sender has left, not because its error
    # is freed.
    coming.clear()
    assert kept.value

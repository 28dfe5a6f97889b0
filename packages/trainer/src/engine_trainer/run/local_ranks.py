"""The ranks of one machine, as ``engine-train … --ranks N`` starts them.

torchrun ends a run that Ctrl-C stops with a traceback and status 1, and kills its ranks 30 seconds
later. Here the ranks finish their step, however long it is, and the status is theirs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from engine_api.stores import serve_store

# The variables name torchrun's own contract with its ranks: the store is the launcher's, and the
# ranks end with the launcher.
_VARIABLES = {"TORCHELASTIC_RUN_ID": "engine-train", "TORCHELASTIC_USE_AGENT_STORE": "True"}
_HOST = "127.0.0.1"
_STORE_S = 3600.0
_LOOK_S = 0.1
# Seconds that the other ranks have to end by themselves, after one has failed.
GRACE_S = 60.0
# Presses of Ctrl-C: the first one saves, the second one aborts, and this one kills.
_KILLING_PRESS = 3


def run_ranks(arguments: Sequence[str], ranks: int) -> int:
    """Run ``python -m engine_trainer ARGUMENTS`` as ``ranks`` processes.

    SIGTERM is passed on to the ranks. They receive Ctrl-C from the terminal.

    Returns 0 if all ranks do, and else the status of the first one that failed; 128 plus the
    signal's number for a rank that a signal ended.
    """
    store = serve_store(_HOST, ranks, _STORE_S)
    started: list[subprocess.Popen[bytes]] = []
    presses = 0

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal presses
        del frame
        presses += number == signal.SIGINT
        if number == signal.SIGTERM or presses >= _KILLING_PRESS:
            for rank in started:
                rank.send_signal(number if number == signal.SIGTERM else signal.SIGKILL)

    before = {n: signal.signal(n, pass_on) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        for rank in range(ranks):
            # Not at once: those that were started are ended below, also if another is not.
            started.append(_start(arguments, rank, ranks, store.port))  # noqa: PERF401
        return _wait(started)
    finally:
        for process in started:
            process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(arguments: Sequence[str], rank: int, ranks: int, port: int) -> subprocess.Popen[bytes]:
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "engine_trainer", *arguments],
        env=os.environ | _VARIABLES | own,
    )


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all ranks, and return the status of the command."""
    status = 0
    end = float("inf")
    while any(rank.poll() is None for rank in started):
        failed = [code for rank in started if (code := rank.poll())]
        if failed and not status:
            status = failed[0]
            end = time.monotonic() + GRACE_S
        if time.monotonic() > end:
            for rank in started:
                rank.kill()
        time.sleep(_LOOK_S)
    codes = [rank.wait() for rank in started]
    status = status or next((code for code in codes if code), 0)
    return 128 - status if status < 0 else status

"""The program of the ranks of test_rank_failures: collectives, in one of which the last rank fails.

Usage: ``python rank_peers.py HOW CALL TIMEOUT_S``, with ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``
and ``MASTER_PORT`` in the environment. A remaining rank prints the failures that it received as
JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from engine_api.comm import TorchComm, together
from engine_api.errors import RankFailure
from engine_api.heartbeat import watched

FATAL_CALL = 3


def go_away(how: str) -> None:
    """Stop taking part, in the way that ``how`` names."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "exits":
        sys.exit(3)
    raise KeyError("this rank's own mistake")


def work(how: str, call: str, comm: TorchComm) -> None:
    """Make five calls of the kind ``call``, in one of which the last rank fails."""
    fatal = comm.rank == comm.world_size - 1
    for step in range(5):
        with watched(f"call at step {step}"):
            if fatal and step == FATAL_CALL:
                go_away(how)
            if call == "all_reduce":
                dist.all_reduce(torch.ones(4))
            elif call == "all_gather":
                comm.all_gather(step)
            else:
                together(comm, lambda: None)


def main(how: str, call: str, timeout_s: float) -> None:
    """Make the calls, and print the failures of other ranks."""
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", timeout=limit)
    comm = TorchComm(limit)
    try:
        work(how, call, comm)
    except RankFailure as failure:
        print(json.dumps({str(rank): text for rank, text in failure.failures.items()}), flush=True)
    except KeyError:
        # This rank stays alive, outside of any call, until the test has read the other ranks.
        sys.stdin.read()
    finally:
        comm.close()
    left = [
        thread.name for thread in threading.enumerate() if thread is not threading.main_thread()
    ]
    if left:
        sys.exit(f"threads are left: {left}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))

"""``engine-train`` with a fault in its last rank: ``python rank_faults.py FAULT sft|rl FILE``.

With ``waits`` the last rank continues only after a line on its standard input, so that a test can
kill or stop it.
"""

from __future__ import annotations

import os
import sys

import rl_runs  # noqa: F401 - its reward is registered

import engine_trainer.rl.learner
import engine_trainer.sft
from engine_trainer.cli import main
from engine_trainer.rewards import register

CALLS = 3  # of a loss or a reward before the fault


def fail(fault: str) -> None:
    """Be at fault."""
    if fault == "exits":
        sys.exit(3)
    if fault == "raises":
        raise KeyError("this rank's own mistake")
    print("waiting", flush=True)
    sys.stdin.readline()


def faulty(function, fault):
    """Return ``function``, whose later calls fail."""
    calls = [0]

    def call(*arguments):
        calls[0] += 1
        if calls[0] == CALLS:
            fail(fault)
        return function(*arguments)

    call.__dict__ |= function.__dict__  # what a loss needs
    return call


def run(fault: str, task: str, file: str) -> int:
    """Run the command; the fault is in the loss of SFT, in the reward of RL."""
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if task == "sft" and is_last:
        engine_trainer.sft.sft_loss = faulty(engine_trainer.sft.sft_loss, fault)

    @register("at fault")
    def at_fault():
        def share(sample):
            return sum(c == "7" for c in sample.completion) / 4

        return faulty(share, fault) if is_last else share

    return main([task, file])


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))

"""A process that judges: ``python -m engine_trainer.rewards.worker FD``, started by ``workers``.

It reads ``(reward's number, samples)`` and writes ``(place, outcome)`` rows and then None. When its parent ends, however it ends,
the pipe closes and it ends too.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

from engine_api.errors import EngineError
from engine_trainer.rewards.calls import call_all
from engine_trainer.rewards.registry import RewardSpec
from engine_trainer.rewards.sample import RewardFn


def main(descriptor: int) -> None:
    """Serve until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches it too; its parent decides
    parent = Connection(descriptor)
    try:
        specs, concurrency = parent.recv()
        functions = _make(parent, specs)
        while functions:
            number, samples = parent.recv()
            calls = call_all(functions[number], samples, timeout_s=specs[number].timeout_s, concurrency=concurrency)
            for place, outcome in calls:
                parent.send((place, replace(outcome, cause=None)))  # a stranger's exception may not be picklable
            parent.send(None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _make(parent: Connection, specs: Sequence[RewardSpec]) -> list[RewardFn]:
    try:
        functions = [spec.make() for spec in specs]
    except EngineError as error:
        parent.send(error)
        return []
    parent.send(None)
    return functions


if __name__ == "__main__":
    main(int(sys.argv[1]))

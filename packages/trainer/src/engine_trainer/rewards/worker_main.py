"""A process that judges: ``python -m engine_trainer.rewards.worker_main FD``, started by ``workers``.

It reads ``(sys.path, rewards, concurrency)`` and writes for each reward whether it is a coroutine function. Then it reads
``(reward's number, samples)`` and writes ``(place, value, problem, error)`` rows and None. When its parent ends, however it ends, the
pipes close and it ends too, in the middle of a call as well, with whatever the rewards have started.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from engine_api.errors import ConfigError, EngineError
from engine_api.parent_watchdog import end_group_with
from engine_trainer.rewards.calls import call_all, plain, shown
from engine_trainer.rewards.registry import RewardSpec
from engine_trainer.rewards.sample import RewardFn
from engine_trainer.utils.functions import is_async


def main(descriptor: int) -> None:
    """Serve until the pipe closes."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal's Ctrl-C reaches it too; its parent decides
    end_group_with(0)
    parent = Connection(descriptor)
    try:
        path, specs, concurrency = parent.recv()
        sys.path += [
            place for place in path if place not in sys.path
        ]  # after this process's own places
        functions = _make(parent, specs)
        while functions:
            work = _read(parent)
            if work is None:
                return
            number, samples = work
            _judge(parent, functions[number], samples, specs[number], concurrency)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _judge(
    parent: Connection,
    function: RewardFn,
    samples: Sequence[Any],
    spec: RewardSpec,
    concurrency: int,
) -> None:
    here = os.getpid()
    # A KeyboardInterrupt is a function's own here: no signal makes one.
    calls = call_all(
        function, samples, timeout_s=spec.timeout_s, concurrency=concurrency, interrupts=()
    )
    for place, outcome in calls:
        if os.getpid() != here:  # a function has forked and both have come back: one of them speaks
            os._exit(0)
        # Not its cause: an exception of the function's own, which only this process knows.
        parent.send((place, outcome.value, outcome.problem, outcome.error))
    parent.send(None)


def _read(parent: Connection) -> Any:
    """Return the next message; None where it holds what cannot be made here, which the parent is told."""
    try:
        return parent.recv()
    except (EOFError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - what a stranger's object does when it is unpickled
        why = f"{type(error).__name__}: {shown(str, error)}"
        parent.send(_unreadable(why))
        return None


def _make(parent: Connection, specs: Sequence[RewardSpec]) -> list[RewardFn]:
    try:
        functions = [spec.make() for spec in specs]
    except EngineError as error:
        parent.send(plain(error))
        return []
    except BaseException as error:  # noqa: BLE001 - of a module that raises what nobody catches, as it is imported
        said = f"{type(error).__name__}: {shown(str, error)}"
        parent.send(
            ConfigError(
                "reward", "a reward function cannot be made", why=said, remedy="fix its module"
            )
        )
        return []
    parent.send([is_async(function) for function in functions])
    return functions


def _unreadable(why: str) -> ConfigError:
    return ConfigError(
        "reward.workers",
        "a reward process cannot read its samples",
        why=why,
        remedy="keep plain values in the data and in what an agent notes, "
        "or set reward.workers: 0 and reward.timeout_s: null",
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))

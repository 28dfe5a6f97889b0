"""A process that runs reward functions, started by ``worker_pool``.

Usage: ``python -m engine_trainer.rewards.worker_main FD``.

The process reads ``(sys.path, rewards, concurrency)`` and writes for each reward whether it is a
coroutine function. Then it reads ``(reward's index, samples)`` messages and writes for each of them
the rows ``(index, value, problem, error)`` and None. When its parent ends in any way, the pipes
close and this process ends too, even in the middle of a call, with all processes that the rewards
have started.
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
from engine_trainer.extensions.functions import is_async
from engine_trainer.rewards.calls import call_all, plain, shown
from engine_trainer.rewards.registry import RewardSpec
from engine_trainer.rewards.sample import RewardFn


def main(descriptor: int) -> None:
    """Serve until the pipe closes."""
    # A terminal's Ctrl-C reaches this process too, but its parent decides when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_group_with(0)
    parent = Connection(descriptor)
    try:
        path, specs, concurrency = parent.recv()
        # The parent's entries come after this process's own.
        sys.path += [place for place in path if place not in sys.path]
        functions = _make(parent, specs)
        while functions:
            work = _read(parent)
            if work is None:
                return
            number, samples = work
            _score(parent, functions[number], samples, specs[number], concurrency)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _score(
    parent: Connection,
    function: RewardFn,
    samples: Sequence[Any],
    spec: RewardSpec,
    concurrency: int,
) -> None:
    here = os.getpid()
    # A KeyboardInterrupt here comes from the function itself, because SIGINT is ignored.
    calls = call_all(
        function, samples, timeout_s=spec.timeout_s, concurrency=concurrency, interrupts=()
    )
    for place, outcome in calls:
        # If a function has forked and both processes return, only the original one may write.
        if os.getpid() != here:
            os._exit(0)
        # The cause is not sent, because only this process may know the exception's class.
        parent.send((place, outcome.value, outcome.problem, outcome.error))
    parent.send(None)


def _read(parent: Connection) -> Any:
    """Return the next message, or None for one that cannot be unpickled here.

    In the second case the parent receives the error.
    """
    try:
        return parent.recv()
    except (EOFError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - unpickling a third-party object may raise anything
        why = f"{type(error).__name__}: {shown(str, error)}"
        parent.send(_unreadable(why))
        return None


def _make(parent: Connection, specs: Sequence[RewardSpec]) -> list[RewardFn]:
    try:
        functions = [spec.make() for spec in specs]
    except EngineError as error:
        parent.send(plain(error))
        return []
    except BaseException as error:  # noqa: BLE001 - the import of a third-party module may raise anything
        reason = f"{type(error).__name__}: {shown(str, error)}"
        parent.send(
            ConfigError(
                "reward", "a reward function cannot be created", why=reason, remedy="fix its module"
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
        remedy="keep plain values in the data and in an agent's info, or set reward.workers: 0 "
        "and reward.timeout_s: null",
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))

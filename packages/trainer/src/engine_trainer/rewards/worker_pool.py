"""A pool of processes that run reward functions in parallel.

A process that does not reply in time is killed and replaced.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from engine_api.errors import ConfigError, EngineError
from engine_trainer.rewards.calls import GRACE_S, Outcome
from engine_trainer.rewards.registry import RewardSpec
from engine_trainer.rewards.sample import Sample

# Seconds for a process to import its reward functions.
START_S = 120.0
# Seconds for a process to end by itself after its pipe was closed.
END_S = 2.0
# Seconds between two checks that a process is alive. A closed pipe does not show it, because a
# program that the process has started may hold its end of the pipe.
LOOK_S = 0.25
# Time limit of one read or write in the middle of a message, in seconds.
STALL_S = 30.0
# Seconds to wait for more outcomes before reading them, because waking up for each one costs more
# than a fast function.
LINGER_S = 0.0005
# Largest number of samples that a process receives at once.
CHUNK = 256
log = logging.getLogger("engine_trainer")


@dataclass(kw_only=True)
class _Task:
    """The samples of one reward that one process has received."""

    numbers: list[int]
    """Indices of the samples in the whole batch."""
    left: set[int]
    """Those of ``numbers`` that have no outcome yet."""
    deadline: float
    """Time limit of the next outcome, on the clock of ``time.monotonic()``."""


@dataclass(kw_only=True)
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection
    task: _Task | None = field(default=None)


@dataclass(kw_only=True)
class _Queue:
    """The samples that no process has received yet."""

    numbers: deque[int]
    """Indices of single samples."""
    groups: list[list[int]] = field(default_factory=list[list[int]])
    """Groups of indices, each of which goes to one process as a whole."""

    def __len__(self) -> int:
        return len(self.numbers) + len(self.groups)

    def take(self, size: int) -> list[int]:
        """Remove and return the next group, or the next ``size`` numbers if there is no group."""
        if self.groups:
            return self.groups.pop()
        return [self.numbers.popleft() for _ in range(min(size, len(self.numbers)))]


class Workers:
    """Processes that run reward functions, started when they are needed.

    Each of them imports the reward functions once.

    Args:
        specs: the rewards; ``run`` names one by its index.
        count: largest number of processes.
        concurrency: concurrent calls of a coroutine function in one process.
    """

    def __init__(self, specs: Sequence[RewardSpec], *, count: int, concurrency: int) -> None:
        self.specs = list(specs)
        self.count = count
        self.concurrency = concurrency
        self._workers: list[_Worker] = []
        # For each reward, True for a coroutine function; known after the first process has started.
        self._async: list[bool] = []

    def start(self) -> None:
        """Start the first process.

        Raises:
            ConfigError: the process cannot create the reward functions.
        """
        if self._workers:
            return
        try:
            self._start()
        # This includes an interrupt, so that no process is left behind.
        except BaseException:
            self.close()
            raise

    def run(self, reward: int, samples: Sequence[Sample]) -> Iterator[tuple[int, Outcome]]:
        """Yield (index, outcome) pairs from all processes, as ``calls.call_all`` does.

        A process whose call of a plain function takes longer than its limit is killed. That call
        counts as timed out, or as failed if the process ended by itself, and the calls behind it go
        to another process. Coroutines that one process had concurrently are called again, in
        halves, until the one that blocks or ends the process is alone. All processes end if the
        caller stops in the middle, and after an error.

        Raises:
            ConfigError: a process cannot create the functions or receive the samples.
        """
        self.start()
        waiting = _Queue(numbers=deque(range(len(samples))))
        finished = False
        try:
            while waiting or any(w.task for w in self._workers):
                self._hand_out(reward, samples, waiting)
                yield from self._collect(reward, waiting)
            finished = True
        finally:
            # The processes may still send outcomes that are never read.
            if not finished:
                self.close()

    def close(self) -> None:
        """End the processes (idempotent)."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.pipe.close()
        for worker in workers:
            _end(worker, END_S)

    # --- inside ---------------------------------------------------------------------------------

    def _hand_out(self, reward: int, samples: Sequence[Sample], waiting: _Queue) -> None:
        self._forget_dead()
        # The chunks shrink with the number of remaining samples, so that all processes finish at
        # about the same time.
        size = max(1, min(CHUNK, len(waiting.numbers) // (2 * self.count)))
        if self._async[reward]:
            size = self.concurrency
        idle = sum(worker.task is None for worker in self._workers)
        wanted = len(waiting.groups) + math.ceil(len(waiting.numbers) / size)
        while len(self._workers) < self.count and idle < wanted:
            self._start()
            idle += 1
        for worker in self._workers:
            if worker.task is None and waiting:
                numbers = waiting.take(size)
                if _send(worker, reward, [samples[i] for i in numbers]):
                    worker.task = _Task(
                        numbers=numbers, left=set(numbers), deadline=self._until(reward)
                    )
                else:
                    waiting.groups.append(numbers)

    def _forget_dead(self) -> None:
        """Remove processes that ended while they were idle."""
        for worker in [w for w in self._workers if w.task is None and w.process.poll() is not None]:
            log.warning(
                "a reward process ended with status %s: it is replaced", worker.process.returncode
            )
            worker.pipe.close()
            _end(worker, 0.0)
            self._workers.remove(worker)

    def _until(self, reward: int) -> float:
        timeout = self.specs[reward].timeout_s
        if timeout is None:
            return math.inf
        # The event loop keeps the limit of a coroutine. This limit is for code that blocks the
        # loop.
        return time.monotonic() + timeout + (2 * GRACE_S if self._async[reward] else 0.0)

    def _collect(self, reward: int, waiting: _Queue) -> Iterator[tuple[int, Outcome]]:
        busy = [w for w in self._workers if w.task]
        until = min((w.task.deadline for w in busy if w.task), default=0.0)
        # This check comes before the wait for messages, so that the last messages of an ended
        # process are read.
        ended = {id(w) for w in busy if w.process.poll() is not None}
        ready = wait(
            [w.pipe for w in busy], timeout=max(0.0, min(LOOK_S, until - time.monotonic()))
        )
        if ready:
            time.sleep(LINGER_S)
        for worker in busy:
            if worker.pipe in ready:
                yield from self._read(worker, reward, waiting)
            elif id(worker) in ended:
                yield from self._replace(worker, reward, waiting, _how_it_ended(worker))
            elif worker.task and time.monotonic() >= worker.task.deadline:
                yield from self._replace(worker, reward, waiting, "")

    def _read(self, worker: _Worker, reward: int, waiting: _Queue) -> Iterator[tuple[int, Outcome]]:
        """Yield the outcomes that have arrived."""
        while worker.task is not None and select.select([worker.pipe], [], [], 0)[0]:
            try:
                message = worker.pipe.recv()
            # An OSError means that the process ended in the middle of a message.
            except (EOFError, OSError):
                yield from self._replace(worker, reward, waiting, _how_it_ended(worker))
                return
            except Exception as error:  # noqa: BLE001 - a function may write anything into the pipe
                yield from self._replace(
                    worker,
                    reward,
                    waiting,
                    f"sent a message that cannot be read ({type(error).__name__})",
                )
                return
            if isinstance(message, EngineError):
                raise message
            if message is None:
                worker.task = None
                return
            place, value, problem, error = message
            number = worker.task.numbers[place]
            worker.task.left.discard(number)
            worker.task.deadline = self._until(reward)
            yield number, Outcome(value=value, problem=problem, error=error)

    def _replace(
        self, worker: _Worker, reward: int, waiting: _Queue, ended: str
    ) -> Iterator[tuple[int, Outcome]]:
        """End a process, requeue its samples and yield the outcome of the one at fault, if known.

        ``ended`` describes how the process ended by itself, and is empty for one that is silent.
        """
        assert worker.task is not None
        left = [number for number in worker.task.numbers if number in worker.task.left]
        self._workers.remove(worker)
        worker.pipe.close()
        _end(worker, 0.0)
        if self._async[reward] and len(left) > 1:
            then = f", the {len(left)} completions that it had are scored again"
            half = len(left) // 2
            waiting.groups += [left[half:], left[:half]]
            left = []
        # A plain function is called for one sample after the other, so the first remaining sample
        # is the one at fault.
        else:
            then = ", its completion counts 0" if left else ""
            waiting.numbers.extendleft(left[:0:-1])
        log.warning("a reward process %s: it is replaced%s", ended or "does not respond", then)
        if left:
            yield left[0], Outcome(problem=f"its process {ended}") if ended else Outcome()

    def _start(self) -> None:
        """Start one more process.

        ``close`` can end it from its first moment on, so that an interrupt during its start leaves
        no process behind.
        """
        ours, theirs = Pipe()
        _limit(ours)
        # The worker is a separate program, because forking a process that holds threads and a
        # device is not safe, and multiprocessing's spawn would run the user's main script again.
        # With -P, a file called random.py in the working directory does not replace Python's own.
        # The statement that starts the process also appends it to the list, so that ``close`` finds
        # it after an interrupt.
        self._workers.append(
            _Worker(
                process=subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        "-m",
                        "engine_trainer.rewards.worker_main",
                        str(theirs.fileno()),
                    ],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.PIPE,
                    start_new_session=True,
                ),
                pipe=ours,
            )
        )
        theirs.close()
        worker = self._workers[-1]
        try:
            ours.send((sys.path, self.specs, self.concurrency))
            self._async = self._read_ready(worker)
        except (EOFError, OSError) as error:
            raise ConfigError(
                "reward.workers",
                f"a reward process ended with status {worker.process.wait()} while it started",
                why="importing its functions' modules ended it",
                remedy="import them by hand to see the reason",
            ) from error

    def _read_ready(self, worker: _Worker) -> list[bool]:
        """Return for each reward whether it is a coroutine function.

        An error that kept the process from creating the functions is raised here.
        """
        end = time.monotonic() + START_S
        while not worker.pipe.poll(LOOK_S):
            if worker.process.poll() is not None and not worker.pipe.poll():
                raise EOFError
            if time.monotonic() > end:
                raise self._start_timeout()
        reply: Any = worker.pipe.recv()
        if isinstance(reply, EngineError):
            raise reply
        return reply

    def _start_timeout(self) -> ConfigError:
        return ConfigError(
            "reward.workers",
            f"a reward process did not start within {START_S:.0f} s",
            why="importing its functions' modules takes that long",
            remedy="make the import faster; move code that waits for a service into the function",
        )


def _limit(pipe: Connection) -> None:
    """Set a time limit for one read or write, because third-party code runs at the other end."""
    limit = struct.pack("@ll", int(STALL_S), 0)
    with socket.socket(fileno=os.dup(pipe.fileno())) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _send(worker: _Worker, reward: int, samples: list[Sample]) -> bool:
    """Send samples, and return False if the process has ended meanwhile or does not read."""
    try:
        worker.pipe.send((reward, samples))
    except OSError:
        # A process without a working pipe is useless, whatever the cause. It is replaced.
        worker.process.kill()
        worker.process.wait()
        return False
    # Pickling a third-party object in the data may raise anything.
    except Exception as error:
        raise ConfigError(
            "reward.workers",
            "a sample cannot be sent to another process",
            why=f"{type(error).__name__}: {error}",
            remedy="keep plain values in the data and in an agent's info, or set "
            "reward.workers: 0 and reward.timeout_s: null",
        ) from error
    return True


def _how_it_ended(worker: _Worker) -> str:
    try:
        status = worker.process.wait(END_S)
    except subprocess.TimeoutExpired:
        return "closed its pipe"
    name = f" ({signal.Signals(-status).name})" if -status in set(signal.Signals) else ""
    return f"ended with status {status}{name}"


def _end(worker: _Worker, seconds: float) -> None:
    """End a process and all processes that its rewards have started.

    The process has ``seconds`` to end by itself.
    """
    with suppress(subprocess.TimeoutExpired):
        worker.process.wait(seconds)
    with suppress(ProcessLookupError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    if worker.process.stdin is not None:
        worker.process.stdin.close()

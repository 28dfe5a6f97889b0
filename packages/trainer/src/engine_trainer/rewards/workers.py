"""Several processes that judge side by side. One that does not answer is killed and started anew."""

from __future__ import annotations

import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from engine_api.errors import ConfigError
from engine_trainer.rewards.calls import GRACE_S, Outcome
from engine_trainer.rewards.registry import RewardSpec
from engine_trainer.rewards.sample import Sample

START_S = 120.0  # until a process has imported its reward functions
END_S = 2.0  # for a process to end by itself after its pipe was closed
LOOK_S = 0.25  # between two looks whether a process still lives: what it has started may hold its end of the pipe
log = logging.getLogger("engine_trainer")


@dataclass(kw_only=True)
class _Task:
    """Samples of one reward in one process; ``left`` are their numbers in the whole that have no outcome yet."""

    numbers: list[int]
    left: set[int]
    deadline: float  # of time.monotonic(), until the next outcome


@dataclass(kw_only=True)
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection
    task: _Task | None = field(default=None)


class Workers:
    """``count`` processes, started at the first use; each imports the reward functions once.

    Args:
        specs: what to judge by; ``run`` names one by its place.
        count: processes.
        concurrency: calls of a coroutine function at once in one process.
    """

    def __init__(self, specs: Sequence[RewardSpec], *, count: int, concurrency: int) -> None:
        self.specs, self.count, self.concurrency = list(specs), count, concurrency
        self._workers: list[_Worker] = []

    def run(self, reward: int, samples: Sequence[Sample], *, chunk: int) -> Iterator[tuple[int, Outcome]]:
        """As ``calls.call_all``, over all processes; ``chunk`` samples go to a process at a time.

        A process that stays silent past the limit of a call is killed, and its call counts as timed out; that of one which
        ended, as failed. Where it had several calls (of a coroutine function), those without an outcome are made again, in
        halves, until the one that did it is alone. A caller that stops in the middle, and an error, end all processes.

        Raises ``ConfigError`` when a process cannot make the functions.
        """
        waiting = [list(range(at, min(at + chunk, len(samples)))) for at in range(0, len(samples), chunk)][::-1]
        finished = False
        try:
            while waiting or any(w.task for w in self._workers):
                self._hand_out(reward, samples, waiting)
                yield from self._collect(reward, waiting)
            finished = True
        finally:
            if not finished:  # answers are under way that nobody will read
                self.close()

    def close(self) -> None:
        """End the processes; idempotent."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.pipe.close()
        for worker in workers:
            _end(worker, END_S)

    # --- inside ---------------------------------------------------------------------------------

    def _hand_out(self, reward: int, samples: Sequence[Sample], waiting: list[list[int]]) -> None:
        self._forget_dead()
        while len(self._workers) < min(self.count, len(waiting)):
            self._workers.append(self._start())
        for worker in self._workers:
            if worker.task is None and waiting and _send(worker, reward, [samples[i] for i in waiting[-1]]):
                numbers = waiting.pop()
                worker.task = _Task(numbers=numbers, left=set(numbers), deadline=self._until(reward))

    def _forget_dead(self) -> None:
        """Processes that something ended while they had nothing to do."""
        for worker in [w for w in self._workers if w.task is None and w.process.poll() is not None]:
            log.warning("a reward process ended with status %s: it is replaced", worker.process.returncode)
            worker.pipe.close()
            _end(worker, 0.0)
            self._workers.remove(worker)

    def _until(self, reward: int) -> float:
        timeout = self.specs[reward].timeout_s
        # The worker keeps the time itself; this one is for code that its alarm cannot interrupt.
        return math.inf if timeout is None else time.monotonic() + timeout + 2 * GRACE_S

    def _collect(self, reward: int, waiting: list[list[int]]) -> Iterator[tuple[int, Outcome]]:
        busy = [w for w in self._workers if w.task]
        until = min((w.task.deadline for w in busy if w.task), default=0.0)
        wait([w.pipe for w in busy], timeout=max(0.0, min(LOOK_S, until - time.monotonic())))
        for worker in busy:
            ended = worker.process.poll() is not None  # before the look for its last words
            if worker.pipe.poll():
                yield from self._read(worker, reward, waiting)
            elif ended:
                yield from self._replace(worker, waiting, _how_it_ended(worker))
            elif worker.task and time.monotonic() >= worker.task.deadline:
                yield from self._replace(worker, waiting, "")

    def _read(self, worker: _Worker, reward: int, waiting: list[list[int]]) -> Iterator[tuple[int, Outcome]]:
        assert worker.task is not None
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):  # OSError: in the middle of a message
            yield from self._replace(worker, waiting, _how_it_ended(worker))
            return
        if message is None:
            worker.task = None
            return
        place, outcome = message
        number = worker.task.numbers[place]
        worker.task.left.discard(number)
        worker.task.deadline = self._until(reward)
        yield number, outcome

    def _replace(self, worker: _Worker, waiting: list[list[int]], ended: str) -> Iterator[tuple[int, Outcome]]:
        """``ended``: how; empty for one that is silent."""
        assert worker.task is not None
        left = sorted(worker.task.left)
        self._workers.remove(worker)
        worker.pipe.close()
        _end(worker, 0.0)
        then = {0: "", 1: ", its completion counts 0"}.get(
            len(left), f", the {len(left)} completions that it had are judged again"
        )
        log.warning("a reward process %s: it is replaced%s", ended or "does not answer", then)
        if len(left) > 1:
            half = len(left) // 2
            waiting += [left[half:], left[:half]]
        elif left:
            yield left[0], Outcome(problem=f"its process {ended}") if ended else Outcome()

    def _start(self) -> _Worker:
        ours, theirs = Pipe()
        # A program of its own: forking a process that holds threads and a device is not safe, and multiprocessing's
        # spawn would run the user's main script again.
        process = subprocess.Popen([sys.executable, "-m", "engine_trainer.rewards.worker", str(theirs.fileno())],
                                   pass_fds=[theirs.fileno()], stdin=subprocess.PIPE, start_new_session=True)  # fmt: skip
        theirs.close()
        worker = _Worker(process=process, pipe=ours)
        try:
            ours.send((self.specs, self.concurrency))
            problem = ours.recv() if ours.poll(START_S) else self._late()
        except (EOFError, OSError):
            problem = ConfigError("reward.workers", f"a reward process ended with status {process.wait()} as it started",
                                  remedy="set reward.workers: 0 to see why")  # fmt: skip
        if problem is not None:
            ours.close()
            _end(worker, 0.0)
            raise problem
        return worker

    def _late(self) -> ConfigError:
        return ConfigError("reward.workers", f"a reward process did not start within {START_S:.0f} s",
                           why="importing its functions takes that long", remedy="import what is slow inside the function")  # fmt: skip


def _send(worker: _Worker, reward: int, samples: list[Sample]) -> bool:
    """Whether it could be given them: not where it has ended meanwhile."""
    try:
        worker.pipe.send((reward, samples))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError("reward.workers", "a sample cannot be sent to another process", why=str(error),
                          remedy="keep plain values in the data, or set reward.workers: 0") from error  # fmt: skip
    except OSError:
        worker.process.kill()  # whatever closed its pipe: it is of no use, and is replaced
        worker.process.wait()
        return False
    return True


def _how_it_ended(worker: _Worker) -> str:
    try:
        status = worker.process.wait(END_S)
    except subprocess.TimeoutExpired:
        return "closed its pipe"
    name = f" ({signal.Signals(-status).name})" if -status in set(signal.Signals) else ""
    return f"ended with status {status}{name}"


def _end(worker: _Worker, seconds: float) -> None:
    """It has ``seconds`` to end by itself; what its rewards have started ends with it."""
    with suppress(subprocess.TimeoutExpired):
        worker.process.wait(seconds)
    with suppress(ProcessLookupError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    if worker.process.stdin is not None:
        worker.process.stdin.close()

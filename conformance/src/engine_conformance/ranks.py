"""A pool of ranks: processes that share one process group, driven over pipes by name of function.

The parent holds no process group. Each of its threads that calls ranks is a lane with pools of its
own. A rank that raises, dies or stalls fails the call
with a report of every rank's state; the pool is then killed, by its own process ids
only, and the next call starts a new one: one failure never becomes many.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from types import TracebackType
from typing import IO, Any, Protocol, Self

from engine_api.devices import npu_is_simulated
from engine_conformance._rank_worker import BACKENDS, Job, RankReply, WorkerSpec
from engine_conformance.rank_failure import FailedRank, RankError
from engine_conformance.rank_templates import Templates
from engine_conformance.seeds import current_seed

__all__ = [
    "FailedRank",
    "RankError",
    "RankPool",
    "RankProcess",
    "close_pools",
    "get_pool",
    "launched_by",
    "stop_pools",
    "use_lane",
    "warm_up",
]

# A new interpreter, not multiprocessing's spawn or its server of forks, which import the parent's
# main module again: that fails for a notebook, and runs a script that has no guard.
_COMMAND = "from engine_conformance._rank_worker import main; main({})"
# Time for importing torch from a cold disk, and for the rendezvous.
_START_SECONDS = 180.0
# Time after the first failure within which failing ranks count as failed too; the rest are victims.
_GRACE_SECONDS = 1.0
# Time limit for a rank to write its stack after the signal.
_DUMP_SECONDS = 20.0
_CLOSE_SECONDS = 5.0
_OUTPUT_LINES = 20


class RankProcess(Protocol):
    """The process of a rank, as `subprocess.Popen` has it."""

    pid: int
    returncode: int | Any

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code, or raise ``TimeoutExpired``."""
        ...

    def send_signal(self, sig: int) -> None:
        """Send a signal."""
        ...

    def kill(self) -> None:
        """Send SIGKILL."""
        ...


Launcher = Callable[[int, IO[bytes], Mapping[str, str]], RankProcess]
"""Start of a rank: the descriptor of its pipe, the file for its output, and its environment.

The process calls ``_rank_worker.main`` with the descriptor.
"""


def _launch_interpreter(
    descriptor: int, log: IO[bytes], environment: Mapping[str, str]
) -> RankProcess:
    return Popen(
        [sys.executable, "-P", "-c", _COMMAND.format(descriptor)],
        pass_fds=[descriptor],
        env=environment,
        stdin=DEVNULL,
        stdout=log,
        stderr=STDOUT,
    )


_launchers: list[Launcher] = []
_templates = Templates()


@contextlib.contextmanager
def launched_by(launcher: Launcher) -> Iterator[None]:
    """Start all ranks inside the context by ``launcher``."""
    _launchers.append(launcher)
    try:
        yield
    finally:
        _launchers.pop()


def _find_launcher(device: str) -> Launcher | None:
    """Return the function that starts a rank, or None if ranks are forks of templates."""
    if _launchers:
        return _launchers[-1]
    # A library of an accelerator may start threads when it is imported, and what it has set up is
    # lost in a fork. Other systems than Linux have no handle of a process.
    on_host = device == "cpu" or (device == "npu" and npu_is_simulated())
    return None if on_host and sys.platform == "linux" else _launch_interpreter


def _environment() -> dict[str, str]:
    """Return the environment of a rank that starts now."""
    # OMP_NUM_THREADS is read when torch is imported, so it cannot be set from inside.
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def warm_up(world: int, device: str) -> None:
    """Let ``world`` ranks import torch and the suite while this process does something else.

    Nothing happens where ranks are no forks of templates.
    """
    if _find_launcher(device) is None:
        with Path(os.devnull).open("wb") as log:
            for rank in range(world):
                # If one fails, it fails again when it is needed, and is then reported.
                _templates.start(rank, log, _environment())


class PoolsStopped(BaseException):
    """End of a lane that calls ranks after `stop_pools`.

    As an interrupt, it is no error of the case that was running.
    """


class RankPool:
    """``world`` processes in one process group: gloo on ``cpu``, NCCL on ``cuda``.

    Functions are named ``"module:function"`` and imported in each rank, so they live in
    importable modules; arguments and results are pickled. Ranks see RANK, LOCAL_RANK,
    WORLD_SIZE and OMP_NUM_THREADS=1, are seeded with 0 before each call, and have one
    device each.

    Args:
        world: number of ranks; one rank has a process group of one.
        device: ``cpu`` or an accelerator, with one device per rank.
        deadline: default time limit of a call in seconds.
        group_timeout: seconds after which a collective gives up. Every deadline must be shorter, so
            that a stall is reported by the pool, with all stacks, and not by one rank's collective.
        launched: start the ranks as torchrun does, with its variables and without a process group,
            which the functions make and destroy.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        world: int,
        *,
        device: str = "cpu",
        deadline: float = 60.0,
        group_timeout: float = 900.0,
        launched: bool = False,
    ) -> None:
        if world < 1 or device not in BACKENDS:
            raise ValueError(
                f"world {world} must be positive and device {device!r} one of {list(BACKENDS)}"
            )
        self.world = world
        self.device = device
        self._deadline = deadline
        self._group_timeout = group_timeout
        self._launched = launched
        # The launcher's store, which lives as long as the ranks.
        self._store: Any = None
        self._processes: list[RankProcess] = []
        self._pipes: list[Connection] = []
        self._folder = Path()
        self._read_up_to: dict[int, int] = {}
        self._check_deadline(deadline)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the running ranks.

        The tuple is empty before the first call and after a failure.
        """
        return tuple(process.pid for process in self._processes)

    def start(self) -> None:
        """Start the ranks and their process group.

        Nothing happens if they run already.

        Raises:
            RankError: if a rank cannot start, as when there are fewer devices than ranks.
            PoolsStopped: after `stop_pools`.
        """
        if _stopped.is_set():
            raise PoolsStopped
        if self._processes:
            return
        _running.add(self)
        try:
            self._start()
        # An interrupt too must leave no rank behind.
        except BaseException:
            self._kill()
            raise

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        if self._launched:
            import torch.distributed as dist

            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
        environment = _environment()
        launcher = _find_launcher(self.device)
        if launcher is None:
            # All import side by side, before the first of them is waited for.
            for rank in range(self.world):
                with self._log(rank).open("ab") as log:
                    _templates.start(rank, log, environment)
        for rank in range(self.world):
            ours, theirs = Pipe()
            # An engine's output is kept for the report of its failure, apart from the suite's own.
            with self._log(rank).open("ab") as log:
                # In one statement: an interrupt after it finds the process in the list.
                self._processes.append(
                    launcher(theirs.fileno(), log, environment)
                    if launcher
                    else _templates.fork(rank, theirs.fileno(), log, environment)
                )
            self._pipes.append(ours)
            theirs.close()
            # A rank that has died already is found, and reported, where its reply is read.
            with contextlib.suppress(BrokenPipeError):
                ours.send_bytes(pickle.dumps(self._spec(rank)))
        self._collect("start", _START_SECONDS)

    def run(
        self,
        function: str,
        *,
        deadline: float | None = None,
        per_rank: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``"module:function"`` with ``kwargs`` on every rank and return the results by rank.

        Args:
            function: importable by name in a rank; ``sys.path`` is the parent's.
            deadline: seconds for this call; the pool's own if absent.
            per_rank: one mapping per rank, of arguments that differ.

        Raises:
            RankError: if any rank raised, died, or did not return before the deadline.
            ValueError: if the deadline is not shorter than the group's timeout.
        """
        limit = self._deadline if deadline is None else deadline
        self._read_up_to = {
            rank: self._log(rank).stat().st_size for rank in range(len(self._processes))
        }
        self._check_deadline(limit)
        extra = per_rank or [{}] * self.world
        path = tuple(sys.path)
        jobs = [
            pickle.dumps(
                Job(function=function, kwargs=kwargs | dict(own), path=path, seed=current_seed())
            )
            for own in extra
        ]
        self.start()
        for pipe, job in zip(self._pipes, jobs, strict=True):
            # A rank that died while idle is found, and reported, where its reply is read.
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(job)
        return self._collect(function, limit)

    def stop(self) -> None:
        """Kill the ranks from another thread, so that the call which waits for them ends."""
        for process in list(self._processes):
            # The thread that waits may have found the end of the process already.
            with contextlib.suppress(OSError):
                process.kill()

    def close(self) -> None:
        """Let the ranks leave, then make sure that they are gone.

        A second call does nothing.
        """
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(pickle.dumps(None))
        end = time.monotonic() + _CLOSE_SECONDS
        for process in self._processes:
            _wait(process, end - time.monotonic())
        self._kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _spec(self, rank: int) -> WorkerSpec:
        return WorkerSpec(
            rank=rank,
            world=self.world,
            device=self.device,
            folder=str(self._folder),
            group_timeout=self._group_timeout,
            port=self._store.port if self._launched else None,
        )

    def _check_deadline(self, deadline: float) -> None:
        if not 0 < deadline < self._group_timeout:
            raise ValueError(
                f"deadline {deadline} s must be within the group's {self._group_timeout} s"
            )

    def _collect(self, function: str, deadline: float) -> list[Any]:
        """Return one result per rank.

        On a failure all ranks' stacks are reported and this pool ends.
        """
        began = time.monotonic()
        replies: dict[int, RankReply] = {}
        complete = False
        try:
            self._receive(replies, began + deadline)
            failures = self._failures(replies)
            complete = not failures
        finally:
            # Also when the parent is interrupted: no rank outlives the call.
            if not complete:
                self._kill()
        if failures:
            raise RankError(function, self.world, failures, time.monotonic() - began)
        return [replies[rank].value for rank in range(self.world)]

    def _receive(self, replies: dict[int, RankReply], end: float) -> None:
        """Fill ``replies`` until all ranks replied, ``end``, or the grace after a first failure."""
        while len(replies) < self.world:
            waiting = {self._pipes[rank]: rank for rank in range(self.world) if rank not in replies}
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                return
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting[pipe]
                reply = self._read(rank)
                replies[rank] = reply
                if reply.kind != "returned":
                    end = min(end, time.monotonic() + _GRACE_SECONDS)

    def _read(self, rank: int) -> RankReply:
        try:
            reply = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            process = self._processes[rank]
            _wait(process, _GRACE_SECONDS)
            return RankReply(
                kind="died", text=f"exit code {process.returncode}\n{self._stack(rank)}"
            )
        assert isinstance(reply, RankReply)
        return reply

    def _failures(self, replies: Mapping[int, RankReply]) -> list[FailedRank]:
        stalled = [rank for rank in range(self.world) if rank not in replies]
        self._request_stacks(stalled)
        failures = [
            FailedRank(
                rank=rank, kind="stalled", text=self._stack(rank), output=self._printed(rank)
            )
            for rank in stalled
        ]
        failures += [
            FailedRank(
                rank=rank,
                kind=reply.kind,
                text=reply.text,
                exception=reply.exception,
                output=self._printed(rank),
            )
            for rank, reply in replies.items()
            if reply.kind != "returned"
        ]
        return sorted(failures, key=lambda failure: failure.rank)

    def _request_stacks(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            process = self._processes[rank]
            # The file exists once the signal's handler does.
            if self._dump(rank).exists():
                process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + _DUMP_SECONDS
        while time.monotonic() < end and not all(self._stack(rank) for rank in ranks):
            time.sleep(0.02)
        # A stack is written line by line.
        time.sleep(0.05 if ranks else 0.0)

    def _dump(self, rank: int) -> Path:
        return self._folder / f"stack-{rank}"

    def _log(self, rank: int) -> Path:
        return self._folder / f"output-{rank}"

    def _printed(self, rank: int) -> str:
        """Return the end of what a rank printed during this call."""
        printed = self._log(rank).read_bytes()[self._read_up_to.get(rank, 0) :]
        text = printed.decode(errors="replace")
        return "\n".join(text.rstrip().splitlines()[-_OUTPUT_LINES:])

    def _stack(self, rank: int) -> str:
        return self._dump(rank).read_text() if self._dump(rank).exists() else ""

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._processes = []
        self._pipes = []
        _running.discard(self)
        if self._folder != Path():
            shutil.rmtree(self._folder, ignore_errors=True)


def _wait(process: RankProcess, seconds: float) -> None:
    with contextlib.suppress(TimeoutExpired):
        process.wait(max(0.0, seconds))


class _Lane(threading.local):
    """Number of this thread's lane."""

    number = 0


_lane = _Lane()
_pools: dict[tuple[int, int, str], RankPool] = {}
_running: set[RankPool] = set()
_stopped = threading.Event()


def use_lane(number: int) -> None:
    """Let `get_pool` return the pools of a lane in this thread; they are lane 0's at first."""
    _lane.number = number


def get_pool(world: int, device: str = "cpu") -> RankPool:
    """Return this lane's pool of this world size and device, kept for the life of the process.

    Only one world size of a lane stays alive on an accelerator, whose memory idle ranks would
    hold.
    """
    own = (_lane.number, world, device)
    if device != "cpu":
        for key in list(_pools):
            if key[0] == own[0] and key[1] != world and key[2] == device:
                _pools.pop(key).close()
    if own not in _pools:
        _pools[own] = RankPool(world, device=device)
    return _pools[own]


def stop_pools() -> None:
    """Kill all running ranks, and let no lane start others until `close_pools`.

    It is called while lanes wait for ranks, whose calls end by it.
    """
    _stopped.set()
    for pool in list(_running):
        pool.stop()


def close_pools() -> None:
    """Close every pool that still runs, and forget those that `get_pool` kept.

    The templates of ranks end as well. No other thread may be calling ranks.
    """
    _stopped.clear()
    _pools.clear()
    for pool in list(_running):
        pool.close()
    _templates.close()


atexit.register(close_pools)

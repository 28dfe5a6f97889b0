"""The processes of a campaign, forked from one that has loaded all, on copies of an engine."""

from __future__ import annotations

import compileall
import importlib
import os
import py_compile
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import TimeoutExpired
from types import FrameType
from typing import IO, Any, NoReturn

from matrix import ROOT
from mutate import Mutation

from engine_api.registry import EngineRegistry
from engine_conformance._rank_worker import main as run_rank

__all__ = [
    "ENGINES",
    "Child",
    "EngineUnderChange",
    "Forking",
    "Lanes",
    "PackageCopy",
    "Tracer",
    "check_threads",
    "executed_lines",
    "imports",
]

# Memory that a rank may take in addition to what it has at its start.
MEMORY_BYTES = 6 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineUnderChange:
    """An engine whose source is changed.

    Attributes:
        backend: its name in the registry.
        source: the folder that its package is in, below the root of the repository.
        package: the name of its package.
        libraries: names of the packages that are changed as parts of it, with the folder of each.
        shim: whether it needs a simulated CUDA.
    """

    backend: str
    source: str
    package: str
    libraries: Mapping[str, str] = field(default_factory=dict[str, str])
    shim: bool = False

    @property
    def folders(self) -> dict[str, Path]:
        """The folders of its package and libraries, by package."""
        sources = {self.package: self.source, **self.libraries}
        return {package: ROOT / source / package for package, source in sources.items()}

    def files(self) -> dict[str, str]:
        """Return the texts of its modules, by path with the package's name."""
        return {
            str(path.relative_to(folder.parent)): path.read_text()
            for folder in self.folders.values()
            for path in sorted(folder.rglob("*.py"))
        }

    def is_module(self, name: str) -> bool:
        """Return whether a module belongs to the package or its libraries."""
        return name.partition(".")[0] in self.folders


ENGINES = {
    one.backend: one
    for one in (
        EngineUnderChange(
            backend="fsdp2",
            source="packages/engine-fsdp/src",
            package="engine_fsdp",
            libraries={"engine_torch": "packages/engine-torch/src"},
        ),
        EngineUnderChange(
            backend="loopback", source="conformance/loopback", package="engine_loopback"
        ),
        EngineUnderChange(
            backend="megatron",
            source="packages/engine-megatron/src",
            package="engine_megatron",
            shim=True,
        ),
        EngineUnderChange(
            backend="minimal", source="examples/engine-minimal/src", package="engine_minimal"
        ),
    )
}


class ForkedRank:
    """The process of a rank that was forked from this one, as `subprocess.Popen` has it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code, negative for a signal.

        Raises:
            TimeoutExpired: if it has not ended in time.
        """
        end = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= end:
                raise TimeoutExpired("rank", timeout or 0.0)
            else:
                time.sleep(0.002)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.returncode is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Forking:
    """A launcher of ranks (`engine_conformance.ranks.launched_by`) that forks this process.

    Attributes:
        cpu_s: seconds of computation after which a rank is ended.
        tracer: notes the lines that a rank executes, or None.
    """

    cpu_s: int
    tracer: Tracer | None = None

    def __call__(
        self, descriptor: int, log: IO[bytes], environment: Mapping[str, str]
    ) -> ForkedRank:
        """Start a rank."""
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        return ForkedRank(pid) if pid else self._be_rank(descriptor, log, environment)

    def _be_rank(self, descriptor: int, log: IO[bytes], environment: Mapping[str, str]) -> NoReturn:
        code = 1
        try:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
            # Pipes of other ranks are closed, so that a rank notices when its own end is gone.
            kept = {0, 1, 2, descriptor, self.tracer.descriptor if self.tracer else descriptor}
            for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
                if number not in kept:
                    with suppress(OSError):
                        os.close(number)
            os.environ.clear()
            os.environ.update(environment)
            limit(self.cpu_s)
            if self.tracer:
                self.tracer.start()
            run_rank(descriptor)
            code = 0
        # This is the boundary of a process. The pool reports the traceback.
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            leave(code)


def limit(cpu_s: int) -> None:
    """Limit the computation and the memory of this process."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


class Tracer:
    """A record of the lines of a folder's packages that this process and its ranks execute."""

    def __init__(self, folder: Path, into: Path) -> None:
        self._prefix = f"{folder}{os.sep}"
        self._cut = len(self._prefix)
        self._left: dict[Any, set[int]] = {}
        self.descriptor = os.open(into, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def start(self) -> None:
        """Trace this thread and those that it starts."""
        threading.settrace(self._call)
        sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self._prefix):
            return None
        if code not in self._left:
            self._left[code] = {line for _, _, line in code.co_lines() if line}
        self._note(frame)
        return self._line if self._left[code] else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self._note(frame)
        return self._line

    def _note(self, frame: FrameType) -> None:
        left = self._left[frame.f_code]
        line = frame.f_lineno
        if line in left:
            left.discard(line)
            # The write is unbuffered, because a rank may be killed at any time.
            text = f"{frame.f_code.co_filename[self._cut :]}:{line}\n"
            os.write(self.descriptor, text.encode())


def executed_lines(path: Path) -> dict[str, list[int]]:
    """Return the lines that a `Tracer` has written, by file."""
    lines: dict[str, set[int]] = {}
    for row in path.read_text().splitlines() if path.exists() else ():
        file, _, line = row.rpartition(":")
        lines.setdefault(file, set()).add(int(line))
    return {file: sorted(found) for file, found in sorted(lines.items())}


class PackageCopy:
    """A copy of an engine's package and libraries, of which one file can be changed."""

    def __init__(self, engine: EngineUnderChange, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__")
        for package, source in engine.folders.items():
            shutil.copytree(source, folder / package, ignore=ignored)
        compileall.compile_dir(folder, quiet=1)

    @contextmanager
    def changed(self, mutation: Mutation) -> Iterator[None]:
        """Change the file inside the context."""
        source = self.engine.files()[mutation.file]
        self.write(mutation.file, mutation.apply(source))
        try:
            yield
        finally:
            self.write(mutation.file, source)

    def write(self, file: str, text: str) -> None:
        """Write a file and compile it."""
        path = self.folder / file
        path.write_text(text)
        # The hash decides, because two versions may have one size and one second.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        py_compile.compile(str(path), doraise=True, invalidation_mode=mode)

    def use(self) -> None:
        """Let this process import the copy, also if it has imported the package before."""
        sys.path.insert(0, str(self.folder))
        for name in [name for name in sys.modules if self.engine.is_module(name)]:
            del sys.modules[name]
        importlib.invalidate_caches()
        EngineRegistry.refresh()


@dataclass(kw_only=True, slots=True)
class Child:
    """A process of a lane.

    Attributes:
        pid: its id, and that of the group of its ranks.
        pipe: the end on which it is heard.
        task: the task that it has.
        began: time of `time.monotonic` at its start.
        end: time of `time.monotonic` at which it is ended.
        held: the changes of the lane's copy that last as long as it runs.
        messages: the messages that it has sent.
    """

    pid: int
    pipe: Connection
    lane: int
    task: Any
    began: float
    end: float
    held: ExitStack
    messages: list[Any] = field(default_factory=list[Any])

    def close(self) -> None:
        """End the process with its ranks, wait for it, and undo the change of the copy."""
        # In the moment after the fork there is no group yet.
        for send in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                send(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pipe.close()
        self.held.close()


Work = Callable[[Any, PackageCopy], Callable[[Connection], None]]


class Lanes:
    """Processes that run side by side, each on its own copy of an engine.

    Args:
        engine: the engine.
        work: folder of the copies; its folders ``root`` and ``tmp`` hold the models and everything
            that processes leave.
        count: number of processes at a time.
    """

    def __init__(self, engine: EngineUnderChange, work: Path, count: int) -> None:
        self._work = work
        self._scratch = (work / "root", work / "tmp")
        for folder in self._scratch:
            folder.mkdir(parents=True)
        self.copies = [PackageCopy(engine, work / f"copy{i}") for i in range(count)]

    def run(
        self,
        tasks: Iterable[Any],
        work: Work,
        done: Callable[[Child], None],
        *,
        seconds: float,
        deadline: float = float("inf"),
        change: bool = False,
    ) -> None:
        """Run each task in a forked process.

        Args:
            tasks: the tasks, in order.
            work: returns the function that the process calls with its end of a pipe.
            done: called when a process has ended; what it sent is in ``messages``.
            seconds: time after which a process is ended.
            deadline: time of `time.monotonic` after which no process starts.
            change: whether tasks are changes, and each process runs on a copy with its change.
        """
        waiting = list(tasks)[::-1]
        running: dict[Connection, Child] = {}
        free = list(range(len(self.copies)))
        try:
            while running or waiting:
                while free and waiting and time.monotonic() < deadline:
                    child = self._start(free.pop(), waiting.pop(), work, seconds, change=change)
                    running[child.pipe] = child
                if not running:
                    return
                for child in _heard(running):
                    del running[child.pipe]
                    child.close()
                    free.append(child.lane)
                    done(child)
                    self._sweep(running.values())
        finally:
            for child in running.values():
                child.close()

    def _start(self, lane: int, task: Any, work: Work, seconds: float, *, change: bool) -> Child:
        copy = self.copies[lane]
        held = ExitStack()
        if change:
            held.enter_context(copy.changed(task))
        job = work(task, copy)
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._be_child(lane, job, theirs)
        theirs.close()
        now = time.monotonic()
        return Child(
            pid=pid, pipe=ours, lane=lane, task=task, began=now, end=now + seconds, held=held
        )

    def _be_child(self, lane: int, job: Callable[[Connection], None], pipe: Connection) -> NoReturn:
        code = 1
        try:
            # Its ranks are of the same group, and end with it.
            os.setsid()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with (self._work / f"output{lane}").open("ab") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            self.copies[lane].use()
            job(pipe)
            code = 0
        # This is the boundary of a process. Its parent finds that it sent no result.
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            leave(code)

    def _sweep(self, running: Collection[Child]) -> None:
        """Remove the files that ended processes have left."""
        oldest = min((child.began for child in running), default=time.monotonic())
        before = time.time() - (time.monotonic() - oldest) - 1.0
        for path in (path for folder in self._scratch for path in folder.iterdir()):
            # A running process may have removed it in the meantime.
            with suppress(FileNotFoundError):
                if path.name == "models" or path.stat().st_mtime >= before:
                    continue
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()


def _heard(running: Mapping[Connection, Child]) -> list[Child]:
    """Wait for messages, and return the processes that have ended or are late."""
    first = min(child.end for child in running.values())
    ended: list[Child] = []
    for pipe in wait(list(running), timeout=max(0.0, first - time.monotonic())):
        assert isinstance(pipe, Connection)
        try:
            running[pipe].messages.append(pipe.recv())
        except EOFError:
            ended.append(running[pipe])
    now = time.monotonic()
    return ended + [one for one in running.values() if now > one.end and one not in ended]


def leave(code: int) -> NoReturn:
    """End this forked process without running anything of the process it was forked from."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def imports(file: str) -> bool:
    """Return whether a module can be imported, tried in a process of its own."""
    name = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            importlib.import_module(name)
            code = 0
        # This is the boundary of a process, and a changed module may raise anything.
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            leave(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def check_threads() -> None:
    """Raise if this process has a second thread, with which it cannot be forked.

    The CUDA driver's own thread may be there: torch's backward asks the driver for devices, and a
    process that is forked from here sees none and does not call it.
    """
    threads = [(path / "comm").read_text().strip() for path in Path("/proc/self/task").iterdir()]
    others = [name for name in threads if not name.startswith("cuda0")]
    if len(others) != 1:
        raise RuntimeError(
            f"the campaign's process has the threads {', '.join(sorted(threads))}, expected one "
            "alone: a package that it imports starts threads, and a process with threads cannot be "
            "forked"
        )

"""Run the mutation campaign: change an engine's source by machine, and see whether a case fails.

``python tools/campaign.py --engine fsdp2 --budget 3600 --seed 7`` changes the engine's source at
one place at a time (`mutate.OPERATORS`), runs the cases that execute the place until one fails, and
writes one line of JSON for each changed engine. The same seed gives the same list of changes on any
machine. ``--resume FILE`` goes on with such a file, and ``--only ID`` runs one change alone.
``--record`` writes the rates and the survivors into ``conformance/mutants/campaign``, from which
``tools/mutants.py --page`` writes the section of docs/mutants.md.

The quick tier's cases run first, at world 1 and then at world 2, and the full tier's after them. A
first pass over the unchanged engine shows which lines each case executes: a change of a line that
no case executes is reported as "not executed" and does not run.

The suite, torch and the packages that the engine imports are loaded once. Each changed engine runs
in a process that is forked from there, as do its ranks: they import the changed package from a copy
at the front of ``sys.path``. It needs Linux, and neither network nor GPU.
"""

from __future__ import annotations

import argparse
import compileall
import gc
import hashlib
import importlib
import json
import os
import pkgutil
import py_compile
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import TimeoutExpired
from types import FrameType
from typing import IO, Any, NoReturn

# torch reads it when it is imported: without threads a process of it can be forked.
os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402
from campaign_record import KILLED, record, summary  # noqa: E402
from matrix import ROOT  # noqa: E402
from mutate import Mutation, option_defaults, sampled, sites  # noqa: E402

import engine_api.config  # noqa: E402
from engine_api.devices import SIMULATED_CUDA  # noqa: E402
from engine_api.registry import EngineRegistry  # noqa: E402
from engine_conformance._rank_worker import main as run_rank  # noqa: E402
from engine_conformance.cases import load_cases, run_case  # noqa: E402
from engine_conformance.cli import offer  # noqa: E402
from engine_conformance.environment import suite  # noqa: E402
from engine_conformance.errors import CannotRun  # noqa: E402
from engine_conformance.plan import Item, Selection, make_plan  # noqa: E402
from engine_conformance.ranks import close_pools, launched_by  # noqa: E402
from engine_conformance.results import BAD, Outcome  # noqa: E402

# Seconds of a call's deadline: a case asks for 120 s, or more.
CASE_DEADLINE_S = 120.0
# A call may take so many times as long as it took on the unchanged engine, and at least so long.
SLOWER = 10.0
AT_LEAST_S = 30.0
# Memory that a rank may take in addition to what it has at its start.
MEMORY_BYTES = 6 << 30
TIERS = ("quick", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """An engine whose source is changed.

    Attributes:
        backend: its name in the registry.
        source: the folder that its package is in, below the root of the repository.
        package: the name of its package.
        shim: whether it needs a simulated CUDA.
    """

    backend: str
    source: str
    package: str
    shim: bool = False

    @property
    def folder(self) -> Path:
        """The folder of the package."""
        return ROOT / self.source / self.package

    def files(self) -> dict[str, str]:
        """Return the texts of its modules, by path below ``source``."""
        return {
            str(path.relative_to(self.folder.parent)): path.read_text()
            for path in sorted(self.folder.rglob("*.py"))
        }

    def is_module(self, name: str) -> bool:
        """Return whether a module belongs to the package."""
        return name == self.package or name.startswith(f"{self.package}.")


ENGINES = {
    one.backend: one
    for one in (
        Engine(backend="fsdp2", source="packages/engine-fsdp/src", package="engine_fsdp"),
        Engine(backend="loopback", source="conformance/loopback", package="engine_loopback"),
        Engine(
            backend="megatron",
            source="packages/engine-megatron/src",
            package="engine_megatron",
            shim=True,
        ),
        Engine(backend="minimal", source="examples/engine-minimal/src", package="engine_minimal"),
    )
}


def mutations_of(engine: Engine) -> list[Mutation]:
    """Return every change of an engine's source."""
    classes = [
        one
        for one in vars(engine_api.config).values()
        if isinstance(one, type) and is_dataclass(one)
    ]
    defaults = option_defaults(*classes)
    return [one for name, text in engine.files().items() for one in sites(text, name, defaults)]


# --- processes ------------------------------------------------------------------------------------


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

    def _be_rank(
        self, descriptor: int, log: IO[bytes], environment: Mapping[str, str]
    ) -> NoReturn:
        code = 1
        try:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
            # Pipes of other ranks: a rank would not notice that its own end is gone.
            kept = {0, 1, 2, descriptor, self.tracer.descriptor if self.tracer else descriptor}
            for number in map(int, os.listdir("/proc/self/fd")):
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
        # The boundary of a process: its traceback is in the report of the pool.
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            # Nothing of the process that it was forked from may run at its end.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def limit(cpu_s: int) -> None:
    """Limit the computation and the memory of this process."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


class Tracer:
    """A record of the lines of a package that this process and its ranks execute."""

    def __init__(self, folder: Path, into: Path) -> None:
        self._prefix = f"{folder}{os.sep}"
        self._cut = len(str(folder.parent)) + 1
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
            # Unbuffered: a rank may be killed at any time.
            text = f"{frame.f_code.co_filename[self._cut :]}:{line}\n"
            os.write(self.descriptor, text.encode())


def executed_lines(path: Path) -> dict[str, list[int]]:
    """Return the lines that a `Tracer` has written, by file."""
    lines: dict[str, set[int]] = {}
    for row in path.read_text().splitlines() if path.exists() else ():
        file, _, line = row.rpartition(":")
        lines.setdefault(file, set()).add(int(line))
    return {file: sorted(found) for file, found in sorted(lines.items())}


# --- the engine's copies --------------------------------------------------------------------------


class Copy:
    """A copy of an engine's package, of which one file can be changed."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(engine.folder, folder / engine.package, ignore=ignored)
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
        # By its hash: two versions may have one size and be of one second.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        py_compile.compile(str(path), doraise=True, invalidation_mode=mode)

    def use(self) -> None:
        """Let this process import the copy, also if it has imported the package before."""
        sys.path.insert(0, str(self.folder))
        for name in [name for name in sys.modules if self.engine.is_module(name)]:
            del sys.modules[name]
        importlib.invalidate_caches()
        EngineRegistry.refresh()


# --- stages ---------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True, slots=True)
class Stage:
    """The cases of one tier at one world size."""

    tier: str
    world: int

    def __str__(self) -> str:
        return f"{self.tier}, world {self.world}"

    def selection(self, engine: Engine) -> Selection:
        """Return the stage's cases for `make_plan`, with those of the quick tier."""
        return Selection(name=engine.backend, worlds=(self.world,), quick=self.tier == "quick")

    def items(self, engine: Engine, root: Path) -> dict[str, Item]:
        """Return the stage's cases in their settings, by name."""
        found = make_plan(self.selection(engine), root)
        return {
            f"{item.case.id} {item.target.model_type} {item.target.world}": item
            for item in found
            if item.case.quick == (self.tier == "quick") and not item.absent
        }


@dataclass(kw_only=True, slots=True)
class Known:
    """The facts about a case in a setting that the unchanged engine has shown.

    Attributes:
        seconds: time that it took.
        status: how it ended.
        lines: the lines that it executes, by file; None if that is not known.
        kills: changed engines that it has failed so far.
    """

    seconds: float
    status: str
    lines: Mapping[str, Sequence[int]] | None = None
    kills: int = 0

    def executes(self, mutation: Mutation) -> bool:
        """Return whether the case executes the changed place, or might."""
        if self.lines is None:
            return True
        first, last = mutation.lines
        return any(first <= line <= last for line in self.lines.get(mutation.file, ()))


def patient(item: Item, seconds: float) -> Item:
    """Return the item with a deadline for a case that takes so long on the unchanged engine."""
    deadline = max(AT_LEAST_S, SLOWER * seconds)
    return replace(item, target=replace(item.target, patience=deadline / CASE_DEADLINE_S))


# --- the run --------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Child:
    """A process that runs cases, with the time at which it is ended."""

    pid: int
    pipe: Connection
    copy: int
    task: Any
    began: float
    end: float
    running: str = ""


@dataclass(kw_only=True)
class Campaign:
    """A campaign on one engine.

    Attributes:
        engine: the engine.
        work: folder for copies, models and coverage.
        lanes: number of changed engines that run at the same time.
        deadline: time of `time.monotonic` after which none is started.
    """

    engine: Engine
    work: Path
    lanes: int = 1
    deadline: float = float("inf")
    known: dict[str, Known] = field(default_factory=dict[str, Known])
    names: dict[Stage, list[str]] = field(default_factory=dict[Stage, list[str]])
    _copies: list[Copy] = field(default_factory=list[Copy])

    def __post_init__(self) -> None:
        self.root = self.work / "root"
        self.root.mkdir(parents=True)
        scratch = self.work / "tmp"
        scratch.mkdir()
        tempfile.tempdir = os.environ["TMPDIR"] = str(scratch)
        if self.engine.shim:
            os.environ[SIMULATED_CUDA] = "1"
        self._copies = [Copy(self.engine, self.work / f"copy{i}") for i in range(self.lanes)]
        self._copies[0].use()
        offer(f"{self.engine.package}.plugin:PLUGIN", self.work / "site")
        self._copies[0].use()
        torch.set_num_threads(1)
        load_cases()
        self._preload()

    def _preload(self) -> None:
        """Import the packages that the engine imports, without the engine's own."""
        listing = self.work / "modules.json"

        def look(_: Connection) -> None:
            before = set(sys.modules)
            package = importlib.import_module(self.engine.package)
            for module in pkgutil.walk_packages(package.__path__, f"{self.engine.package}."):
                # An optional package may be absent.
                with suppress(ImportError):
                    importlib.import_module(module.name)
            names = [name for name in sys.modules if name not in before]
            listing.write_text(json.dumps(names))

        self._run([("modules", None)], lambda _task, _copy: look, lambda *_: None, seconds=300.0)
        own = ("megatron", "transformer_engine") if self.engine.shim else ()
        for name in json.loads(listing.read_text()):
            if self.engine.is_module(name) or name.partition(".")[0] in own:
                continue
            with suppress(ImportError):
                importlib.import_module(name)
        _check_threads()

    # --- the unchanged engine ------------------------------------------------------------------

    def prepare(self, stage: Stage) -> None:
        """Run a stage on the unchanged engine: times, the oracle's results, and lines.

        The oracle's results stay in this process and in all that are forked from it. Cases that do
        not pass are left out.
        """
        items = stage.items(self.engine, self.root)
        print(f"{stage}: {len(items)} cases on the unchanged engine", flush=True)
        with launched_by(Forking(cpu_s=3600)):
            for name, item in items.items():
                # They are kept in a cache of the process, and must look at every change.
                if not item.case.id.startswith("plugin."):
                    outcome = run_case(item.case, item.target)
                    self.known[name] = Known(seconds=outcome.seconds, status=outcome.status)
            close_pools()
        gc.collect()
        gc.freeze()
        _check_threads()
        self._cover(items)
        for name in items:
            if self.known[name].status not in ("passed", "refused"):
                print(f"  left out: {name} ended as {self.known[name].status}", flush=True)
        self.names[stage] = [
            name for name in items if self.known[name].status in ("passed", "refused")
        ]

    def _cover(self, items: Mapping[str, Item]) -> None:
        """Find the lines that each case executes, each in processes of its own."""
        lines = self.work / "lines"
        lines.mkdir(exist_ok=True)
        cache = self.work.parent / f"lines-{self.engine.backend}-{self._digest()}.json"
        kept: dict[str, Any] = json.loads(cache.read_text()) if cache.exists() else {}

        def work(task: tuple[str, Item], copy: Copy) -> Callable[[Connection], None]:
            name, item = task

            def trace(pipe: Connection) -> None:
                tracer = Tracer(copy.folder / self.engine.package, lines / name)
                tracer.start()
                with launched_by(Forking(cpu_s=3600, tracer=tracer)):
                    # Under the tracer: the descriptor is read here.
                    (again,) = (
                        one
                        for one in make_plan(
                            Selection(name=self.engine.backend, worlds=(item.target.world,)),
                            self.root,
                        )
                        if one.case.id == item.case.id
                        and one.target.model_type == item.target.model_type
                    )
                    outcome = run_case(again.case, patient(again, 60.0).target)
                    sys.settrace(None)
                    close_pools()
                pipe.send((outcome.status, outcome.seconds))

            return trace

        def done(task: tuple[str, Item], told: Sequence[Any], _child: Child) -> None:
            name, _ = task
            status, seconds = told[-1] if told else ("timeout", 0.0)
            # A traced case that did not end well may not have come to all of its lines.
            well = status in ("passed", "refused")
            kept[name] = [status, seconds, executed_lines(lines / name) if well else None]

        tasks = [(name, item) for name, item in items.items() if name not in kept]
        self._run(tasks, work, done, seconds=1800.0)
        cache.write_text(json.dumps(kept))
        for name in items:
            status, seconds, executed = kept[name]
            known = self.known.setdefault(name, Known(seconds=seconds, status=status))
            known.lines = executed

    def _digest(self) -> str:
        text = json.dumps([self.engine.files(), suite(), sys.version, torch.__version__])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    # --- changed engines -----------------------------------------------------------------------

    def judge(
        self,
        mutations: Sequence[Mutation],
        stage: Stage,
        listen: Callable[[Mutation, dict[str, Any]], None],
    ) -> None:
        """Run a stage on changed engines, and call ``listen`` with each result.

        A result has ``verdict`` and, if a case failed, ``case``, ``status`` and ``message``.
        """

        def work(mutation: Mutation, copy: Copy) -> Callable[[Connection], None]:
            chosen = self._order(mutation, stage)

            def look(pipe: Connection) -> None:
                pipe.send(("result", self._look(mutation, stage, chosen, pipe)))

            return look

        def done(mutation: Mutation, told: Sequence[Any], child: Child) -> None:
            results = [value for kind, value in told if kind == "result"]
            seconds = round(time.monotonic() - child.began, 2)
            if results:
                result = results[-1]
            else:
                # The process of the cases itself ended, or was ended at its deadline.
                late = time.monotonic() > child.end
                verdict = "timeout" if late else "suite-error"
                result = {"verdict": verdict, "case": child.running, "message": "no result"}
            if result["verdict"] in KILLED and result["case"] in self.known:
                self.known[result["case"]].kills += 1
            listen(mutation, result | {"seconds": seconds})

        slowest = sum(self.known[name].seconds for name in self.names[stage])
        with_sources = list(mutations)
        self._run(with_sources, work, done, seconds=120.0 + 2 * SLOWER * slowest, changes=True)

    def _order(self, mutation: Mutation, stage: Stage) -> list[str]:
        """Return the stage's cases that execute a change: those that kill most per second first."""
        chosen = [name for name in self.names[stage] if self.known[name].executes(mutation)]
        return sorted(
            chosen,
            key=lambda name: -(self.known[name].kills + 1) / (self.known[name].seconds + 0.05),
        )

    def executed(self, mutation: Mutation, stage: Stage) -> bool:
        """Return whether a case of the stage executes a change."""
        return any(self.known[name].executes(mutation) for name in self.names[stage])

    def _look(
        self, mutation: Mutation, stage: Stage, chosen: Sequence[str], pipe: Connection
    ) -> dict[str, Any]:
        if mutation.imported and not _imports(mutation.file):
            return {"verdict": "invalid", "case": "", "message": "cannot be imported"}
        try:
            items = stage.items(self.engine, self.root)
        except CannotRun as error:
            return {"verdict": "killed", "case": "plan", "message": str(error)[:300]}
        # Cases that apply to the changed engine alone, as its capabilities are different.
        other = [name for name in items if name not in self.known]
        seconds = sum(self.known[name].seconds for name in chosen)
        errors: list[str] = []
        with launched_by(Forking(cpu_s=int(60 + SLOWER * seconds))):
            for name in (*other, *chosen):
                if name not in items:
                    continue
                pipe.send(("case", name))
                known = self.known.get(name)
                item = patient(items[name], known.seconds if known else 0.0)
                outcome = run_case(item.case, item.target)
                if outcome.status in BAD:
                    return {"verdict": _verdict(outcome), "case": name} | _told(outcome)
                if outcome.status == "suite-error":
                    errors.append(name)
                    told = {"case": name} | _told(outcome)
        if errors:
            return {"verdict": "suite-error"} | told
        return {"verdict": "survived", "case": "", "message": ""}

    # --- processes -----------------------------------------------------------------------------

    def _run(
        self,
        tasks: Iterable[Any],
        work: Callable[[Any, Copy], Callable[[Connection], None]],
        done: Callable[[Any, Sequence[Any], Child], None],
        *,
        seconds: float,
        changes: bool = False,
    ) -> None:
        """Run each task in a forked process, several at a time, and hand over what it sent."""
        waiting = list(tasks)[::-1]
        running: dict[Connection, Child] = {}
        told: dict[Connection, list[Any]] = {}
        free = list(range(len(self._copies)))
        contexts: dict[int, Any] = {}
        try:
            while running or waiting:
                late = changes and time.monotonic() > self.deadline
                while free and waiting and not late:
                    task = waiting.pop()
                    copy = free.pop()
                    if changes:
                        contexts[copy] = self._copies[copy].changed(task)
                        contexts[copy].__enter__()
                    child = self._fork(copy, task, work(task, self._copies[copy]), seconds)
                    running[child.pipe] = child
                    told[child.pipe] = []
                if not running:
                    return
                first = min(child.end for child in running.values())
                ready = wait(list(running), timeout=max(0.0, first - time.monotonic()))
                ended = [c for c in running.values() if time.monotonic() > c.end]
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    child = running[pipe]
                    try:
                        message = pipe.recv()
                    except EOFError:
                        ended.append(child)
                        continue
                    told[pipe].append(message)
                    if message[0] == "case":
                        child.running = message[1]
                for child in {id(one): one for one in ended}.values():
                    _end(child)
                    del running[child.pipe]
                    if changes:
                        contexts.pop(child.copy).__exit__(None, None, None)
                    free.append(child.copy)
                    done(child.task, told.pop(child.pipe), child)
                    self._sweep(running.values())
        finally:
            for child in running.values():
                _end(child)

    def _fork(
        self, copy: int, task: Any, work: Callable[[Connection], None], seconds: float
    ) -> Child:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                # Its ranks are of the same group, and end with it.
                os.setsid()
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                ours.close()
                log = os.open(self.work / f"output{copy}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                self._copies[copy].use()
                work(theirs)
                code = 0
            # The boundary of a process; its parent finds that it sent no result.
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        theirs.close()
        now = time.monotonic()
        return Child(pid=pid, pipe=ours, copy=copy, task=task, began=now, end=now + seconds)

    def _sweep(self, running: Iterable[Child]) -> None:
        """Remove the folders that ended processes have left."""
        oldest = min((child.began for child in running), default=time.monotonic())
        before = time.time() - (time.monotonic() - oldest) - 1.0
        for folder in (*self.root.iterdir(), *(self.work / "tmp").iterdir()):
            with suppress(FileNotFoundError):
                if folder.name != "models" and folder.stat().st_mtime < before:
                    shutil.rmtree(folder, ignore_errors=True)


def _end(child: Child) -> None:
    """End a process with its ranks, and wait for it."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    # In the moment after the fork there is no group yet.
    with suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    child.pipe.close()


def _imports(file: str) -> bool:
    """Return whether a module can be imported, tried in a process of its own."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            importlib.import_module(file.removesuffix(".py").replace("/", ".").removesuffix(".__init__"))
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _verdict(outcome: Outcome) -> str:
    if outcome.status == "timeout":
        return "timeout"
    died = outcome.message.startswith("engine_conformance") and "\n--- rank 0 died" in outcome.message
    return "crash" if died else "killed"


def _told(outcome: Outcome) -> dict[str, str]:
    lines = outcome.message.strip().splitlines()
    return {"message": " | ".join([*lines[:2], *lines[-1:]])[:400]}


def _check_threads() -> None:
    """Raise if this process has a second thread, with which it cannot be forked."""
    count = len(os.listdir("/proc/self/task"))
    if count != 1:
        raise RuntimeError(
            f"the campaign's process has {count} threads, expected 1: a package that it imports "
            "starts threads, and a process with threads cannot be forked"
        )


# --- the command line -----------------------------------------------------------------------------


def identity(engine: Engine, mutation: Mutation) -> str:
    """Return the id of a changed engine."""
    return f"{engine.backend}:{mutation.place}"


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results in a file, by id; the last of several is the newest."""
    rows = (json.loads(line) for line in path.read_text().splitlines() if line)
    return {row["id"]: row for row in rows}


class Results:
    """The file with a line for each changed engine."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self.path = path
        self._engine = engine
        self._digests = {
            file: hashlib.sha256(text.encode()).hexdigest()[:12]
            for file, text in engine.files().items()
        }
        found = read_results(path) if path.exists() else {}
        # Of another state of the source: places have other meanings there.
        self.rows = {
            name: row
            for name, row in found.items()
            if self._digests.get(row["file"]) == row["source"]
        }
        if dropped := len(found) - len(self.rows):
            print(f"{path}: {dropped} results are of other sources, and are left out")

    def of(self, mutation: Mutation) -> dict[str, Any]:
        """Return the result of a change so far."""
        return self.rows.get(identity(self._engine, mutation), {"verdict": "", "passed": []})

    def add(self, mutation: Mutation, stage: Stage | None, result: Mapping[str, Any]) -> None:
        """Add the result of a stage, or of none."""
        before = self.of(mutation)
        passed = list(before["passed"])
        if stage is not None and result["verdict"] == "survived":
            passed.append(str(stage))
        row = {
            "id": identity(self._engine, mutation),
            "file": mutation.file,
            "line": mutation.line,
            "operator": mutation.operator,
            "function": mutation.function,
            "before": mutation.before,
            "after": mutation.after,
            "source": self._digests[mutation.file],
            "verdict": result["verdict"],
            "case": result.get("case", ""),
            "tier": stage.tier if stage else "",
            "world": stage.world if stage else 0,
            "passed": passed,
            "seconds": round(before.get("seconds", 0.0) + result.get("seconds", 0.0), 2),
            "message": result.get("message", ""),
        }
        self.rows[row["id"]] = row
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def compact(self) -> None:
        """Rewrite the file with one line for each changed engine."""
        whole = self.path.with_suffix(".tmp")
        whole.write_text("".join(json.dumps(row) + "\n" for row in self.rows.values()))
        whole.replace(self.path)


def run(
    campaign: Campaign, mutations: Sequence[Mutation], stages: Sequence[Stage], results: Results
) -> None:
    """Run all stages on the changes that have no verdict yet, as far as the time goes."""
    for stage in stages:
        if time.monotonic() > campaign.deadline:
            return
        campaign.prepare(stage)
        left = [
            one
            for one in mutations
            if results.of(one)["verdict"] in ("", "survived", "not-executed", "suite-error")
            and str(stage) not in results.of(one)["passed"]
        ]
        executed = [one for one in left if campaign.executed(one, stage)]
        print(f"{stage}: {len(executed)} changed engines", flush=True)
        for one in left:
            if one not in executed and not results.of(one)["verdict"]:
                results.add(one, None, {"verdict": "not-executed"})
        count = Counter[str]()

        def listen(
            mutation: Mutation,
            result: dict[str, Any],
            stage: Stage = stage,
            count: Counter[str] = count,
        ) -> None:
            results.add(mutation, stage, result)
            count[result["verdict"]] += 1
            print(
                f"{result['verdict']:<12} {result['seconds']:6.1f} s  "
                f"{identity(campaign.engine, mutation):<60} {result.get('case', '')}",
                flush=True,
            )

        campaign.judge(executed, stage, listen)
        print(f"{stage}: {dict(count)}", flush=True)


def main() -> int:
    """Run a campaign and return 0, or 1 if ``--only`` names a change that survives."""
    options = _options()
    engine = ENGINES[options.engine]
    everything = mutations_of(engine)
    if options.only:
        chosen = [one for one in everything if identity(engine, one) == options.only]
        if not chosen:
            raise SystemExit(f"no change is called {options.only}; --list shows all")
    else:
        chosen = sampled(everything, options.seed, options.count)
    if options.list:
        for one in chosen:
            print(f"{identity(engine, one)}\n  - {one.before}\n  + {one.after}")
        return 0
    tiers = TIERS[: TIERS.index(options.tier) + 1]
    stages = [Stage(tier, world) for tier in tiers for world in options.world]
    out: Path = options.resume or options.out or Path(f"build/campaign/{engine.backend}.jsonl")
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists() and not options.resume and not options.only:
        raise SystemExit(f"{out} exists: --resume {out} goes on with it, or name another --out")
    cache = options.work.absolute()
    cache.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.budget
    with tempfile.TemporaryDirectory(prefix="campaign-", dir=cache) as folder:
        if options.only:
            out = Path(folder) / "only.jsonl"
        results = Results(out, engine)
        campaign = Campaign(
            engine=engine, work=Path(folder), lanes=options.lanes, deadline=deadline
        )
        try:
            run(campaign, chosen, stages, results)
        finally:
            if results.rows:
                results.compact()
    rows = [results.of(one) for one in chosen if results.of(one)["verdict"]]
    print("\n".join(_shown(row) for row in rows) if options.only else summary(rows, stages))
    if options.record:
        record(engine.backend, rows, seed=options.seed, stages=list(map(str, stages)))
    return int(bool(options.only) and any(row["verdict"] not in KILLED for row in rows))


def _shown(row: Mapping[str, Any]) -> str:
    return (
        f"{row['id']}: {row['verdict']}\n  in {row['file']}, line {row['line']}, "
        f"{row['function']}\n  - {row['before']}\n  + {row['after']}\n"
        f"  by {row['case'] or 'no case'} ({row['seconds']} s)\n  {row['message']}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=sorted(ENGINES), required=True)
    parser.add_argument("--seed", type=int, default=7, help="of the order of the changes")
    parser.add_argument("--count", type=int, help="so many changes; default: all")
    parser.add_argument(
        "--budget", type=float, default=3600.0, help="seconds after which no change is tried"
    )
    parser.add_argument("--tier", choices=TIERS, default="full")
    parser.add_argument(
        "--world",
        type=lambda text: [int(word) for word in text.split(",")],
        default=[1, 2],
        help="numbers of ranks, by commas; default: 1,2",
    )
    parser.add_argument("--lanes", type=int, default=1, help="changed engines at the same time")
    parser.add_argument("--out", type=Path, help="results; default: build/campaign/ENGINE.jsonl")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with these results")
    parser.add_argument("--only", metavar="ID", help="one change alone")
    parser.add_argument("--list", action="store_true", help="show the changes and run none")
    parser.add_argument(
        "--record", action="store_true", help="write the results for docs/mutants.md"
    )
    parser.add_argument("--work", type=Path, default=Path("build/campaign"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

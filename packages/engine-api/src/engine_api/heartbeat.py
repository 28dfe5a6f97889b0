"""Detection of failed ranks: a heartbeat of every rank, and notes on the ranks that failed.

A daemon thread of each rank publishes a beat once a second in the store through which the ranks
found each other, over a connection of its own. A rank that fails, or closes its last group, leaves
a note there. ``watched(call)`` wraps calls with collectives. A call that fails in it because of
another rank ends in a ``RankFailure`` that names the failed rank, its fate, its call and its log.

A rank that waits for a rank that will not join is interrupted: its groups are aborted, and its
connections to other ranks are shut down (gloo has no abort). That happens when a rank's process is
gone (seen on the same host; on other hosts known by a note of a rank that saw it, or by silence for
``timeout_s``), when it has failed in the same call, or when it closed after an error.

::

    engine_api/<group>/beat/<rank>     Beat, overwritten
    engine_api/<group>/notes           number of notes
    engine_api/<group>/note/<n>        Note

A process has one watch, made with its first ``TorchComm`` and ended with its last; without one
``watched`` does nothing.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import atexit
import logging
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from engine_api.codec import decode, encode, register
from engine_api.connections import Process, age, hang_up
from engine_api.errors import EngineError, RankFailure

log = logging.getLogger("engine_api")

# Seconds between two beats.
PERIOD_S = 1.0
# Seconds of silence after which a rank counts as gone.
TIMEOUT_S = 600.0
# Seconds that a call has to end by itself, once another rank has failed in it.
GRACE_S = 2.0
# Seconds for finding the rank that is gone, once a collective has failed.
EXPLAIN_S = 10.0
# Seconds between two checks during that time.
LOOK_S = 0.05
# Seconds that the thread has for one check; a longer one means that the store hangs.
STORE_S = 3.0

E = TypeVar("E", bound=BaseException)
T = TypeVar("T")
Item = TypeVar("Item")
_END: Any = object()


@register
@dataclass(frozen=True, slots=True)
class Call:
    """A call with collectives in it: the ``number``-th of its ``lane``, on every rank."""

    lane: str
    number: int
    name: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.name} (call {self.number})"


@register
@dataclass(frozen=True, slots=True)
class Beat:
    """A rank's sign of life."""

    count: int
    """Number of beats of this rank so far."""

    at: float
    """Time of the beat by the clock of the rank's host, as of ``time.time()``."""

    call: Call | None
    """The call that the rank is in, or None between calls."""


@register
@dataclass(frozen=True, slots=True)
class Note:
    """A report on the end or failure of a rank, written by itself or by a rank that saw it.

    Attributes:
        rank: the rank that the report is about.
        call: the call in which it failed; None if it is gone for good.
        text: description for the errors of the other ranks.
        failures: failures of other ranks that made it stop, by rank.
        expected: True if it closed without an error.
    """

    rank: int
    call: Call | None
    text: str
    failures: Mapping[int, str] = field(default_factory=dict[int, str])
    expected: bool = False


@dataclass(eq=False)
class _OpenCall:
    """A call that runs in this process."""

    call: Call
    doomed: float | None = None
    """Time since which it is known that a rank will not join, or None."""
    aborted: bool = False


def mark_as_agreed(error: E) -> E:
    """Mark an error that all ranks know about, each through an error of its own."""
    error.__dict__["engine_api_agreed"] = True
    return error


def raised_by_all(error: BaseException) -> bool:
    """Return whether every rank raises an error of its own for the cause of ``error``.

    Then all ranks have left the collective in which they agreed about it, and may start another.
    """
    return "engine_api_agreed" in error.__dict__


def _is_agreed(error: BaseException) -> bool:
    return isinstance(error, RankFailure) or raised_by_all(error)


# gloo has no error class of its own. Its texts look like
# "[…/gloo/transport/tcp/pair.cc:553] Connection closed by peer …".
_GLOO = re.compile(r"gloo[/\\]")


def is_distributed(error: BaseException) -> bool:
    """Return whether an error reports a failed collective, and not a fault of this rank."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.distributed.DistError) or _GLOO.search(str(error)) is not None


# --- the process's watch -----------------------------------------

_current: Watch | None = None
_members = 0
_lock = threading.Lock()
# Its attribute ``inside`` is True while this thread is in a watched call.
_calls = threading.local()


class Membership:
    """A ``TorchComm``'s reference to this process's watch."""

    def __init__(self, watch: Watch) -> None:
        self._watch: Watch | None = watch

    def leave(self) -> None:
        """Release the watch, whose thread ends with its last reference.

        A second call does nothing.
        """
        watch = self._watch
        self._watch = None
        if watch is not None:
            _release(watch)


def join(
    group: str, all_gather: Callable[[Any], list[Any]], timeout_s: float = TIMEOUT_S
) -> Membership:
    """Join the watch over all ranks of the default group.

    The call is a collective.

    Args:
        group: a name that no other group of this run has, the same on all ranks.
        all_gather: a gather over all ranks, by which they exchange their descriptions.
        timeout_s: seconds of silence after which a rank counts as gone. The value of the first
            member holds for all.
    """
    global _current, _members  # noqa: PLW0603 - there is one per process
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    store: Any = c10d._get_default_store()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - it has no public name
    # The token is needed because an earlier group in the same store may have had this name.
    mine = (_current.name if _current else None, secrets.token_hex(4), Process.this())
    rows: list[tuple[str | None, str, Process]] = all_gather(mine)
    with _lock:
        # After a failure of some ranks not all of them may have the same watch. Then all of them
        # start a new one.
        if _current is None or any(name != _current.name for name, _, _ in rows):
            if _current is not None:
                _current.stop()
            processes = [process for _, _, process in rows]
            name = f"engine_api/{group}-{rows[0][1]}"
            _current = Watch(name, store, dist.get_rank(), processes, timeout_s)
            _members = 0
        _members += 1
        return Membership(_current)


def _release(watch: Watch) -> None:
    global _current, _members  # noqa: PLW0603 - there is one per process
    # Whoever destroys a group of NCCL waits for its other ranks, also for one that is stopped.
    if watch.has_lost_ranks:
        _try_to_abort_groups()
    with _lock:
        # Another watch has replaced it.
        if watch is not _current:
            return
        _members -= 1
        if _members:
            return
        _current = None
    watch.say_goodbye(sys.exception())
    watch.stop()


@contextmanager
def watched(name: str, lane: str = "engine") -> Generator[None]:
    """Turn errors that other ranks cause in a call into ``RankFailure``, and report own errors.

    Args:
        name: name of the call, for the errors of other ranks.
        lane: name of a sequence of calls that is the same on all ranks.
    """
    watch = _current
    if watch is None or getattr(_calls, "inside", False):
        yield
        return
    opened = watch.enter(name, lane)
    _calls.inside = True
    try:
        yield
    # Ctrl-C and sys.exit are caught as well, because the other ranks wait for this one.
    except BaseException as error:
        if not _is_agreed(error) and (opened.aborted or is_distributed(error)):
            raise watch.failure(opened, error) from error
        watch.note_error(opened, error)
        raise
    else:
        # An aborted device queue ends its kernels without an error.
        if opened.aborted:
            raise watch.failure(opened, None)
    finally:
        _calls.inside = False
        watch.exit(opened)


def watched_each(name: str, items: Iterable[Item], lane: str = "engine") -> Iterator[Item]:
    """Yield ``items``, taking each in a watched call of its own.

    Between two items the reader may do anything, also wait.
    """
    left = iter(items)
    try:
        while True:
            with watched(name, lane):
                item = next(left, _END)
            if item is _END:
                return
            yield item
            # An exported tensor must not be alive while the next one is made.
            del item
    # The reader may stop before the end. Then the iterator frees its resources now.
    finally:
        if isinstance(left, Generator):
            left.close()


class Watch:
    """The heartbeat thread of this rank, with its knowledge of the other ranks.

    Only the thread talks to the store, which may hang.
    """

    def __init__(
        self, name: str, store: Any, rank: int, processes: Sequence[Process], timeout_s: float
    ) -> None:
        self.name = name
        self._rank = rank
        self._processes = list(processes)
        self._timeout_s = timeout_s
        self._port = _port_of(store)
        # The thread needs a connection of its own, because a call may wait in the other one.
        self._store = store.clone()
        self._open: list[_OpenCall] = []
        self._numbers: dict[str, int] = {}
        self._count = 0
        self._looked = time.monotonic()
        # The last beat of each rank, and the local time since which it is known.
        self._beats: dict[int, tuple[Beat | None, float]] = {}
        self._notes: list[Note] = []
        self._outbox: list[Note] = []
        self._gone: dict[int, str] = {}
        # The reason why the store cannot be reached, "" while it can.
        self._lost = ""
        self._explaining = 0
        self._rounds = 0
        self._round = threading.Condition()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine-api-heartbeat", daemon=True)
        # No thread inside torch's code may outlive the interpreter.
        atexit.register(self.stop)
        self._thread.start()

    # --- called by the threads of the engine -----------------------------------------

    def enter(self, name: str, lane: str) -> _OpenCall:
        """Begin a call, and return it."""
        number = self._numbers.get(lane, 0) + 1
        self._numbers[lane] = number
        opened = _OpenCall(Call(lane, number, name))
        self._open.append(opened)
        return opened

    def exit(self, opened: _OpenCall) -> None:
        """End a call."""
        self._open.remove(opened)

    def note_error(self, opened: _OpenCall, error: BaseException) -> None:
        """Report an error to the other ranks, unless they know about it."""
        if _is_agreed(error):
            return
        # The call was refused before anything was sent, so it does not count.
        if isinstance(error, EngineError):
            self._numbers[opened.call.lane] -= 1
            return
        self._publish(Note(self._rank, opened.call, _words(error)))

    def failure(self, opened: _OpenCall, error: BaseException | None) -> RankFailure:
        """Find the ranks that caused a collective's error, and return it as a ``RankFailure``."""
        found = self._find_culprits(opened, error)
        failure = RankFailure(
            {rank: f"{text}\n    noticed in {opened.call}" for rank, text in found.items()}
        )
        self._publish(
            Note(self._rank, opened.call, "stopped with others", failures=failure.failures)
        )
        return failure

    def say_goodbye(self, error: BaseException | None) -> None:
        """Leave a note that this rank will not join any further call."""
        text = "it closed its engine" if error is None else _words(error)
        failures = error.failures if isinstance(error, RankFailure) else {}
        self._publish(Note(self._rank, None, text, failures=failures, expected=error is None))

    def stop(self) -> None:
        """End the thread, unless the store hangs.

        A second call does nothing.
        """
        atexit.unregister(self.stop)
        self._stopping = True
        self._wake.set()
        self._thread.join(STORE_S)

    def _publish(self, note: Note) -> None:
        self._outbox.append(note)
        self._next_round()

    def _next_round(self) -> None:
        """Make the thread check now, and wait until it has done so or hangs."""
        with self._round:
            # It takes two rounds, because the current one may have begun before this call.
            wanted = self._rounds + 2 if self._thread.is_alive() else 0
            end = time.monotonic() + STORE_S
            while (
                self._rounds < wanted
                and self._thread.is_alive()
                and (left := end - time.monotonic()) > 0
            ):
                self._wake.set()
                self._round.wait(min(left, LOOK_S))

    # --- search for the failed ranks -----------------------------------------

    def _find_culprits(self, opened: _OpenCall, error: BaseException | None) -> dict[int, str]:
        """Return the fate of the ranks that caused a failure, by rank."""
        end = time.monotonic() + EXPLAIN_S
        self._explaining += 1
        try:
            while True:
                self._next_round()
                found = self._causes(opened)
                if found or time.monotonic() > end:
                    return found or self._suspects(opened, error)
                time.sleep(LOOK_S)
        finally:
            self._explaining -= 1

    def _causes(self, opened: _OpenCall) -> dict[int, str]:
        """Return the fate of ranks that are known to be gone or stopped, by rank."""
        found: dict[int, str] = {}
        notes = [
            n for n in list(self._notes) if n.call in (None, opened.call) and n.rank != self._rank
        ]
        # If a rank failed and then said goodbye, its first note counts.
        for note in notes:
            if not note.failures and not note.expected:
                found.setdefault(note.rank, self._describe(note))
        for rank, text in (pair for note in notes for pair in note.failures.items()):
            if rank != self._rank:
                found.setdefault(rank, text.partition("\n    noticed in")[0])
        for rank, text in list(self._gone.items()):
            found.setdefault(rank, self._with_log(rank, text))
        stopped = {
            rank: self._with_log(
                rank,
                f"its process {process.pid} on {process.host} is stopped (SIGSTOP?), "
                f"{self._last_seen(rank)}",
            )
            for rank, process in enumerate(self._processes)
            if process.is_stopped()
        }
        return found or stopped

    @property
    def has_lost_ranks(self) -> bool:
        """True if a rank's process is gone, or has been silent for too long."""
        return bool(self._gone)

    def _suspects(self, opened: _OpenCall, error: BaseException | None) -> dict[int, str]:
        """Return the known facts about the other ranks, where no cause was found."""
        others = [rank for rank in range(len(self._processes)) if rank != self._rank]
        if self._lost:
            why = f"the store that it or the launcher serves cannot be reached: {self._lost}"
            return {0 if self._rank else others[0]: why}
        last = {
            note.rank: self._describe(note)
            for note in self._notes
            if note.rank != self._rank and not note.failures
        }
        beats = {rank: self._beats.get(rank, (None, 0.0))[0] for rank in others}
        late = {
            rank: self._with_log(rank, f"it has not come to {opened.call}: {self._last_seen(rank)}")
            for rank, beat in beats.items()
            if beat is None or beat.call != opened.call
        }
        what = str(error).splitlines()[0] if error and str(error) else "a collective was aborted"
        unknown = dict.fromkeys(others, f"it lives, and is in the same call: {what}")
        return last or late or unknown

    def _describe(self, note: Note) -> str:
        where = f" (in {note.call})" if note.call else ""
        return self._with_log(note.rank, f"{note.text}{where}")

    def _with_log(self, rank: int, text: str) -> str:
        return f"{text}\n    its log: {self._processes[rank].log}"

    def _last_seen(self, rank: int) -> str:
        beat, _ = self._beats.get(rank, (None, 0.0))
        return "never seen" if beat is None else f"last seen {age(beat.at)}, {_doing(beat)}"

    # --- the thread -----------------------------------------

    def _run(self) -> None:
        while True:
            last = self._stopping
            try:
                # A lost store does not return, because its host has ended.
                if self._lost:
                    self._find_gone()
                else:
                    self._look()
            except Exception as error:  # noqa: BLE001 - a store whose host has ended may raise anything; errors report it
                self._lost = (str(error) or type(error).__name__).splitlines()[0]
            try:
                self._interrupt()
            # Sockets may raise anything when they are closed. This rank's heartbeat must go on.
            except Exception:
                log.exception("could not interrupt a rank that waits in vain")
            with self._round:
                self._rounds += 1
                self._round.notify_all()
            if last:
                return
            self._wake.wait(LOOK_S if self._explaining else PERIOD_S)
            self._wake.clear()

    def _look(self) -> None:
        self._find_gone()
        while self._outbox:
            self._write(self._outbox[0])
            self._outbox.pop(0)
        self._count += 1
        running = self._open[0].call if self._open else None
        self._store.set(
            self._key(f"beat/{self._rank}"), encode(Beat(self._count, time.time(), running))
        )
        self._read_notes()
        self._watch_neighbours()

    def _find_gone(self) -> None:
        for rank, process in enumerate(self._processes):
            if rank == self._rank or rank in self._gone or not process.is_gone():
                continue
            if not self._lost:
                self._read_notes()
                self._read_beat(rank)
            # The rank said goodbye.
            if any(note.rank == rank and note.call is None for note in self._notes):
                continue
            self._mark_gone(
                rank,
                f"its process {process.pid} on {process.host} is gone (killed? out of memory?)",
            )

    def _watch_neighbours(self) -> None:
        """Follow the beat of the next rank that is not gone.

        Other ranks follow the further ones.
        """
        now = time.monotonic()
        # This process itself was asleep.
        if now - self._looked > 3 * PERIOD_S:
            self._beats = {rank: (beat, now) for rank, (beat, _) in self._beats.items()}
        self._looked = now
        size = len(self._processes)
        if self._explaining:
            for rank in range(size):
                self._read_beat(rank)
            return
        for step in range(1, size):
            rank = (self._rank + step) % size
            if rank in self._gone:
                continue
            self._read_beat(rank)
            if any(note.rank == rank and note.call is None for note in self._notes):
                return
            if now - self._beats[rank][1] < self._timeout_s:
                return
            self._mark_gone(
                rank, f"it has been silent for {self._timeout_s:g} s (stopped? its host lost?)"
            )

    def _mark_gone(self, rank: int, why: str) -> None:
        self._gone[rank] = f"{why}, {self._last_seen(rank)}"
        if not self._lost:
            self._write(Note(rank, None, self._gone[rank]))

    def _interrupt(self) -> None:
        """Abort calls that wait for a rank that will not join."""
        now = time.monotonic()
        for opened in list(self._open):
            if opened.aborted or not self._is_doomed(opened):
                continue
            if opened.doomed is None:
                opened.doomed = now
            if now - opened.doomed >= GRACE_S:
                opened.aborted = True
                _try_to_abort_groups()
                others = [
                    process for rank, process in enumerate(self._processes) if rank != self._rank
                ]
                hang_up(others, spare={self._port} if self._port else set())

    def _is_doomed(self, opened: _OpenCall) -> bool:
        others = (note for note in self._notes if note.rank != self._rank and not note.expected)
        return bool(self._gone) or any(note.call in (None, opened.call) for note in others)

    # --- the store -----------------------------------------

    def _key(self, name: str) -> str:
        return f"{self.name}/{name}"

    def _write(self, note: Note) -> None:
        number = self._store.add(self._key("notes"), 1)
        self._store.set(self._key(f"note/{number}"), encode(note))

    def _read_notes(self) -> None:
        total = self._store.add(self._key("notes"), 0)
        while len(self._notes) < total:
            key = self._key(f"note/{len(self._notes) + 1}")
            # The note is still being written.
            if not self._store.check([key]):
                return
            self._notes.append(_expect(decode(self._store.get(key)), Note))

    def _read_beat(self, rank: int) -> None:
        key = self._key(f"beat/{rank}")
        beat = _expect(decode(self._store.get(key)), Beat) if self._store.check([key]) else None
        known = self._beats.get(rank)
        if known is None or known[0] != beat:
            self._beats[rank] = (beat, time.monotonic())


def _expect(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"expected a {kind.__name__} in the store, got a {type(value).__name__}")
    return value


def _doing(beat: Beat) -> str:
    return f"in {beat.call}" if beat.call else "between calls"


def _words(error: BaseException) -> str:
    if isinstance(error, EngineError):
        return str(error)
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _port_of(store: Any) -> int | None:
    """Return the port of a TCP store, whatever it is wrapped in."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "port", None)


def _try_to_abort_groups() -> None:
    """Abort all groups, and log what keeps some from it: what follows must happen still."""
    try:
        abort_groups()
    except ExceptionGroup:
        log.exception("could not abort some process groups")


def abort_groups() -> None:
    """Abort all of this process's groups whose backends can be aborted (NCCL, not gloo).

    All at once: NCCL frees the memory of a group that it aborts, and CUDA waits for all kernels of
    the device before it does, also for those that wait for a rank in another group. torch's own
    ``_abort_process_group`` calls NCCL's ``ncclGroupStart`` for this, which does not reach the
    threads in which torch aborts.

    Raises:
        ExceptionGroup: what the backends of some groups raised. The others are aborted.
    """
    from torch.distributed import distributed_c10d as c10d

    errors: list[Exception] = []

    def abort(group: Any) -> None:
        try:
            group.abort()
        except Exception as error:  # noqa: BLE001 - it is raised again in the caller's thread
            errors.append(error)

    groups = list(c10d._world.pg_names)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - no public list of groups
    # Daemons: the interpreter's end waits for no other threads.
    threads = [threading.Thread(target=abort, args=(one,), daemon=True) for one in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise ExceptionGroup("groups could not be aborted", errors)

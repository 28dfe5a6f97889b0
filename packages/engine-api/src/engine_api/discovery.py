"""Finding plug-ins: entry points, and rows registered in process. Imports no torch.

A descriptor that does not load, or whose fields are not what they must be, is kept with its cause and shown wherever
plug-ins are listed; it never breaks another plug-in. An import that ends the process or does not return can only be seen
from outside: ``preflight`` looks from there, for the command line. Whoever creates an engine loads the descriptors in
its own process; an import that takes long is named in the log.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine_api.errors import PluginLoadError
from engine_api.plugin import (
    EnginePlugin,
    ProbeResult,
    contract_problem,
    descriptor_problem,
    probe_problem,
)

log = logging.getLogger("engine_api")
LONG_S = 30.0  # after which an import that has not returned is named in the log
# Plug-ins that a child process could not load or probe, with the reason: they are not loaded here. See ``preflight``.
_refused: dict[tuple[str, str], str] = {}
# Called before a plug-in is loaded, with its group and source; a text refuses it.
Before = Callable[[str, str], str]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A plug-in, or the reason why its descriptor is of no use."""

    name: str
    source: str  # "distribution==version (module:attr)" or "in process"
    plugin: EnginePlugin | None = None
    problem: str = ""
    cause: BaseException | None = None

    @property
    def distribution(self) -> str:
        """The part of ``source`` before the version."""
        return self.source.split("==")[0].split(" ")[0]


def refuse(problems: Mapping[tuple[str, str], str]) -> None:
    """Set which plug-ins are not to be loaded in this process, by group and source, and why; earlier ones are forgotten."""
    _refused.clear()
    _refused.update(problems)


def _is_refused(group: str, source: str) -> str:
    return _refused.get((group, source), "")


def discover(group: str, before: Before = _is_refused) -> list[Found]:
    """Return every entry point of ``group``, loaded; broken ones carry their problem."""
    found: dict[tuple[str, str], Found] = {}
    for distribution, source, entry in _entries(group):
        # An editable install beside a stale copy lists the same entry twice.
        key = (distribution, "" if isinstance(entry, Found) else entry.name)
        if key not in found:
            found[key] = entry if isinstance(entry, Found) else _found(entry, group, source, before)
    return sorted(found.values(), key=lambda f: (f.name, f.source))


def _entries(group: str) -> Iterator[tuple[str, str, importlib.metadata.EntryPoint | Found]]:
    for distribution in importlib.metadata.distributions():
        name = source = "a distribution without a readable name"
        try:
            name = printable(str(distribution.metadata["Name"]))
            source = printable(f"{name}=={distribution.version}")
            entries = [entry for entry in distribution.entry_points if entry.group == group]
        # Damaged metadata, of whatever distribution, must not hide what all others offer.
        except Exception as error:  # noqa: BLE001
            problem = f"its metadata cannot be read: {_last_line(error)}"
            yield name, source, Found(name=name, source=source, problem=problem, cause=error)
        else:
            yield from ((name, source, entry) for entry in entries)


def _found(
    entry: importlib.metadata.EntryPoint, group: str, distribution: str, before: Before
) -> Found:
    name, source = printable(entry.name), f"{distribution} ({printable(entry.value)})"
    if problem := before(group, source):
        return Found(name=name, source=source, problem=problem)
    return _load(entry, name, source)


def _load(entry: importlib.metadata.EntryPoint, name: str, source: str) -> Found:
    try:
        with _named_if_long(source):
            plugin = entry.load()
    except KeyboardInterrupt:
        raise  # in this process it is the user's; where a plug-in raises it, ``preflight`` says so
    # A stranger's module may raise anything while it is imported, sys.exit's error or one of its own; it is kept and
    # shown, and ends the listing of no other plug-in.
    except BaseException as error:  # noqa: BLE001
        return Found(
            name=name, source=source, problem=f"its import failed: {_last_line(error)}", cause=error
        )
    try:
        if not isinstance(plugin, EnginePlugin):
            problem = f"it names a {type(plugin).__name__}, not an EnginePlugin"
            return Found(name=name, source=source, problem=problem)
        misfit = descriptor_problem(plugin)
        problem = (
            contract_problem(plugin.contract)
            if misfit is None
            else f"its descriptor is wrong: {misfit}"
        )
    except KeyboardInterrupt:
        raise
    # Its fields may be a stranger's objects, which raise whatever they like when they are compared or printed.
    except BaseException as error:  # noqa: BLE001
        misfit = problem = f"its descriptor cannot be read: {_last_line(error)}"
    return Found(name=name, source=source, plugin=None if misfit else plugin, problem=problem or "")


@contextmanager
def _named_if_long(source: str) -> Generator[None]:
    said = "the import of %s has not returned for %g s; a descriptor must import nothing heavy"
    timer = threading.Timer(LONG_S, log.warning, (said, source, LONG_S))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def probe(found: Found, device: str) -> ProbeResult:
    """Ask a plug-in whether it can run on ``device``; a probe that raises or returns no answer says no, with the reason."""
    assert found.plugin is not None
    try:
        result = found.plugin.probe(device)
        problem = probe_problem(result)
    except KeyboardInterrupt:
        raise  # as in ``_load``
    except BaseException as error:  # noqa: BLE001 - a stranger's code may raise anything
        problem = _last_line(error)
    else:
        if problem is None:
            return ProbeResult(
                ok=result.ok, reason=printable(result.reason), remedy=printable(result.remedy)
            )
    remedy = f"report it to the maintainers of {found.distribution}"
    return ProbeResult(ok=False, reason=f"its probe failed: {problem}", remedy=remedy)


def printable(text: str) -> str:
    """Return a stranger's text as it can be written: halves of surrogate pairs as escapes."""
    return text.encode(errors="backslashreplace").decode()


def _last_line(error: BaseException) -> str:
    return printable(traceback.format_exception_only(error)[-1].strip())


def import_target(target: str, source: str) -> Any:
    """Import ``"module:Name"``; raises ``PluginLoadError`` with the cause when that fails."""
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except KeyboardInterrupt:
        raise  # as in ``_load``
    except BaseException as error:  # a stranger's module may raise anything
        raise PluginLoadError(
            f"{target} could not be imported",
            where=source,
            why=_last_line(error),
            remedy="the error that caused this one stands above it; reinstall the package or what it lacks",
        ) from error

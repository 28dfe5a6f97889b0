"""Discovery of plug-ins through entry points, without importing torch.

A descriptor that does not load, or has wrong fields, is kept with its cause and shown wherever
plug-ins are listed; it never breaks other plug-ins. An import that ends the process or does not
return can only be detected from outside, which ``preflight`` does for the command line. A process
that creates an engine loads the descriptors itself; an import that takes long is named in the log.
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
# Seconds after which an import that has not returned is named in the log.
LONG_S = 30.0
# Plug-ins that a child process could not load or probe, with the reason. They are not loaded here;
# see ``preflight``.
_refused: dict[tuple[str, str], str] = {}
# A function that is called before a plug-in is loaded, with its group and source. A text that it
# returns refuses the plug-in.
Before = Callable[[str, str], str]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A plug-in, or the reason why its descriptor cannot be used."""

    name: str
    """Name of the plug-in, of its entry point or of its distribution."""

    source: str
    """Origin of the plug-in: "distribution==version (module:attr)" or "in process"."""

    plugin: EnginePlugin | None = None
    """The descriptor, or None if it cannot be used."""

    problem: str = ""
    """Reason why the plug-in cannot be used, or "" if it can."""

    cause: BaseException | None = None
    """Error that is the reason, if there is one."""

    @property
    def distribution(self) -> str:
        """The part of ``source`` before the version."""
        return self.source.split("==")[0].split(" ")[0]


def refuse(problems: Mapping[tuple[str, str], str]) -> None:
    """Set the plug-ins that are not loaded in this process, by group and source, with the reason.

    Earlier refusals are forgotten.
    """
    _refused.clear()
    _refused.update(problems)


def _find_refusal(group: str, source: str) -> str:
    return _refused.get((group, source), "")


def discover(group: str, before: Before = _find_refusal) -> list[Found]:
    """Return every entry point of ``group``, loaded.

    Broken ones carry their problem.
    """
    found: dict[tuple[str, str], Found] = {}
    for distribution, source, entry in _entries(group):
        # An editable install next to a stale copy lists the same entry twice.
        key = (distribution, "" if isinstance(entry, Found) else entry.name)
        if key not in found:
            found[key] = entry if isinstance(entry, Found) else _found(entry, group, source, before)
    return sorted(found.values(), key=lambda f: (f.name, f.source))


def _entries(group: str) -> Iterator[tuple[str, str, importlib.metadata.EntryPoint | Found]]:
    for distribution in importlib.metadata.distributions():
        name = source = "a distribution without a readable name"
        try:
            # Python 3.12 warns where a missing field is indexed, as Distribution.version does.
            metadata: Any = distribution.metadata
            name = printable(str(metadata.get("Name")))
            source = printable(f"{name}=={metadata.get('Version')}")
            entries = [entry for entry in distribution.entry_points if entry.group == group]
        # Damaged metadata of any distribution must not hide the plug-ins of all others.
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
    # In this process the interrupt comes from the user. ``preflight`` detects a plug-in that raises
    # it.
    except KeyboardInterrupt:
        raise
    # A third party's module may raise anything while it is imported, such as SystemExit. The error
    # is kept and shown, and does not end the listing of other plug-ins.
    except BaseException as error:  # noqa: BLE001
        return Found(
            name=name, source=source, problem=f"its import failed: {_last_line(error)}", cause=error
        )
    try:
        if not isinstance(plugin, EnginePlugin):
            problem = f"it names a {type(plugin).__name__}, not an EnginePlugin"
            return Found(name=name, source=source, problem=problem)
        misfit = descriptor_problem(plugin)
        if misfit is None:
            problem = contract_problem(plugin.contract)
        else:
            problem = f"its descriptor is wrong: {misfit}"
    except KeyboardInterrupt:
        raise
    # Its fields may be a third party's objects, which may raise anything when they are compared or
    # printed.
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
    """Return a plug-in's own answer on whether it can run on ``device``.

    A probe that raises or returns a wrong type counts as "no", with the reason.
    """
    assert found.plugin is not None
    try:
        result = found.plugin.probe(device)
        problem = probe_problem(result)
    # The same as in ``_load`` holds here.
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a third party's code may raise anything
        problem = _last_line(error)
    else:
        if problem is None:
            return ProbeResult(
                ok=result.ok, reason=printable(result.reason), remedy=printable(result.remedy)
            )
    remedy = f"report it to the maintainers of {found.distribution}"
    return ProbeResult(ok=False, reason=f"its probe failed: {problem}", remedy=remedy)


def printable(text: str) -> str:
    """Return a third party's text with halves of surrogate pairs escaped, so that it prints."""
    return text.encode(errors="backslashreplace").decode()


def _last_line(error: BaseException) -> str:
    return printable(traceback.format_exception_only(error)[-1].strip())


def import_target(target: str, source: str) -> Any:
    """Import and return ``"module:Name"``.

    Raises ``PluginLoadError`` with the cause if the import fails.
    """
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    # The same as in ``_load`` holds here.
    except KeyboardInterrupt:
        raise
    # A third party's module may raise anything.
    except BaseException as error:
        raise PluginLoadError(
            f"{target} could not be imported",
            where=source,
            why=_last_line(error),
            remedy="see the error above that caused this one; reinstall the package or its "
            "missing dependency",
        ) from error

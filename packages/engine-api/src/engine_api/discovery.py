"""Finding plug-ins: entry points, and rows registered in process. Imports no torch.

A descriptor that does not load is kept with its cause and shown wherever plug-ins are
listed; it never breaks another plug-in.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine_api.errors import PluginLoadError
from engine_api.plugin import EnginePlugin, ProbeResult, contract_problem


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


def discover(group: str) -> list[Found]:
    """Every entry point of ``group``, loaded; broken ones carry their problem."""
    found: dict[tuple[str, str], Found] = {}
    for distribution, entry in _entries(group):
        source = f"{distribution.metadata['Name']}=={distribution.version} ({entry.value})"
        # An editable install beside a stale copy lists the same entry twice.
        found.setdefault((distribution.metadata["Name"], entry.name), _load(entry, source))
    return sorted(found.values(), key=lambda f: (f.name, f.source))


def _entries(group: str) -> Iterator[tuple[importlib.metadata.Distribution, importlib.metadata.EntryPoint]]:
    for distribution in importlib.metadata.distributions():
        for entry in distribution.entry_points:
            if entry.group == group:
                yield distribution, entry


def _load(entry: importlib.metadata.EntryPoint, source: str) -> Found:
    # A stranger's module may raise anything while it is imported; whatever it is, it is kept and shown.
    try:
        plugin = entry.load()
    # A module that calls sys.exit must not end the listing of all others.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return Found(name=entry.name, source=source, problem=f"its import failed: {_last_line(error)}", cause=error)
    if not isinstance(plugin, EnginePlugin):
        return Found(name=entry.name, source=source, problem=f"it names a {type(plugin).__name__}, not an EnginePlugin")
    problem = contract_problem(plugin.contract)
    return Found(name=entry.name, source=source, plugin=plugin, problem=problem or "")


def probe(found: Found, device: str) -> ProbeResult:
    """Ask a plug-in whether it can run on ``device``; a probe that raises says no, with the reason."""
    assert found.plugin is not None
    try:
        return found.plugin.probe(device)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's code may raise anything
        return ProbeResult(ok=False, reason=f"its probe failed: {_last_line(error)}",
                           remedy=f"report it to the maintainers of {found.distribution}")  # fmt: skip


def _last_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()


def import_target(target: str, source: str) -> Any:
    """Import ``"module:Name"``; raises ``PluginLoadError`` with the cause when that fails."""
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # a stranger's module may raise anything
        raise PluginLoadError(
            f"{target} could not be imported", where=source, why=_last_line(error),
            remedy="the error that caused this one stands above it; reinstall the package or what it lacks",
        ) from error  # fmt: skip

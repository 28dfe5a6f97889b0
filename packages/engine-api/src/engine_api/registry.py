"""The registry that resolves (model type, backend, device) to a class.

Every resolution keeps its trace: each candidate accepted, or rejected with a reason and a remedy.
An explicit device is never replaced; ``auto`` takes an accelerator, and the CPU only where no
candidate's accelerator is usable, and the trace says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from engine_api.config import EngineConfig, near_matches
from engine_api.devices import DEVICES
from engine_api.discovery import Found, discover, import_target, probe
from engine_api.errors import (
    ConfigError,
    ContractMismatch,
    PluginConflict,
    PluginLoadError,
    PluginNotFound,
    PluginUnavailable,
)
from engine_api.plugin import (
    CONTRACT,
    ENGINE_GROUP,
    KNOWN_DISTRIBUTIONS,
    ROLLOUT_GROUP,
    EnginePlugin,
    Row,
    descriptor_problem,
)
from engine_api.rollout import WeightExporter, WeightWire, WholeExporter

log = logging.getLogger("engine_api")


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One device of one plug-in, with the verdict of its probe."""

    source: str
    device: str
    accepted: bool
    reason: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        verdict = "accepted" if self.accepted else "rejected"
        reason = f": {self.reason}" if self.reason else ""
        remedy = f" ({self.remedy})" if self.remedy else ""
        return f"{self.device} by {self.source}: {verdict}{reason}{remedy}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolution:
    """The chosen plug-in, row and device, with the trace of the candidates."""

    plugin: EnginePlugin
    row: Row
    device: str
    source: str
    trace: tuple[Candidate, ...]

    def load(self) -> Any:
        """Import and return the class."""
        return import_target(self.row.target, self.source)


class Registry:
    """The plug-ins of one entry-point group, and the rows registered in this process."""

    def __init__(self, group: str, kind: str) -> None:
        self.group = group
        self.kind = kind
        self._in_process: list[Found] = []
        self._discovered: list[Found] | None = None

    def found(self) -> list[Found]:
        """Return every plug-in, usable or not.

        Entry points are read once per process.
        """
        if self._discovered is None:
            self._discovered = discover(self.group)
        return [*self._discovered, *self._in_process]

    def refresh(self) -> None:
        """Forget the entry points that were read (after an installation in the same process)."""
        self._discovered = None

    def register(
        self, *, model_type: str = "language_model", backend: str, device: str, **plugin: Any
    ) -> Callable[[type], type]:
        """Return a class decorator that offers the class in this process.

        It is meant for a notebook or a test.
        """

        def add(cls: type) -> type:
            row = Row(
                model_types=(model_type,),
                backends=(backend,),
                devices=(device,),
                target=f"{cls.__module__}:{cls.__qualname__}",
            )
            descriptor = EnginePlugin(name=backend, contract=CONTRACT, rows=(row,), **plugin)
            if problem := descriptor_problem(descriptor):
                raise PluginLoadError(
                    f"{cls.__qualname__} cannot be registered",
                    where=self.group,
                    why=problem,
                    remedy="fix the argument of `register`",
                )
            self._classes[row.target] = cls
            # A notebook's cell that runs again replaces the class that it registered before.
            self._in_process = [
                f for f in self._in_process if f.plugin is None or f.plugin.rows != (row,)
            ]
            self._in_process.append(
                Found(name=backend, source=f"in process ({row.target})", plugin=descriptor)
            )
            return cls

        return add

    @property
    def _classes(self) -> dict[str, type]:
        # A class defined inside a function cannot be imported by name; it is kept here.
        return self.__dict__.setdefault("_class_table", {})

    def unregister(self, backend: str) -> None:
        """Remove the classes that ``register`` offered under ``backend``."""
        self._in_process = [f for f in self._in_process if f.name != backend]

    def rows(self) -> list[tuple[Found, Row]]:
        """Return every row of every usable plug-in."""
        return [
            (f, row) for f in self.found() if f.plugin and not f.problem for row in f.plugin.rows
        ]

    def resolve(
        self, *, model_type: str = "language_model", backend: str, device: str = "auto"
    ) -> Resolution:
        """Return the plug-in, row and device that serve a request.

        Raises a ``PluginError`` with reason and remedy if there is none.
        """
        offers = [
            (f, row)
            for f, row in self.rows()
            if model_type in row.model_types and backend in row.backends
        ]
        if not offers:
            raise self._not_found(model_type, backend)
        wanted_devices = DEVICES if device == "auto" else (device,)
        # Conflicts are checked before any probe, because they do not depend on this machine.
        for wanted in wanted_devices:
            self._refuse_conflict(offers, model_type, backend, wanted)
        trace: list[Candidate] = []
        for wanted in wanted_devices:
            chosen = self._try_device(offers, wanted, trace)
            if chosen:
                return self._accept(chosen, wanted, trace, auto=device == "auto")
        raise self._unavailable(model_type, backend, device, offers, trace)

    def load(self, resolution: Resolution) -> Any:
        """Return the class of a resolution, or raise ``PluginLoadError``."""
        return self._classes.get(resolution.row.target) or resolution.load()

    def _try_device(
        self, offers: list[tuple[Found, Row]], device: str, trace: list[Candidate]
    ) -> tuple[Found, Row] | None:
        for found, row in offers:
            if device in row.devices:
                result = probe(found, device)
                candidate = Candidate(
                    source=found.source,
                    device=device,
                    accepted=result.ok,
                    reason=result.reason,
                    remedy=result.remedy,
                )
                trace.append(candidate)
                if result.ok:
                    return found, row
        return None

    def _refuse_conflict(
        self, offers: list[tuple[Found, Row]], model_type: str, backend: str, device: str
    ) -> None:
        claims = [found.source for found, row in offers if device in row.devices]
        if len(claims) > 1:
            raise PluginConflict(
                f"{model_type} by {backend} on {device} is offered by {' and '.join(claims)}",
                where=self.group,
                remedy="uninstall one of them",
            )

    def conflicts(self) -> list[str]:
        """Return the triples that several plug-ins claim, with the plug-ins.

        It runs no probe.
        """
        claims: dict[tuple[str, str, str], list[str]] = {}
        for found, row in self.rows():
            for triple in row.triples():
                claims.setdefault(triple, []).append(found.source)
        return [
            f"{model_type} by {backend} on {device} is offered by {' and '.join(sources)}: "
            "uninstall one of them"
            for (model_type, backend, device), sources in sorted(claims.items())
            if len(sources) > 1
        ]

    def _accept(
        self, chosen: tuple[Found, Row], device: str, trace: list[Candidate], *, auto: bool
    ) -> Resolution:
        found, row = chosen
        assert found.plugin is not None
        if auto:
            rejected = "".join(f", not {c.device}: {c.reason}" for c in trace if not c.accepted)
            log.info("device auto -> %s by %s%s", device, found.source, rejected)
        return Resolution(
            plugin=found.plugin, row=row, device=device, source=found.source, trace=tuple(trace)
        )

    def _not_found(self, model_type: str, backend: str) -> Exception:
        distributions = KNOWN_DISTRIBUTIONS.get(self.kind, {})
        for found in self.found():
            rows = found.plugin.rows if found.plugin else ()
            names = {found.name, *(b for row in rows for b in row.backends)}
            if found.problem and (
                backend in names
                or distributions.get(backend, "").partition("[")[0] == found.distribution
            ):
                return self._broken(found)
        served = sorted(
            {t for _, row in self.rows() if backend in row.backends for t in row.model_types}
        )
        if served:
            return PluginNotFound(
                f"{backend!r} has no {model_type!r}",
                where=self.group,
                remedy=f"it serves: {', '.join(served)}",
            )
        if backend in distributions:
            return PluginNotFound(
                f"{self.kind} {backend!r} is not installed",
                where=self.group,
                remedy=f"pip install '{distributions[backend]}'",
            )
        known = sorted({b for _, row in self.rows() for b in row.backends} | set(distributions))
        broken = ", ".join(found.source for found in self.found() if found.problem)
        why = f"broken, and not asked: {broken}; `python -m engine_api doctor` says why"
        return PluginNotFound(
            f"no {self.kind} is called {backend!r}",
            where=self.group,
            why=why if broken else "",
            remedy=near_matches(backend, known),
        )

    def _broken(self, found: Found) -> Exception:
        if found.cause is None:
            return ContractMismatch(
                f"{found.name!r} cannot be used",
                where=found.source,
                why=found.problem,
                remedy="install versions of it and of engine-api that fit each other",
            )
        error = PluginLoadError(
            f"{found.name!r} is installed but broken",
            where=found.source,
            why=found.problem,
            remedy="`python -m engine_api doctor` shows the whole traceback",
        )
        error.__cause__ = found.cause
        return error

    def _unavailable(
        self,
        model_type: str,
        backend: str,
        device: str,
        offers: Iterable[tuple[Found, Row]],
        trace: list[Candidate],
    ) -> Exception:
        devices = sorted({d for _, row in offers for d in row.devices})
        if not trace:
            return PluginUnavailable(
                f"{model_type} by {backend!r} has no row for device {device!r}",
                where=self.group,
                why="an explicit device is never replaced",
                remedy=f"it has rows for: {', '.join(devices)}",
            )
        remedies = {c.remedy for c in trace if c.remedy}
        return PluginUnavailable(
            f"{model_type} by {backend!r} cannot run on device {device!r} here",
            where=self.group,
            trace=[str(c) for c in trace],
            remedy="; ".join(sorted(remedies)) or f"use one of: {', '.join(devices)}",
        )


_engines = Registry(ENGINE_GROUP, "engine")
_rollouts = Registry(ROLLOUT_GROUP, "rollout")


class EngineRegistry:
    """The engines of this process.

    See ``Registry`` for the methods.
    """

    register = staticmethod(_engines.register)
    unregister = staticmethod(_engines.unregister)
    resolve = staticmethod(_engines.resolve)
    found = staticmethod(_engines.found)
    rows = staticmethod(_engines.rows)
    conflicts = staticmethod(_engines.conflicts)
    refresh = staticmethod(_engines.refresh)

    @staticmethod
    def create(
        *,
        model_type: str = "language_model",
        backend: str,
        device: str = "auto",
        config: EngineConfig,
    ) -> Any:
        """Resolve, import and construct an engine, which is not yet initialized.

        Raises:
            PluginError: no plug-in fits; the subclass and the text give reason and remedy.
            UnsupportedCapability: ``config`` requests a capability that the engine does not
                declare.
            ConfigError: ``config`` has options, and the descriptor names no dataclass of them.
        """
        resolution = _engines.resolve(model_type=model_type, backend=backend, device=device)
        if config.options and resolution.plugin.options is None:
            raise ConfigError(
                "options",
                f"expected none, got {config.options!r}",
                why=f"the descriptor {resolution.plugin.name} names no dataclass of options",
                remedy="leave them out, or name the dataclass in EnginePlugin(options=…)",
            )
        return _engines.load(resolution)(config, resolution=resolution)


class RolloutRegistry:
    """The rollouts of this process.

    A rollout's backend name is its name.
    """

    register = staticmethod(_rollouts.register)
    unregister = staticmethod(_rollouts.unregister)
    resolve = staticmethod(_rollouts.resolve)
    found = staticmethod(_rollouts.found)
    rows = staticmethod(_rollouts.rows)
    conflicts = staticmethod(_rollouts.conflicts)
    refresh = staticmethod(_rollouts.refresh)

    @staticmethod
    def create(*, name: str, device: str = "auto", **arguments: Any) -> Any:
        """Resolve, import and construct a rollout.

        Raises ``PluginError``.
        """
        resolution = _rollouts.resolve(backend=name, device=device)
        return _rollouts.load(resolution)(resolution=resolution, **arguments)

    @staticmethod
    def create_exporter(*, name: str, device: str = "auto", **arguments: Any) -> WeightExporter:
        """Construct the exporter that turns an engine's weights into the form of rollout ``name``.

        ``arguments`` go to the plug-in's own exporter; without one the engine's export is used as
        it is. Raises ``PluginError``.
        """
        resolution = _rollouts.resolve(backend=name, device=device)
        if resolution.plugin.exporter is None:
            return WholeExporter()
        exporter: WeightExporter = import_target(resolution.plugin.exporter, resolution.source)(
            resolution=resolution, **arguments
        )
        return exporter

    @staticmethod
    def create_wire(*, name: str, device: str = "auto", timeout_s: float) -> WeightWire | None:
        """Construct the wire that carries exports to rollout ``name`` in other processes.

        It is None if the plug-in has no wire. Raises ``PluginError``.
        """
        resolution = _rollouts.resolve(backend=name, device=device)
        if resolution.plugin.wire is None:
            return None
        wire: WeightWire = import_target(resolution.plugin.wire, resolution.source)(
            resolution=resolution, timeout_s=timeout_s
        )
        return wire

"""The error tree of the contract.

::

    EngineError
    ├─ PluginError
    │  ├─ PluginNotFound        no plug-in offers the requested combination
    │  ├─ PluginUnavailable     a plug-in offers it, but not on this machine (carries the trace)
    │  ├─ PluginConflict        two distributions offer the same row
    │  ├─ PluginLoadError       its import failed (carries the cause)
    │  └─ ContractMismatch      written for another contract version
    ├─ ConfigError              a configuration key or value is wrong
    ├─ BatchError               a batch breaks the contract
    ├─ UnsupportedCapability    a capability was requested that is not declared
    ├─ EngineStateError         called in the wrong order
    ├─ CheckpointError
    │  ├─ CheckpointMissing     no checkpoint to load at that path
    │  ├─ CheckpointCorrupt     sizes, checksums or contents are wrong
    │  ├─ CheckpointMismatch    complete, but of a different model or a newer contract
    │  └─ CheckpointWriteError  could not be written (disk full, permission)
    ├─ RolloutError             generation or a weight sync failed
    │  └─ PeerError             the other end of a weight sync failed, closed or is silent
    └─ RankFailure              another rank failed, this rank stops with it

Every error says what is wrong, where, why, and what to do. The four parts are fields, so that a
caller can act on them and a test can check them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class EngineError(Exception):
    """The base of every error that the contract raises on purpose."""

    def __init__(self, what: str, *, where: str = "", why: str = "", remedy: str = "") -> None:
        self.what = what
        self.where = where
        self.why = why
        self.remedy = remedy
        super().__init__(what, where, why, remedy)

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.remedy:
            lines.append(f"  to do: {self.remedy}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel between ranks. Subclasses have signatures of their own, so the state is
        # restored without a call of the constructor.
        return (_rebuild, (type(self), self.args, self.__dict__.copy()))


def kind_of(value: object) -> str:
    """Return the name of a value's type with an article, for error texts."""
    return "None" if value is None else f"a {type(value).__name__}"


def _rebuild(
    cls: type[EngineError], args: tuple[object, ...], state: dict[str, object]
) -> EngineError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


class PluginError(EngineError):
    """An error in finding or loading a plug-in."""


class PluginNotFound(PluginError):
    """No plug-in offers the requested combination."""


class PluginUnavailable(PluginError):
    """A plug-in offers the requested combination, but cannot run on this machine.

    ``trace`` holds every candidate with its reason.
    """

    def __init__(
        self,
        what: str,
        *,
        trace: Sequence[str] = (),
        where: str = "",
        why: str = "",
        remedy: str = "",
    ) -> None:
        self.trace = tuple(trace)
        super().__init__(what, where=where, why=why or "\n       ".join(self.trace), remedy=remedy)


class PluginConflict(PluginError):
    """Two distributions offer the same row."""


class PluginLoadError(PluginError):
    """A plug-in's descriptor or class could not be imported.

    ``__cause__`` is the original error.
    """


class ContractMismatch(PluginError):
    """The plug-in was written for a contract that this engine-api does not serve."""


class ConfigError(EngineError):
    """A configuration key or value is wrong.

    ``field`` is the dotted name of the key.
    """

    def __init__(self, field: str, what: str, *, why: str = "", remedy: str = "") -> None:
        self.field = field
        super().__init__(what, where=f"config {field}", why=why, remedy=remedy)


class BatchError(EngineError):
    """A batch breaks the contract.

    ``field`` and ``index`` name the place.
    """

    def __init__(
        self, field: str, what: str, *, index: int | None = None, why: str = "", remedy: str = ""
    ) -> None:
        self.field = field
        self.index = index
        at = "" if index is None else f"[{index}]"
        super().__init__(what, where=f"batch.{field}{at}", why=why, remedy=remedy)


class UnsupportedCapability(EngineError):
    """A capability was requested that the engine does not declare.

    ``capability`` is its name.
    """

    def __init__(
        self, capability: str, *, where: str = "", why: str = "", remedy: str = ""
    ) -> None:
        self.capability = str(capability)
        super().__init__(
            f"capability {self.capability!r} is not supported", where=where, why=why, remedy=remedy
        )


class EngineStateError(EngineError):
    """A member was called in a state that does not allow the call."""

    def __init__(self, called: str, state: str, expected: str) -> None:
        self.called = called
        self.state = state
        self.expected = expected
        super().__init__(
            f"{called} was called while the engine is {state}",
            remedy=f"call it when the engine is {expected}",
        )


class CheckpointError(EngineError):
    """An error of a checkpoint."""


class CheckpointMissing(CheckpointError):
    """There is no checkpoint at the given path."""


class CheckpointCorrupt(CheckpointError):
    """A file is missing, truncated or altered."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint is complete but belongs to a different model, layout or a newer contract."""


class CheckpointWriteError(CheckpointError):
    """The checkpoint could not be written.

    Nothing half-written is left under its final name.
    """


class RolloutError(EngineError):
    """Generation or a weight sync failed."""


class PeerError(RolloutError):
    """The other end of a weight sync failed, closed or is silent.

    Where that end has an error of its own, that one explains this one.
    """


class RankFailure(EngineError):
    """Another rank failed, and this rank stops with it.

    ``failures`` maps the failed rank to its message.
    """

    def __init__(self, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        text = "\n  ".join(
            f"rank {rank}: {message}" for rank, message in sorted(self.failures.items())
        )
        super().__init__(f"{len(self.failures)} rank(s) failed, all ranks stop together\n  {text}")

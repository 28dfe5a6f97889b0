"""Syncs of a rollout that serves a LoRA: the base weights once, then adapters only."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from engine_api.codec import register
from engine_api.errors import RolloutError
from engine_api.rollout import SyncResult
from rollout_fp8.install.adapter import WHERE, Adapter, ExpectedAdapter, folder_of, read_folder
from rollout_fp8.install.session import SyncSession, Workers
from rollout_fp8.wire.expected import Expected
from rollout_fp8.wire.format import WireStream


@runtime_checkable
class AdapterParts(Protocol):
    """Parts of one sync of an adapter.

    They come from an engine (``rollout_fp8.export.exporter.AdapterStream``) or from another
    process.
    """

    def adapter(self) -> Adapter:
        """Return the adapter.

        It is to be called first, and once.
        """
        ...

    def base(self, *, needed: bool) -> WireStream | None:
        """Return the base weights' stream, or None where no rollout needs them."""
        ...

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of each phase, without those of the base weights."""
        ...


class SentAdapter:
    """``AdapterParts`` that another process of this host has sent.

    Args:
        folder: the adapter's folder, in PEFT's format.
        sums: its checksums, by name.
        base: stream of the base weights, if they were sent.
    """

    def __init__(self, folder: Path, sums: Mapping[str, int], base: WireStream | None) -> None:
        self._folder = folder
        self._sums = sums
        self._base = base

    def adapter(self) -> Adapter:
        """See ``AdapterParts.adapter``."""
        return read_folder(self._folder, self._sums)

    def base(self, *, needed: bool) -> WireStream | None:
        """See ``AdapterParts.base``.

        Raises:
            RolloutError: the base weights are needed and were not sent.
        """
        if needed and self._base is None:
            raise RolloutError(
                "the server has no base weights",
                where=WHERE,
                why="another client removed them",
                remedy="sync again: the next sync sends them",
            )
        return self._base

    def seconds(self) -> Mapping[str, float]:
        """See ``AdapterParts.seconds``. It is empty here: the sender measures them."""
        return {}


@register
@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedAdapter:
    """Adapter that one worker holds after it was asked to load it.

    Attributes:
        sums: checksums of its whole tensors, unsigned, by PEFT's names.
        wrong: layers whose working copy (the worker's part of them, in a slot of the kernels)
            differs from those tensors.
        error: reason why it could not be loaded; empty if it was loaded.
        seconds: duration of the comparison.
    """

    sums: Mapping[str, int] = field(default_factory=dict[str, int])
    wrong: Sequence[str] = ()
    error: str = ""
    seconds: float = 0.0


class AdapterWorkers(Workers, Protocol):
    """Workers that serve an adapter in addition to the base weights."""

    def load_adapter(self, folder: Path, *, audit: bool) -> Sequence[LoadedAdapter]:
        """Replace the adapter by the one in ``folder``, and return the workers' adapters.

        Without audit there are no checksums.
        """
        ...


class AdapterSession:
    """Syncs of one rollout that serves a LoRA.

    Args:
        workers: the rollout's workers.
        expected: tensors that the adapter must hold.
        audit: compare the served adapter with the one that was sent.
        model: weights that the base must hold, as ``SyncSession`` takes them.
    """

    def __init__(
        self,
        workers: AdapterWorkers,
        expected: ExpectedAdapter,
        *,
        audit: bool,
        model: Expected | None = None,
    ) -> None:
        self._base = SyncSession(workers, model)
        self._workers = workers
        self._expected = expected
        self._audit = audit
        self._has_base = False

    def run(self, stream: AdapterParts, version: int) -> SyncResult:
        """Install the adapter, and the base weights where they are not there yet.

        Raises:
            RolloutError: as ``SyncSession.run``, or the adapter does not fit, is not finite or
                cannot be loaded.
        """
        adapter = stream.adapter()
        self._expected.check(adapter)
        base = stream.base(needed=not self._has_base)
        first = SyncResult(version=version, audited=self._audit)
        if base is not None:
            self._has_base = False
            first = self._base.run(base, version)
            self._has_base = True
        seconds = self._install(adapter)
        phases = [first.seconds, stream.seconds(), seconds]
        names = dict.fromkeys(name for phase in phases for name in phase)
        return replace(
            first,
            num_tensors=first.num_tensors + len(adapter.tensors),
            num_bytes=first.num_bytes + adapter.num_bytes,
            seconds={name: sum(phase.get(name, 0.0) for phase in phases) for name in names},
            audited=first.audited and self._audit,
        )

    def forget_weights(self) -> None:
        """Note that the server has lost its weights: the next sync must bring all of them."""
        self._has_base = False

    def _install(self, adapter: Adapter) -> dict[str, float]:
        began = time.perf_counter()
        with folder_of(adapter) as folder:
            written = time.perf_counter()
            held = self._workers.load_adapter(folder, audit=self._audit)
        looked = max(one.seconds for one in held)
        loaded = time.perf_counter() - looked
        if errors := [one.error for one in held if one.error]:
            raise RolloutError(
                "the server cannot load the adapter",
                where=WHERE,
                why=errors[0],
                remedy="nothing is generated until a sync succeeds; use rollout.lora=merged for "
                "this model",
            )
        if self._audit:
            _audit(adapter.checksums(), held)
        return {
            "transfer": written - began,
            "install": loaded - written,
            "audit": time.perf_counter() - loaded,
        }


def _audit(exported: Mapping[str, int], held: Sequence[LoadedAdapter]) -> None:
    """Raise ``RolloutError`` that names tensors which a worker holds differently, lacks or adds."""
    wrong = dict.fromkeys(
        name for one in held for name in exported if one.sums.get(name) != exported[name]
    )
    wrong |= dict.fromkeys(
        name for one in held for name in (*one.sums, *one.wrong) if name not in exported
    )
    if wrong:
        raise RolloutError(
            "the served adapter differs from the exported one",
            where=WHERE,
            why=f"{len(wrong)} of {len(exported)} tensors differ: {', '.join([*wrong][:5])}",
            remedy="nothing is generated until a sync succeeds: sync again, or restart the rollout",
        )

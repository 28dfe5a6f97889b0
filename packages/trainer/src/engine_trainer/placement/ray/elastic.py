"""Replicas in processes of their own that may be lost while the run goes on (``ray.elastic``).

Work that a lost replica had is given to the others, and a new one joins with the current weights.
The engines' processes are never started again for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine_api.errors import EngineError
from engine_api.rollout import SamplingParams, SyncResult
from engine_trainer.data import Prompt
from engine_trainer.placement.groups import by_replica
from engine_trainer.placement.ray.calls import (
    Call,
    Reply,
    WorkerLost,
    choose,
    ready,
    settle,
    silent,
)
from engine_trainer.placement.ray.engines import RayEngines
from engine_trainer.placement.ray.replicas import Member, Replicas, ReplicasLost, State
from engine_trainer.placement.ray.rollouts import POLL_S, SeparateRollouts, note_phases
from engine_trainer.placement.replica import ScoredCompletion
from engine_trainer.telemetry.logs import Timers

SYNC_GRACE_S = 60.0
"""Seconds that the others have to end a sync that has failed. Then they are lost, too."""


@dataclass(kw_only=True)
class _Unit:
    """Prompts that one replica generates for in one call."""

    share: int
    """Number of the list of prompts that these are from."""
    indices: list[int]
    attempts: int = 0
    """Number of replicas that were lost with it."""


@dataclass(frozen=True, kw_only=True)
class _Running:
    """A unit's call, and its deadline by ``time.monotonic``."""

    unit: _Unit
    call: Call
    until: float


class ElasticRollouts(SeparateRollouts):
    """Replicas that may be lost, named by the keys of their processes.

    The thread that makes this object drives the engines. It alone brings weights.

    Args:
        replicas: all of them without weights.
        batch_size: completions that fill a replica.
        attempts: largest number of replicas that may be lost with the same group.
    """

    elastic = True

    def __init__(
        self,
        replicas: Replicas,
        policy: RayEngines,
        timers: Timers,
        *,
        batch_size: int,
        attempts: int,
    ) -> None:
        super().__init__(replicas.pool, policy, timers)
        self._replicas = replicas
        self._batch_size = batch_size
        self._attempts = attempts
        self._driver = threading.get_ident()
        self._members = {member.key: member for member in replicas.members(State.BUILT)}
        # Keys of the processes that the engine's end of the wire serves; None: none any more.
        self._wired: list[int] | None = list(self._members)
        self._continuing: tuple[SamplingParams, int] | None = None

    # --- weights ----------------------------------------------------------------------------------

    def sync(self) -> list[SyncResult]:
        """Bring the weights to all replicas that are there, at least to one (``RolloutGroup``).

        Raises ``ReplicasLost``, and the engine's errors.
        """
        while True:
            members = self._replicas.members(State.SERVING, State.BUILT)
            results = self._bring(members) if members else None
            if results is not None:
                return results
            self._wait_for_some()

    def admit(self) -> None:
        """Bring the weights to replicas that were started since the last sync (``RolloutGroup``).

        Raises ``ReplicasLost`` if no replica is left.
        """
        self._replicas.require_some()
        members = self._replicas.members(State.BUILT)
        if members:
            self._bring(members)

    def _wait_for_some(self) -> None:
        self._replicas.require_some()
        if not self._replicas.members(State.SERVING, State.BUILT):
            self._replicas.wait(POLL_S)

    def _bring(self, members: Sequence[Member]) -> list[SyncResult] | None:
        """Sync the current weights to ``members``.

        The result is None if one of them was lost: then it must be repeated for those left.
        """
        engines = self._policy.pool
        keys = [member.key for member in members]
        self._members |= {member.key: member for member in members}
        if keys != self._wired:
            engines.finish([engines.start(0, "serve_wire", len(members))])
            self._wired = keys
        version = self._policy.weight_version
        address = engines.finish([engines.start(0, "wire_address", version)])[0].value
        receiving = [
            member.start("receive", address, place, version) for place, member in enumerate(members)
        ]
        sending = engines.start_all("send", [call.ref for call in receiving])
        # The wire's deadline comes first and tells the silent replica from those that wait for it.
        found = settle([*receiving, *sending], 2 * engines.timeout_s, SYNC_GRACE_S)
        engine_lost = [one for one in found[len(members) :] if isinstance(one, WorkerLost)]
        if engine_lost:
            raise engine_lost[0]
        if self._note_lost(members, found):
            self._wired = None
            return None
        errors = [one for one in found if isinstance(one, EngineError)]
        if errors:
            self._wired = None
            raise choose(errors)
        replies = [one for one in found if isinstance(one, Reply)]
        for call, reply in zip([*receiving, *sending], replies, strict=True):
            self.pool.meter.note(call.worker, call.method, reply.seconds)
        if not self._prepare([m for m in members if m in self._replicas.members(State.BUILT)]):
            return None
        self._replicas.note_weights(members)
        # The first rank of the engine sent them.
        wire_bytes: int = replies[len(members)].value
        return [replace(reply.value, wire_bytes=wire_bytes) for reply in replies[: len(members)]]

    def _note_lost(self, members: Sequence[Member], found: Sequence[Reply | EngineError]) -> bool:
        """Replace the replicas whose calls were lost, and return whether there are any."""
        lost = False
        for member, outcome in zip(members, found, strict=False):
            if isinstance(outcome, WorkerLost):
                self._replicas.lose(member.key, outcome)
                lost = True
        return lost

    # --- generation in slices ---------------------------------------------------------------------

    def continuing(self, sampling: SamplingParams, slice_tokens: int) -> None:
        """Prepare for ``advance``, on replicas that join later too (see ``PartialRollouts``)."""
        self._continuing = (sampling, slice_tokens)
        self._prepare(self._replicas.members(State.SERVING))

    def _prepare(self, members: Sequence[Member]) -> bool:
        """Prepare replicas for ``advance``, and return whether all of them are still there."""
        return self._continuing is None or self._call(members, "continuing", *self._continuing)

    def _call(self, members: Sequence[Member], method: str, *arguments: Any) -> bool:
        """Make the same call on replicas, and return whether all of them are still there.

        Lost ones are replaced. Raises the errors of the others.
        """
        calls = [member.start(method, *arguments) for member in members]
        found = settle(calls, self.pool.timeout_s, SYNC_GRACE_S)
        if self._note_lost(members, found):
            return False
        errors = [one for one in found if isinstance(one, EngineError)]
        if errors:
            raise choose(errors)
        return True

    def serving(self) -> list[int]:
        """See ``SeparateRollouts``."""
        return [member.key for member in self._replicas.members(State.SERVING)]

    def start(self, replica: int, method: str, *arguments: Any) -> Call:
        """See ``SeparateRollouts``."""
        return self._members[replica].start(method, *arguments)

    def reply(self, replica: int, call: Call) -> Reply | None:
        """See ``SeparateRollouts``."""
        try:
            (reply,) = self.pool.finish([call])
        except WorkerLost as error:
            self.lose(replica, error)
            return None
        self._replicas.note_success(replica)
        return reply

    def lose(self, replica: int, error: WorkerLost) -> None:
        """See ``SeparateRollouts``."""
        self._replicas.lose(replica, error)

    def check_attempts(self, attempts: int) -> None:
        """Raise ``ReplicasLost`` if a group was lost with too many replicas."""
        if attempts <= self._attempts:
            return
        raise ReplicasLost(
            f"the same group was lost with {attempts} replicas",
            where="ray.elastic",
            why=f"generating it, or scoring it, probably ends the process: {self._replicas.last}",
            remedy="see the workers' logs in Ray's session folder (out of memory?); "
            "ray.restarts bounds the number",
        )

    # --- generation as a whole --------------------------------------------------------------------

    def generate_and_score(
        self, prompts: Sequence[Sequence[Prompt]], sampling: SamplingParams
    ) -> list[list[list[ScoredCompletion]]]:
        """Generate and score, and give the work of lost replicas to others (``RolloutGroup``).

        Each list is divided into units that fill a replica. The division depends on the prompts
        alone, so that the result does not depend on which replica generates a unit.
        """
        waiting = deque(
            _Unit(share=share, indices=indices)
            for share, own in enumerate(prompts)
            for indices in by_replica(own, -(-len(own) * sampling.n // self._batch_size))
            if indices
        )
        running: dict[int, _Running] = {}
        found: list[dict[int, list[ScoredCompletion]]] = [{} for _ in prompts]
        phases: dict[int, dict[str, float]] = {}
        while waiting or running:
            self._require_progress()
            for replica in self.serving():
                if waiting and replica not in running:
                    unit = waiting.popleft()
                    own = [prompts[unit.share][i] for i in unit.indices]
                    running[replica] = _Running(
                        unit=unit,
                        call=self.start(replica, "generate_and_score", own, sampling),
                        until=time.monotonic() + self.pool.timeout_s,
                    )
            if not running:
                self._replicas.wait(POLL_S)
                continue
            for replica, late in self._ended(running):
                one = running.pop(replica)
                reply = None if late else self.reply(replica, one.call)
                if reply is None:
                    one.unit.attempts += 1
                    self.check_attempts(one.unit.attempts)
                    waiting.appendleft(one.unit)
                    continue
                found[one.unit.share] |= dict(zip(one.unit.indices, reply.value, strict=True))
                spent = phases.setdefault(replica, {})
                for name, seconds in reply.phases.items():
                    spent[name] = spent.get(name, 0.0) + seconds
        note_phases(self._timers, list(phases.values()))
        return [[rows[i] for i in range(len(rows))] for rows in found]

    def _require_progress(self) -> None:
        """Admit new replicas where this thread may, and raise ``ReplicasLost`` if none is left."""
        if threading.get_ident() == self._driver:
            self.admit()
        else:
            self._replicas.require_some()

    def _ended(self, running: dict[int, _Running]) -> list[tuple[int, bool]]:
        """Wait briefly, and return the replicas whose calls are done, and those that are too late.

        The latter are marked and replaced.
        """
        done = ready([one.call for one in running.values()], POLL_S)
        now = time.monotonic()
        late = [r for r, one in running.items() if one.call not in done and now > one.until]
        for replica in late:
            self.lose(replica, silent([running[replica].call], self.pool.timeout_s))
        ended = [(replica, False) for replica, one in running.items() if one.call in done]
        return [*ended, *((replica, True) for replica in late)]

    # --- the rest ---------------------------------------------------------------------------------

    def profile(self, folder: Path | None) -> None:
        """Begin or end traces of the replicas that are there (see ``Launcher.profile``)."""
        self._call(self._replicas.members(State.SERVING, State.BUILT), "profile", folder)

    def figures(self) -> dict[str, float]:
        """Return ``replicas/…`` (see ``Launcher.figures``)."""
        return self._replicas.figures()

    def stop(self) -> None:
        """Replace no more replicas (idempotent)."""
        self._replicas.close()

    def close(self) -> None:
        """Close the replicas that are there (see ``RolloutGroup``)."""
        self.stop()
        self._call(self._replicas.members(State.SERVING, State.BUILT), "close_rollout")

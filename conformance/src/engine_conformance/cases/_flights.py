"""Functions that run inside a rollout's rank: syncs while it generates."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from engine_api.errors import EngineError
from engine_api.registry import RolloutRegistry
from engine_api.rollout import SamplingParams
from engine_api.weights import WeightExport
from engine_conformance.cases._rollouts import (
    Do,
    Generate,
    RolloutReply,
    Spoil,
    Sync,
    arguments,
    attempt,
    export_of,
    generate,
)
from engine_conformance.cases._target import Setup

__all__ = ["LENGTHS", "Flight", "FlightLog", "drive_flights"]

LENGTHS = (96, 150, 200)
"""Tokens of a completion in the first try, the second and the third."""
# Completions that are generated at the same time: others wait, and have no token at the sync.
PLACES = 2
# Tokens of the generation after whose end the sync comes.
PILOT = 8
# For an abort during the pause, which need not return before the pause is over.
ABORT_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Flight:
    """Action: a sync while generations run, in up to three tries.

    Attributes:
        before: the folder of the weights that are served at first.
        after: the folder of those that come.
        version: the version of the first weights in the first try. Each try takes the next two.
        prompts: the prompts that are submitted, of which the first ones run first.
        counts: their numbers of completions.
        spoil: how the second export is corrupted, or None.
        aborted: places of the generations that are aborted when the second export is read.
        naps: whether ``sleep`` and ``wake_up`` are called before the sync.
    """

    before: Path
    after: Path
    version: int
    prompts: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    spoil: Spoil | None = None
    aborted: tuple[int, ...] = ()
    naps: bool = False


@dataclass(kw_only=True, slots=True)
class FlightLog:
    """Result of the last try of a flight.

    Attributes:
        old: version of the weights before.
        new: version of the weights that come.
        mode: what the rollout says as ``kv_cache_in_flight``.
        pilot: number of tokens of the short generation.
        seen: growth of ``tokens_generated`` until the export was last read, None if it is missing.
        counted: its growth until the ends of all generations.
        sync: the reply of the sync under way.
        generations: the replies of ``result``, in the order of the prompts.
        fresh: the reply of a generation of the first prompt that is submitted after the sync.
        naps: the replies of ``sleep`` and ``wake_up``.
        awake: whether the first generation ran on after them.
        begun: for each generation whether it was done when the export was first read.
        ended: for each generation whether it was done when the export was last read.
    """

    old: int
    new: int
    mode: Any
    pilot: int = 0
    seen: int | None = None
    counted: int | None = None
    sync: RolloutReply | None = None
    generations: list[RolloutReply] = field(default_factory=list[RolloutReply])
    fresh: RolloutReply | None = None
    naps: list[RolloutReply] = field(default_factory=list[RolloutReply])
    awake: bool = False
    begun: list[bool] = field(default_factory=list[bool])
    ended: list[bool] = field(default_factory=list[bool])

    def is_under_way(self, flight: Flight) -> bool:
        """Return whether the sync came while a generation was under way, as far as this shows."""
        assert self.sync is not None
        if flight.naps and not self.awake:
            return False
        if self.sync.error or self.sync.crash:
            return not all(self.ended)
        done = self.begun if flight.aborted else self.ended
        return any(
            not over and self._has_old_token(reply)
            for over, reply in zip(done, self.generations, strict=True)
        )

    def _has_old_token(self, reply: RolloutReply) -> bool:
        return any(self.old in one.weight_versions for one in reply.completions or ())


def drive_flights(
    setup: Setup,
    actions: Sequence[Sync | Generate | Flight],
    limit_s: float,
    *,
    in_flight: bool = True,
) -> list[RolloutReply] | EngineError:
    """Run ``actions`` on one rollout, or return the error with which it is refused.

    Args:
        setup: the rollout.
        actions: run one after another, where an error ends its own action only.
        limit_s: seconds for the generations of one try.
        in_flight: whether the rollout gets the argument.
    """
    # No completion ends before its last token.
    given = {**arguments(setup, eos=()), "batch_size": PLACES}
    if in_flight:
        given["in_flight"] = True
    try:
        rollout: Any = RolloutRegistry.create(name=setup.backend, device=setup.device, **given)
    except EngineError as error:
        return error

    def act(action: Sync | Generate | Flight) -> Any:
        if isinstance(action, Flight):
            return _fly(rollout, action, setup.device, limit_s)
        if isinstance(action, Sync):
            return rollout.update_weights(export_of(action.folder, setup.device), action.version)
        return generate(rollout, action)

    try:
        return [attempt(rollout, action, partial(act, action), setup.device) for action in actions]
    finally:
        rollout.close()


def _fly(rollout: Any, flight: Flight, device: str, limit_s: float) -> FlightLog:
    """Return the first try in which the sync came at the right time, or the last one."""
    for place, length in enumerate(LENGTHS):
        log = FlightLog(
            old=flight.version + 2 * place,
            new=flight.version + 2 * place + 1,
            mode=getattr(rollout, "kv_cache_in_flight", None),
        )
        rollout.update_weights(export_of(flight.before, device), log.old)
        _try(rollout, flight, log, device, length, place, limit_s)
        if log.is_under_way(flight):
            break
    return log


def _try(
    rollout: Any,
    flight: Flight,
    log: FlightLog,
    device: str,
    length: int,
    patience: int,
    limit_s: float,
) -> None:
    """Sync while generations of ``length`` tokens run, and fill the log.

    The sync comes when a short generation is done, ``patience`` times its duration later.
    """
    sampling = SamplingParams(max_new_tokens=length, seed=3)
    end = time.monotonic() + limit_s
    begin = time.monotonic()
    count = partial(_count_tokens, rollout, _count_tokens(rollout))
    pilot = rollout.submit(flight.prompts[-1], replace(sampling, max_new_tokens=PILOT))
    asks = [
        Generate(prompts=(prompt,), sampling=replace(sampling, n=count))
        for prompt, count in zip(flight.prompts, flight.counts, strict=True)
    ]
    running = [rollout.submit(ask.prompts[0], ask.sampling) for ask in asks]
    (short,) = pilot.result(limit_s)
    log.pilot = len(short.tokens)
    time.sleep(patience * (time.monotonic() - begin))
    if flight.naps:
        names: tuple[Literal["sleep", "wake_up"], ...] = ("sleep", "wake_up")
        for name in names:
            log.naps.append(attempt(rollout, Do(name), getattr(rollout, name), device))
        log.awake = not running[0].done()
    log.begun = log.ended = [one.done() for one in running]
    sync = Sync(folder=flight.after, version=log.new, spoil=flight.spoil)
    aborting = [
        threading.Thread(target=running[place].abort, daemon=True) for place in flight.aborted
    ]
    given = export_of(flight.after, device, flight.spoil)
    export = _watched(given, log, running, aborting, count)
    log.sync = attempt(rollout, sync, partial(rollout.update_weights, export, log.new), device)
    log.generations = [
        attempt(rollout, ask, partial(one.result, max(1.0, end - time.monotonic())), device)
        for ask, one in zip(asks, running, strict=True)
    ]
    log.counted = count()
    fresh = partial(_complete, rollout, asks[0], limit_s)
    log.fresh = attempt(rollout, asks[0], fresh, device)


def _count_tokens(rollout: Any, before: int | None = 0) -> int | None:
    """Return the growth of the rollout's count of tokens, None if it has none."""
    found = getattr(rollout, "tokens_generated", None)
    return None if found is None or before is None else found - before


def _complete(rollout: Any, ask: Generate, limit_s: float) -> Any:
    return rollout.submit(ask.prompts[0], ask.sampling).result(limit_s)


def _watched(
    export: WeightExport,
    log: FlightLog,
    running: Sequence[Any],
    aborting: Sequence[threading.Thread],
    count: Callable[[], int | None],
) -> Iterator[Any]:
    """Yield an export, note which generations are done, and start the aborts at its beginning."""
    first = True
    for pair in export:
        log.seen = count()
        log.ended = [one.done() for one in running]
        if first:
            first = False
            log.begun = log.ended
            for thread in aborting:
                thread.start()
            for thread in aborting:
                thread.join(ABORT_S)
        yield pair

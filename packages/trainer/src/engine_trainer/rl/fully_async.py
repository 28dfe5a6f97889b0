"""Fully asynchronous experience: replicas generate all the time, a step takes the groups that are complete.

A group's prompts are drawn in the run's order. What was drawn and not trained on is named in the state of each step, and
drawn again by a run that is resumed: no prompt is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_trainer.algorithms.shaping import informative
from engine_trainer.config import RLConfig
from engine_trainer.data import Prompt, PromptDataset, SampleOrder
from engine_trainer.placement.ray.calls import Call, WorkerFailed, ready, silent
from engine_trainer.placement.ray.rollouts import Separate
from engine_trainer.placement.replica import Group, ScoredCompletion
from engine_trainer.rl.experience import (
    Experience,
    completion_figures,
    round_seed,
    staleness_figures,
    totals,
)
from engine_trainer.sampling.sampler import Sampler

POLL_S = 0.05  # while a replica is idle: a step may take groups meanwhile, so that there is something to do for it


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """A call that runs, and until when (``time.monotonic``) it may."""

    call: Call
    until: float


class FullyAsync:
    """See ``engine_trainer.rl.sources.Source``.

    Args:
        sampler: its rollouts are replicas with processes of their own.
        position, pending: of the state that a run goes on from.
        oldest: the oldest weight version that something is learned from.
    """

    def __init__(
        self,
        sampler: Sampler,
        data: PromptDataset,
        order: SampleOrder,
        config: RLConfig,
        *,
        position: int,
        pending: Sequence[int],
        oldest: Callable[[], int],
    ) -> None:
        assert isinstance(sampler.rollouts, Separate), "the configuration checks it"
        self._sampler, self._rollouts, self._config, self._oldest = (
            sampler,
            sampler.rollouts,
            config,
            oldest,
        )
        self._data, self._order, self._position = data, order, position
        self._again = list(pending)  # positions to draw before new ones
        self._drawn: set[int] = set()  # and not given out yet
        self._ready: list[tuple[int, Group]] = []
        self._wanted = 0  # groups that the step which is being collected takes yet
        self._seed = round_seed(config.run.seed, position, 0)
        self._calls = 0
        self._dropped: list[Group] = []  # all of them too old
        self._failed: Exception | None = None
        self._changed = threading.Condition()
        self._paused = True
        self._busy = 0  # calls that run
        self._under_way = dict.fromkeys(self._rollouts.local_replicas, 0)  # groups, by replica
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="generate", daemon=True)
        sampling = sampler.sampling(
            n=config.rollout.n, temperature=config.rollout.temperature, seed=0
        )
        self._rollouts.continuing(sampling, config.overlap.slice_tokens)
        self._thread.start()

    def take(self, step: int) -> Experience:
        """See ``Source``: brings the policy's weights to the replicas, then waits for as many groups as a step has."""
        del step  # what is generated depends on when
        self.settle()
        with self._sampler.timers.phase("sync"):
            self._sampler.sync()
        self._resume()
        with self._sampler.timers.phase("wait"):
            generated, kept = self._collect()
        version, oldest = self._sampler.policy.weight_version, self._oldest()
        metrics = completion_figures(generated) | {
            "rollout/groups": float(len(kept)),
            "rollout/dropped_groups": float(len(self._dropped)),
        }
        metrics |= staleness_figures(kept, version, oldest) if kept else {}
        generated, self._dropped = [*generated, *self._dropped], []
        with self._changed:  # of one moment: the thread draws meanwhile
            position, pending = self._position, sorted([*self._drawn, *self._again])
        return Experience(
            groups=kept, position=position, pending=pending, metrics=metrics, generated=generated
        )

    def settle(self) -> None:
        """See ``Source``: waits for the slices that run."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: self._busy == 0 or self._failed is not None)
            self._raise()

    def close(self) -> None:
        """See ``Source``."""
        with self._changed:
            self._closed = (
                True  # the thread ends with the slices that run, at the latest with their workers
            )
            self._changed.notify_all()

    # --- giving out -------------------------------------------------------------------------------

    def _resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def _collect(self) -> tuple[list[Group], list[Group]]:
        """(all groups that were looked at, those that are learned from)."""
        wanted, dynamic = (
            self._config.algorithm.prompts_per_step,
            self._config.algorithm.dynamic_sampling,
        )
        generated: list[Group] = []
        kept: list[Group] = []
        limit = wanted * (dynamic.max_rounds if dynamic.enabled else 1)
        while left := min(wanted - len(kept), limit - len(generated)):
            group = self._next(left)
            generated.append(group)
            kept += [group] if not dynamic.enabled or bool(informative(totals([group]))[0]) else []
        return generated, kept

    def _next(self, wanted: int) -> Group:
        """One of the ``wanted`` groups that the step takes yet."""
        with self._changed:
            self._wanted = wanted
            self._changed.notify_all()
            while True:
                self._changed.wait_for(lambda: bool(self._ready) or self._failed is not None)
                self._raise()
                position, group = self._ready.pop(0)
                self._drawn.discard(position)
                self._changed.notify_all()
                if self._fresh(group):
                    self._wanted -= 1
                    return group
                self._dropped.append(group)

    def _fresh(self, group: Group) -> bool:
        oldest, made = (
            self._oldest(),
            [version for a in group.completions for version in a.versions],
        )
        return (
            not made or max(made) >= oldest
        )  # without a token of the model nothing is old: another draw is no better

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed

    # --- generating, in the thread ------------------------------------------------------------------

    def _run(self) -> None:
        running: dict[int, _Slice] = {}  # by replica
        try:
            while not self._closed:
                self._start(running)
                if running:
                    self._finish(running)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the loop waits for groups: it is raised there
            with self._changed:
                self._failed = error if isinstance(error, Exception) else _ended_by(error)
                self._changed.notify_all()

    def _start(self, running: dict[int, _Slice]) -> None:
        """A slice on every replica that is idle and has something to do, unless there is to be a sync."""
        with self._changed:
            # Nothing runs and nothing may be drawn: until a step takes of what is ready.
            self._changed.wait_for(
                lambda: bool(running) or self._closed or (not self._paused and self._has_work())
            )
            if self._paused or self._closed:
                return
            for replica in self._rollouts.local_replicas:
                new = [] if replica in running else self._draw(replica)
                if replica not in running and self._under_way[replica]:
                    self._calls += 1
                    self._busy += 1
                    call = self._rollouts.pool.start(
                        replica, "advance", new, self._seed + self._calls
                    )
                    running[replica] = _Slice(
                        call=call, until=time.monotonic() + self._rollouts.pool.timeout_s
                    )

    def _finish(self, running: dict[int, _Slice]) -> None:
        """What is done; waits for it, but not while an idle replica may get something to do. Raises ``WorkerLost``."""
        pool, idle = self._rollouts.pool, len(running) < len(self._rollouts.local_replicas)
        left = min(one.until for one in running.values()) - time.monotonic()
        done = ready(
            [one.call for one in running.values()], max(0.0, min(left, POLL_S) if idle else left)
        )
        late = [
            one.call
            for one in running.values()
            if one.call not in done and time.monotonic() >= one.until
        ]
        if late:
            raise silent(late, pool.timeout_s)
        for replica in [r for r, one in running.items() if one.call in done]:
            found: list[tuple[int, list[ScoredCompletion]]] = pool.finish(
                [running.pop(replica).call]
            )[0].value
            with self._changed:
                self._busy -= 1
                self._under_way[replica] -= len(found)
                self._ready += [
                    (position, Group(prompt=self._prompt(position), completions=answers))
                    for position, answers in found
                ]
                self._changed.notify_all()

    def _has_work(self) -> bool:
        return any(self._under_way.values()) or self._room() > 0

    def _room(self) -> int:
        """Groups that may still be begun: those that the step takes yet, and those of ``max_staleness`` steps more.

        So one that is begun and done with the weights of now is not too old when it is taken (the bound of AReaL,
        arXiv:2505.24298).
        """
        ahead = self._config.algorithm.prompts_per_step * self._config.overlap.max_staleness
        return self._wanted + ahead - len(self._drawn)

    def _draw(self, replica: int) -> list[tuple[int, Prompt]]:
        """As many groups as there are places for, but no more than its share of all that are or may be begun."""
        section, room = self._config.rollout, self._room()
        share = -(
            -(sum(self._under_way.values()) + room) // len(self._rollouts.local_replicas)
        )  # rounded up
        places = min(share, max(1, section.batch_size // section.n))
        positions: list[int] = []
        for _ in range(min(room, places - self._under_way[replica])):
            if self._again:
                positions.append(self._again.pop(0))
            else:
                positions.append(self._position)
                self._position += 1
        self._drawn |= set(positions)
        self._under_way[replica] += len(positions)
        return [(position, self._prompt(position)) for position in positions]

    def _prompt(self, position: int) -> Prompt:
        return self._data[self._order[position]]


def _ended_by(error: BaseException) -> WorkerFailed:
    """Raised as it is in the loop, an exit would end the run without a word, with its status."""
    ended = WorkerFailed(
        f"generation ended by {type(error).__name__}: {error}",
        where="overlap.mode: full",
        why="something that generates or judges ends its process",
        remedy="mend what calls sys.exit or os.abort",
    )
    ended.__cause__ = error
    return ended

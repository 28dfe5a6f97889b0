"""Fully asynchronous experience, where replicas generate all the time.

A replica is called for slices of its completions, or for those that are complete where its rollout
takes weights while it generates. In the first case a weight sync waits for the slices that run, in
the second one the rollout pauses for it.

A step takes the groups that are complete. Prompts are drawn in the run's order. A group goes as a
whole to the replica with the least work left. The state of each step names the prompts that were
drawn and not trained on; a resumed run draws them again, so that no prompt is lost. In an elastic
run the groups of a lost replica are begun again by the others.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from engine_trainer.algorithms.shaping import informative
from engine_trainer.config import RLConfig
from engine_trainer.data import Prompt, PromptDataset, SampleOrder
from engine_trainer.placement.ray.calls import Call, Reply, WorkerFailed, WorkerLost, ready, silent
from engine_trainer.placement.ray.rollouts import SeparateRollouts
from engine_trainer.placement.replica import Group, ScoredCompletion
from engine_trainer.rl.experience import (
    Experience,
    completion_figures,
    round_seed,
    staleness_figures,
    totals,
)
from engine_trainer.sampling.sampler import Sampler

POLL_S = 0.05
"""Seconds between two looks while a replica is idle: a step may take groups, which makes work."""


@dataclass(frozen=True, kw_only=True)
class _Running:
    """A running call, and the deadline of its reply by ``time.monotonic``."""

    call: Call
    until: float


class FullyAsync:
    """A ``Source`` whose replicas generate while the engine trains.

    See ``engine_trainer.rl.sources.Source``.

    Args:
        sampler: its rollouts are replicas in processes of their own.
        position, pending: state that a run resumes from.
        oldest: returns the oldest weight version whose tokens are trained on.
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
        assert isinstance(sampler.rollouts, SeparateRollouts), "the configuration checks it"
        self._sampler = sampler
        self._rollouts = sampler.rollouts
        self._config = config
        self._oldest = oldest
        self._data = data
        self._order = order
        self._position = position
        self._positions_to_redraw = list(pending)  # positions to draw before new ones
        self._drawn: set[int] = set()  # positions whose groups no step has taken yet
        self._ready: list[tuple[int, Group]] = []
        self._wanted = 0  # groups that the current step still needs
        self._seed = round_seed(config.run.seed, position, 0)
        self._calls = 0
        self._dropped: list[Group] = []  # groups that were too old
        self._failed: Exception | None = None
        self._changed = threading.Condition()
        self._paused = True
        self._busy = 0  # running calls
        # Slices that were generated of each group under way, by position, by replica.
        self._under_way: dict[int, dict[int, int]] = {}
        # Tokens that a replica had generated when it was last heard of, and the seconds for which
        # no more have come, by replica. There are no slices then.
        self._silences: dict[int, tuple[int, float]] = {}
        # Replicas that were lost with a group, by position.
        self._attempts: Counter[int] = Counter()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="generate", daemon=True)
        sampling = sampler.sampling(
            n=config.rollout.n, temperature=config.rollout.temperature, seed=0
        )
        self._rollouts.continuing(sampling, config.overlap.slice_tokens)
        self._thread.start()

    def take(self, step: int) -> Experience:
        """Sync the weights, then wait for the groups of a step (see ``Source``)."""
        del step  # the groups depend on the time, not on the step
        self.settle()
        with self._sampler.timers.phase("sync"):
            self._sampler.sync()
        self._resume()
        with self._sampler.timers.phase("wait"):
            generated, kept = self._collect()
        version = self._sampler.policy.weight_version
        oldest = self._oldest()
        metrics = completion_figures(generated) | {
            "rollout/groups": float(len(kept)),
            "rollout/dropped_groups": float(len(self._dropped)),
        }
        metrics |= staleness_figures(kept, version, oldest) if kept else {}
        generated = [*generated, *self._dropped]
        self._dropped = []
        # Both are read under the lock, because the thread draws at the same time.
        with self._changed:
            position = self._position
            pending = sorted([*self._drawn, *self._positions_to_redraw])
        return Experience(
            groups=kept, position=position, pending=pending, metrics=metrics, generated=generated
        )

    def settle(self) -> None:
        """Wait for the calls that run, slices or looks at generations (see ``Source``)."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: self._busy == 0 or self._failed is not None)
            self._raise()

    def close(self) -> None:
        """Close the source (see ``Source``)."""
        with self._changed:
            # The thread ends after the running slices, at the latest with their workers.
            self._closed = True
            self._changed.notify_all()

    # --- giving out -------------------------------------------------------------------------------

    def _resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def _collect(self) -> tuple[list[Group], list[Group]]:
        """Return all groups that were examined, and those that are trained on."""
        wanted = self._config.algorithm.prompts_per_step
        dynamic = self._config.algorithm.dynamic_sampling
        generated: list[Group] = []
        kept: list[Group] = []
        limit = wanted * (dynamic.max_rounds if dynamic.enabled else 1)
        while left := min(wanted - len(kept), limit - len(generated)):
            group = self._next(left)
            generated.append(group)
            if not dynamic.enabled or bool(informative(totals([group]))[0]):
                kept.append(group)
        return generated, kept

    def _next(self, wanted: int) -> Group:
        """Return one of the ``wanted`` groups that the step still needs.

        Replicas that have started meanwhile join, because this thread drives the engines.
        """
        with self._changed:
            self._wanted = wanted
            self._changed.notify_all()
        seconds = POLL_S if self._rollouts.elastic else None
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: bool(self._ready) or self._failed is not None, timeout=seconds
                )
                self._raise()
                group = self._pop_fresh()
            if group is not None:
                return group
            self._rollouts.admit()

    def _pop_fresh(self) -> Group | None:
        """Return the next ready group that is fresh, None without one. Others are dropped."""
        while self._ready:
            position, group = self._ready.pop(0)
            self._drawn.discard(position)
            self._changed.notify_all()
            if self._is_fresh(group):
                self._wanted -= 1
                return group
            self._dropped.append(group)
        return None

    def _is_fresh(self, group: Group) -> bool:
        oldest = self._oldest()
        made = [version for c in group.completions for version in c.versions]
        # A group without a token of the model counts as fresh: drawing it again would not help.
        return not made or max(made) >= oldest

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed

    # --- generating, in the thread ----------------------------------------------------------------

    def _run(self) -> None:
        running: dict[int, _Running] = {}  # by replica
        try:
            while not self._closed:
                self._start(running)
                if running:
                    self._finish(running)
        except BaseException as error:  # noqa: BLE001 - the loop raises it
            with self._changed:
                self._failed = error if isinstance(error, Exception) else _wrap_exit(error)
                self._changed.notify_all()

    def _start(self, running: dict[int, _Running]) -> None:
        """Start a slice on every idle replica that has work, unless a sync is due."""
        with self._changed:
            # While nothing runs and nothing may be drawn, wait until a step takes ready groups.
            self._changed.wait_for(
                lambda: bool(running) or self._closed or (not self._paused and self._has_work())
            )
            if self._paused or self._closed:
                return
            serving = self._rollouts.serving()
            self._give_up([r for r in self._under_way if r not in serving and r not in running])
            for replica, new in self._draw(serving, running).items():
                if self._under_way.get(replica):
                    self._calls += 1
                    self._busy += 1
                    call = self._rollouts.start(replica, "advance", new, self._seed + self._calls)
                    running[replica] = _Running(
                        call=call, until=time.monotonic() + self._rollouts.pool.timeout_s
                    )
            if not running:
                # No replica serves: a new one may join.
                self._changed.wait(POLL_S)

    def _finish(self, running: dict[int, _Running]) -> None:
        """Collect the calls that are done.

        Waits for them, but only briefly while an idle replica may get work. Raises ``WorkerLost``
        unless the run is elastic.
        """
        rollouts = self._rollouts
        idle = rollouts.elastic or len(running) < len(rollouts.serving())
        slices = list(running.values())
        left = min(s.until for s in slices) - time.monotonic()
        done = ready([s.call for s in slices], max(0.0, min(left, POLL_S) if idle else left))
        now = time.monotonic()
        for replica, begun in list(running.items()):
            if begun.call in done:
                self._note(replica, rollouts.reply(replica, running.pop(replica).call))
                self._check_progress(replica)
            elif now >= begun.until:
                rollouts.lose(replica, silent([begun.call], rollouts.pool.timeout_s))
                running.pop(replica)
                self._note(replica, None)

    def _note(self, replica: int, reply: Reply | None) -> None:
        """Take the groups of a slice, or give them up where the replica is lost."""
        with self._changed:
            self._busy -= 1
            if reply is None:
                self._give_up([replica])
            else:
                found: list[tuple[int, list[ScoredCompletion]]]
                found, tokens = reply.value
                self._note_tokens(replica, tokens, reply.seconds)
                under_way = self._under_way[replica]
                for position, completions in found:
                    del under_way[position]
                    self._attempts.pop(position, None)
                    group = Group(prompt=self._prompt(position), completions=completions)
                    self._ready.append((position, group))
                for position in under_way:
                    under_way[position] += 1
            self._changed.notify_all()

    def _note_tokens(self, replica: int, tokens: int, seconds: float) -> None:
        """Note how long a replica has been generating no token, where no slice ends."""
        before, silent_s = self._silences.get(replica, (0, 0.0))
        is_idle = not self._under_way[replica]
        self._silences[replica] = tokens, 0.0 if is_idle or tokens > before else silent_s + seconds

    def _check_progress(self, replica: int) -> None:
        """Lose a replica that has generated no token for too long, where no slice ends.

        Raises ``WorkerLost`` unless the run is elastic.
        """
        limit = self._rollouts.pool.timeout_s
        _, silent_s = self._silences.get(replica, (0, 0.0))
        if not self._rollouts.in_flight or silent_s <= limit:
            return
        self._rollouts.lose(
            replica,
            WorkerLost(
                f"no token was generated in {limit:g} s",
                where="overlap.mode: full",
                why="its rollout hangs",
                remedy="see its log; raise ray.timeout_s if a token takes longer",
            ),
        )
        with self._changed:
            self._give_up([replica])
            self._changed.notify_all()

    def _give_up(self, replicas: Sequence[int]) -> None:
        """Let other replicas begin the groups of lost ones again, first of all."""
        for replica in replicas:
            positions = sorted(self._under_way.pop(replica, {}))
            self._silences.pop(replica, None)
            self._attempts.update(positions)
            self._drawn.difference_update(positions)
            self._positions_to_redraw = [*positions, *self._positions_to_redraw]
            for position in positions:
                self._rollouts.check_attempts(self._attempts[position])

    def _has_work(self) -> bool:
        return any(self._under_way.values()) or self._groups_to_begin() > 0

    def _groups_to_begin(self) -> int:
        """Return the number of groups that may still be started.

        These are the groups that the step still needs, and those of ``max_staleness`` steps more.
        So a group that is started and finished with the current weights is not too old when it is
        taken (the bound of AReaL, arXiv:2505.24298).
        """
        ahead = self._config.algorithm.prompts_per_step * self._config.overlap.max_staleness
        return self._wanted + ahead - len(self._drawn)

    def _draw(
        self, serving: Sequence[int], running: Container[int]
    ) -> dict[int, list[tuple[int, Prompt]]]:
        """Draw groups for the free slots of the replicas that are idle, and return them by replica.

        Each group goes to the replica with the fewest tokens left to generate. A replica gets no
        more than its fraction of all groups that are or may be started.
        """
        idle = [replica for replica in serving if replica not in running]
        if not idle:
            return {}
        section = self._config.rollout
        left = self._groups_to_begin()
        total = sum(map(len, self._under_way.values())) + left
        slots = min(math.ceil(total / len(serving)), max(1, section.batch_size // section.n))
        counts = dict.fromkeys(idle, 0)
        loads = {replica: self._tokens_left(replica) for replica in idle}
        free = {replica: slots - len(self._under_way.get(replica, ())) for replica in idle}
        while left > 0 and any(free[r] > counts[r] for r in idle):
            chosen = min((r for r in idle if free[r] > counts[r]), key=lambda r: loads[r])
            counts[chosen] += 1
            loads[chosen] += section.max_new_tokens
            left -= 1
        return {replica: self._begin(replica, count) for replica, count in counts.items()}

    def _tokens_left(self, replica: int) -> int:
        """Return the tokens that a replica may still generate, with one completion for each group.

        All groups have equally many completions, so that their number does not matter for a
        comparison. A group beyond its limit (a conversation with more turns) counts as one token.
        """
        limit = self._config.rollout.max_new_tokens
        size = self._config.overlap.slice_tokens
        slices = self._under_way.get(replica, {}).values()
        if self._rollouts.in_flight:
            # The number of tokens so far is not known.
            return limit * len(slices)
        return sum(max(limit - done * size, 1) for done in slices)

    def _begin(self, replica: int, count: int) -> list[tuple[int, Prompt]]:
        """Draw ``count`` groups for a replica: those to draw again, then new ones."""
        positions = self._positions_to_redraw[:count]
        self._positions_to_redraw = self._positions_to_redraw[count:]
        new = range(self._position, self._position + count - len(positions))
        self._position = new.stop
        positions += new
        self._drawn |= set(positions)
        self._under_way.setdefault(replica, {}).update(dict.fromkeys(positions, 0))
        return [(position, self._prompt(position)) for position in positions]

    def _prompt(self, position: int) -> Prompt:
        return self._data[self._order[position]]


def _wrap_exit(error: BaseException) -> WorkerFailed:
    """Build the error for a ``BaseException`` in the thread.

    Raised in the loop as it is, an exit would end the run without a message, with the exit's
    status.
    """
    ended = WorkerFailed(
        f"generation ended by {type(error).__name__}: {error}",
        where="overlap.mode: full",
        why="a rollout or reward function ends its process",
        remedy="fix the code that calls sys.exit or os.abort",
    )
    ended.__cause__ = error
    return ended

"""A rollout that takes weights while it generates, and wrong ones, each like it but for one defect.

`InFlight` is `local` with a thread that generates token by token, in as many places as
``batch_size``. It holds a lock for each token, and a sync holds it as a whole.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import DynamicCache

from engine_api.errors import RankFailure, RolloutError, UnsupportedCapability
from engine_api.rollout import Completion, FinishReason, SamplingParams, SyncResult
from engine_api.weights import WeightExport
from engine_trainer.rollouts.decode import name_cache
from engine_trainer.rollouts.local import LocalRollout
from engine_trainer.rollouts.sampling import draw, uniforms

WHERE = "rollout 'in-flight'"


def _error(what: str) -> RolloutError:
    return RolloutError(what, where=WHERE, remedy="call update_weights, then submit it again")


@dataclass(eq=False)
class Made:
    """One completion that is generated."""

    prompt: list[int]
    sampling: SamplingParams
    numbers: torch.Tensor
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cache: Any = None
    reason: FinishReason | None = None


class Running:
    """The completions of one prompt."""

    def __init__(self, sequences: list[Made]) -> None:
        self.sequences = sequences
        self.aborted = threading.Event()
        self.over = threading.Event()
        self.failure: RolloutError | None = None

    def done(self) -> bool:
        return self.over.is_set()

    def result(self, timeout_s: float | None = None) -> list[Completion]:
        if not self.over.wait(timeout_s):
            raise TimeoutError
        if self.failure is not None:
            raise self.failure
        return [
            Completion(
                prompt_index=0,
                tokens=one.tokens,
                log_probs=one.log_probs,
                weight_versions=one.versions,
                finish_reason=one.reason or "abort",
            )
            for one in self.sequences
        ]

    def abort(self) -> None:
        self.aborted.set()
        self.over.wait()

    def end(self, failure: RolloutError | None = None) -> None:
        self.failure = failure
        self.over.set()


class InFlight(LocalRollout):
    """A right one, in both modes."""

    def __init__(
        self,
        *,
        in_flight: bool = False,
        kv_cache_in_flight: str = "recompute",
        batch_size: int = 64,
        routed_experts: bool = False,
        **arguments: Any,
    ) -> None:
        if in_flight and routed_experts:
            raise UnsupportedCapability("in_flight", where=WHERE, remedy="routed_experts=False")
        super().__init__(batch_size=batch_size, routed_experts=routed_experts, **arguments)
        self.kv_cache_in_flight = kv_cache_in_flight
        self.in_flight = in_flight
        self.places = batch_size
        self.tokens_generated = 0
        self.running: list[Running] = []
        # Held for each token, and for the whole of a sync.
        self.changed = threading.Condition()
        self.syncing = False
        self.closing = False
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, prompt: Sequence[int], sampling: SamplingParams) -> Running:
        with self.changed:
            if self._not_ready:
                raise _error(f"cannot generate: {self._not_ready}")
            self._check([prompt], sampling)
            numbers = uniforms([prompt], sampling)
            job = Running([Made([*prompt], sampling, row) for row in numbers])
            self.running.append(job)
            self.changed.notify_all()
        return job

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        begin = time.perf_counter()
        self.syncing = True
        with self.changed:
            self.syncing = False
            busy = bool(self.running)
            if busy and not self.in_flight:
                raise _error("cannot take weights: it is generating")
            try:
                result = self.install(export, version)
            except BaseException:
                self.lose()
                raise
            self.forget()
            self.changed.notify_all()
        seconds = {**result.seconds, "paused": time.perf_counter() - begin}
        return replace(result, seconds=seconds) if busy else result

    def install(self, export: WeightExport, version: int) -> SyncResult:
        return super().update_weights(export, version)

    def lose(self) -> None:
        """End what runs at a sync that fails."""
        for job in self.running:
            job.end(_error("lost in a sync that failed"))
        self.running.clear()

    def forget(self) -> None:
        """Drop keys and values at a sync."""
        for sequence in self.sequences():
            if self.kv_cache_in_flight == "recompute" or not sequence.tokens:
                sequence.cache = None

    def sequences(self) -> list[Made]:
        return [one for job in self.running for one in job.sequences if one.reason is None]

    def placed(self) -> list[Made]:
        """Return the completions that have a place, where the others wait for one."""
        return self.sequences()[: self.places]

    def sleep(self, weights: bool = True, kv_cache: bool = True) -> None:
        self.require_idle()
        super().sleep(weights, kv_cache)

    def wake_up(self, weights: bool = True, kv_cache: bool = True) -> None:
        self.require_idle()
        super().wake_up(weights, kv_cache)

    def require_idle(self) -> None:
        if self.running:
            raise _error("it is generating")

    def close(self) -> None:
        with self.changed:
            self.closing = True
            for job in self.running:
                job.end(_error("the rollout is closed"))
            self.running.clear()
            self.changed.notify_all()
            super().close()

    def _run(self) -> None:
        while not self.closing:
            while self.syncing:
                # A lock is not fair: this thread would have it again at once.
                time.sleep(0.0005)
            with self.changed:
                self.changed.wait_for(lambda: self.running or self.closing)
                self._end_aborted()
                for sequence in self.placed():
                    self.step(sequence)
                self._end_whole()

    def _end_aborted(self) -> None:
        for job in self.running:
            if job.aborted.is_set():
                for one in job.sequences:
                    one.reason = one.reason or "abort"

    def _end_whole(self) -> None:
        for job in [*self.running]:
            if all(one.reason for one in job.sequences):
                self.running.remove(job)
                job.end()

    def _feed(self, ids: torch.Tensor, cache: Any) -> Any:
        """Return the model's output, which leaves the keys and values of ``ids`` in the cache."""
        return self._model(input_ids=ids, use_cache=True, **{name_cache(self._model): cache})

    @torch.inference_mode()
    def step(self, one: Made) -> None:
        """Generate one token."""
        if one.cache is None:
            one.cache = self.begin_cache(one)
        text = [*one.prompt, *one.tokens]
        ids = torch.tensor([text[one.cache.get_seq_length() :]])
        logits = self._feed(ids, one.cache).logits
        token, log_prob = draw(logits[:, -1], one.numbers[len(one.tokens)][None], one.sampling)
        one.tokens.append(int(token))
        self.tokens_generated += 1
        one.log_probs.append(float(log_prob))
        one.versions.append(self.version_of(one))
        stops = {*self._eos, *one.sampling.stop_token_ids}
        if one.tokens[-1] in stops:
            one.reason = "stop"
        elif len(one.tokens) == one.sampling.max_new_tokens:
            one.reason = "length"

    def begin_cache(self, one: Made) -> Any:
        """Return the cache that a completion begins with, or begins again with."""
        del one
        return DynamicCache(config=self._model.config)

    def version_of(self, one: Made) -> int:
        """Return the version of a token that was just made."""
        del one
        return self.weight_version


class Keeps(InFlight):
    """A right one that keeps old keys and values."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{"kv_cache_in_flight": "keep"} | arguments)


class KeepsFirstVersion(InFlight):
    """All tokens of a completion carry the version that it began with."""

    def version_of(self, one: Made) -> int:
        return one.versions[0] if one.versions else self.weight_version


class WritesLastVersion(InFlight):
    """All tokens of a completion carry the version that it ended with."""

    def version_of(self, one: Made) -> int:
        one.versions[:] = [self.weight_version] * len(one.versions)
        return self.weight_version


class NamesVersionEarly(InFlight):
    """The last token of the old weights carries the version of the new ones."""

    def forget(self) -> None:
        super().forget()
        for one in self.sequences():
            one.versions[-1:] = [self.weight_version] * bool(one.versions)


class NamesVersionLate(InFlight):
    """The first token of the new weights carries the version of the old ones."""

    late: tuple[Made, ...] = ()
    before = -1

    def install(self, export: WeightExport, version: int) -> SyncResult:
        self.before = self.weight_version
        return super().install(export, version)

    def forget(self) -> None:
        super().forget()
        self.late = tuple(one for one in self.sequences() if one.tokens)

    def version_of(self, one: Made) -> int:
        if one not in self.late:
            return self.weight_version
        self.late = tuple(other for other in self.late if other is not one)
        return self.before


class GeneratesAtHalf(InFlight):
    """A token is made when half of the tensors are installed."""

    def install(self, export: WeightExport, version: int) -> SyncResult:
        return super().install(self._interrupted(export), version)

    def _interrupted(self, export: WeightExport) -> Iterator[Any]:
        for place, pair in enumerate(export):
            if place == 12:
                for one in self.placed():
                    self.step(one)
            yield pair


class ServesHalf(InFlight):
    """A sync during generations installs the second half alone, and the next one all."""

    def install(self, export: WeightExport, version: int) -> SyncResult:
        if not self.running:
            return super().install(export, version)
        stored = {name: tensor.clone() for name, tensor in self._table._views.items()}
        return super().install(self._mixed(export, stored), version)

    def _mixed(self, export: WeightExport, stored: dict[str, torch.Tensor]) -> Iterator[Any]:
        for place, (name, tensor) in enumerate(export):
            yield name, stored[name] if place < 12 else tensor


class KeepsInSilence(InFlight):
    """Old keys and values are kept, and said to be computed again."""

    def forget(self) -> None:
        for one in self.sequences():
            if not one.tokens:
                one.cache = None


class RecomputesInSilence(Keeps):
    """Keys and values are computed again, and said to be kept."""

    def forget(self) -> None:
        for one in self.sequences():
            one.cache = None


class RecomputesTokensAlone(InFlight):
    """Keys and values of the prompt are kept, those of the completion are computed again."""

    def forget(self) -> None:
        for one in self.sequences():
            if one.cache is not None:
                one.cache.crop(len(one.prompt) - 1)


class _SharesPrefixes(InFlight):
    """Keys and values of a prompt are those that an earlier completion left."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.prefixes: dict[tuple[int, ...], Any] = {}

    def begin_cache(self, one: Made) -> Any:
        key = tuple(one.prompt)
        if key not in self.prefixes:
            self.prefixes[key] = super().begin_cache(one)
            ids = torch.tensor([one.prompt[:-1] or one.prompt])
            if len(one.prompt) > 1:
                self._feed(ids, self.prefixes[key])
        return copy.deepcopy(self.prefixes[key])


class SharesOldPrefixes(_SharesPrefixes):
    """A sync during generations leaves the prefixes of the old weights to all."""

    def forget(self) -> None:
        super().forget()
        if not self.running:
            self.prefixes.clear()


class LeavesOldPrefixesToNew(_SharesPrefixes):
    """Generations that wait at a sync are right, and those submitted after it get old prefixes."""

    old: dict[tuple[int, ...], Any] = {}  # noqa: RUF012 - replaced, never changed

    def forget(self) -> None:
        super().forget()
        self.old = {**self.prefixes} if self.running else {}
        self.prefixes.clear()

    def submit(self, prompt: Sequence[int], sampling: SamplingParams) -> Running:
        job = super().submit(prompt, sampling)
        with self.changed:
            for one in job.sequences:
                if not one.tokens and tuple(prompt) in self.old:
                    one.cache = copy.deepcopy(self.old[tuple(prompt)])
        return job


class KeepsBegunPrompts(InFlight):
    """A completion that waits has keys and values of its prompt already, which stay old."""

    def submit(self, prompt: Sequence[int], sampling: SamplingParams) -> Running:
        job = super().submit(prompt, sampling)
        with self.changed, torch.inference_mode():
            for one in job.sequences:
                if not one.tokens and len(prompt) > 1:
                    one.cache = self.begin_cache(one)
                    ids = torch.tensor([one.prompt[:-1]])
                    self._feed(ids, one.cache)
        return job

    def forget(self) -> None:
        for one in self.sequences():
            if one.tokens:
                one.cache = None


class LetsFinish(InFlight):
    """A sync waits until nothing is generated."""

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        for job in [*self.running]:
            job.over.wait()
        result = super().update_weights(export, version)
        return replace(result, seconds={**result.seconds, "paused": 1e-3})


class FinishesInside(InFlight):
    """A sync reads the export, and lets what runs finish before it installs it."""

    def install(self, export: WeightExport, version: int) -> SyncResult:
        stored = [(name, tensor.clone()) for name, tensor in export]
        while self.sequences():
            for one in self.placed():
                self.step(one)
        return super().install(iter(stored), version)


class BeginsAgain(InFlight):
    """A sync begins all completions again."""

    def forget(self) -> None:
        for one in self.sequences():
            one.cache = None
            for made in (one.tokens, one.log_probs, one.versions):
                made.clear()


class GoesOnAfterFailure(InFlight):
    """A sync that fails puts the old weights back, and what runs goes on."""

    def lose(self) -> None:
        for name, tensor in self.stored.items():
            self._table._views[name].copy_(tensor)

    def install(self, export: WeightExport, version: int) -> SyncResult:
        self.stored = {name: tensor.clone() for name, tensor in self._table._views.items()}
        return super().install(export, version)


class LosesRunningAlone(GoesOnAfterFailure):
    """A sync that fails ends what has a place, and what waits goes on with the old weights."""

    def lose(self) -> None:
        super().lose()
        placed = self.placed()
        for job in [*self.running]:
            if any(one in placed for one in job.sequences):
                self.running.remove(job)
                job.end(_error("lost in a sync that failed"))


class LosesForOwnErrorsAlone(GoesOnAfterFailure):
    """What runs goes on with the old weights if the export itself fails."""

    foreign = False

    def install(self, export: WeightExport, version: int) -> SyncResult:
        try:
            return super().install(export, version)
        except RankFailure:
            self.foreign = True
            raise

    def lose(self) -> None:
        if self.foreign:
            super().lose()
        else:
            InFlight.lose(self)


class EndsWithTokens(InFlight):
    """A sync that fails ends what runs as if it were aborted."""

    def lose(self) -> None:
        for job in self.running:
            for one in job.sequences:
                one.reason = one.reason or "abort"
            job.end()
        self.running.clear()


class EndsWithOwnError(InFlight):
    """A sync that fails ends what runs with another error."""

    def lose(self) -> None:
        for job in self.running:
            job.end(ValueError("no weights"))  # type: ignore[arg-type]
        self.running.clear()


class OpensAfterFailure(GoesOnAfterFailure):
    """A sync that fails ends what runs, and new generations get the old weights."""

    def lose(self) -> None:
        super().lose()
        InFlight.lose(self)
        self._not_ready = ""


class BreaksAfterFailure(InFlight):
    """After a sync that failed during generations none succeeds."""

    broken = False

    def lose(self) -> None:
        self.broken = self.broken or bool(self.running)
        super().lose()

    def install(self, export: WeightExport, version: int) -> SyncResult:
        if self.broken:
            raise _error("it is broken")
        return super().install(export, version)


class AbortsLate(InFlight):
    """A completion that is aborted during a sync gets one more token."""

    def _end_aborted(self) -> None:
        for job in self.running:
            if job.aborted.is_set():
                for one in job.sequences:
                    if one.reason is None and one.tokens:
                        self.step(one)
        super()._end_aborted()


class ForgetsAborts(InFlight):
    """An abort during a sync is lost."""

    def forget(self) -> None:
        super().forget()
        for job in self.running:
            job.aborted.clear()


class AbortsRunningAlone(InFlight):
    """An abort of a generation that waits is lost."""

    def _end_aborted(self) -> None:
        for job in self.running:
            if not any(one.tokens for one in job.sequences):
                job.aborted.clear()
        super()._end_aborted()


class NamesAbortsLength(InFlight):
    """A completion that was aborted says that it has its whole length."""

    def _end_aborted(self) -> None:
        for job in self.running:
            if job.aborted.is_set():
                for one in job.sequences:
                    one.reason = one.reason or "length"


class SleepsWhileRunning(InFlight):
    """`sleep` is accepted while generations run, and does nothing."""

    def sleep(self, weights: bool = True, kv_cache: bool = True) -> None:
        if not self.running:
            super().sleep(weights, kv_cache)


class WakesWhileRunning(InFlight):
    """`wake_up` is accepted while generations run."""

    def wake_up(self, weights: bool = True, kv_cache: bool = True) -> None:
        LocalRollout.wake_up(self, weights, kv_cache)


class TellsNoPause(InFlight):
    """The result of a sync does not say how long generations waited."""

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        return replace(super().update_weights(export, version), seconds={})


class TellsNoMode(InFlight):
    """What becomes of keys and values is not said."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        del self.kv_cache_in_flight

    def forget(self) -> None:
        for one in self.sequences():
            one.cache = None


class CountsPrompts(InFlight):
    """Tokens of prompts are counted with the generated ones."""

    def begin_cache(self, one: Made) -> Any:
        self.tokens_generated += len(one.prompt)
        return super().begin_cache(one)


class CountsAtTheEnd(InFlight):
    """Tokens are counted when their generation is done."""

    def step(self, one: Made) -> None:
        super().step(one)
        self.tokens_generated -= 1

    def _end_whole(self) -> None:
        for job in self.running:
            if all(one.reason for one in job.sequences):
                self.tokens_generated += sum(len(one.tokens) for one in job.sequences)
        super()._end_whole()


class AuditsWhenIdle(InFlight):
    """A sync is audited only while nothing is generated."""

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        idle = not self.running
        return replace(super().update_weights(export, version), audited=idle)


class SpoilsWithoutArgument(InFlight):
    """Without the argument a sync is refused, and what runs goes on with another version."""

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        try:
            return super().update_weights(export, version)
        except RolloutError:
            if not self.in_flight:
                self.weight_version = version
            raise


class RefusesItsDeclaration(InFlight):
    """The argument is refused in any case."""

    def __init__(self, *, in_flight: bool = False, **arguments: Any) -> None:
        if in_flight:
            raise UnsupportedCapability("in_flight", where=WHERE, remedy="leave it out")
        super().__init__(**arguments)

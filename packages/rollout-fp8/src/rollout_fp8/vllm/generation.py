"""Generation with vLLM: one thread steps its engine, and callers give the thread jobs and wait.

Jobs enter whole between two steps. So ranks that serve one replica together, each with its own
scheduler, schedule alike. Between two steps the thread also pauses, so that weights can be changed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import vllm
from vllm.lora.request import LoRARequest

from engine_api.errors import RolloutError
from engine_api.rollout import Completion, FinishReason
from rollout_fp8.experts import RoutedLayers
from rollout_fp8.failures import describe_error
from rollout_fp8.log_probs import require_finite
from rollout_fp8.vllm import private
from rollout_fp8.vllm.held import HeldOutputs
from rollout_fp8.vllm.images import require_prompt

WHERE = "rollout 'vllm'"


@dataclass(kw_only=True)
class _Sequence:
    """Completion that is being generated."""

    request: str
    prompt_index: int
    prompt: Sequence[int]
    params: vllm.SamplingParams
    inputs: Any
    """The prompt as the engine takes it, with its images."""
    kept: bool
    """False for another rank's completion, which this rank helps to generate."""
    tokens: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    outputs: int = 0
    """Outputs of vLLM's engine that had tokens, which are its forward passes where it streams."""
    reason: FinishReason | None = None
    """None while the completion continues."""
    experts: Any = None
    """Experts of its tokens, as vLLM reports them at the end: ``[n, layers, k]`` of NumPy, or None
    where it was aborted or records none."""


class Job:
    """Completions that were requested together.

    It is a ``Generation``.

    Args:
        stepper: thread that generates the completions.
        adapter: adapter that is served, or None for none.
        routing: layers whose experts are recorded, or None for none.
        counted: True lets completions report their forward passes. All requests must stream then.
    """

    def __init__(
        self,
        stepper: Stepper,
        adapter: LoRARequest | None = None,
        routing: RoutedLayers | None = None,
        *,
        counted: bool = False,
    ) -> None:
        self._stepper = stepper
        self.routing = routing
        self._counted = counted
        self.adapter = adapter
        self._over = threading.Event()
        self._failure: RolloutError | None = None
        self.sequences: list[_Sequence] = []

    def add(
        self,
        prompt_index: int,
        prompt: Sequence[int],
        params: vllm.SamplingParams,
        *,
        inputs: Any = None,
        kept: bool = True,
    ) -> None:
        """Add one completion.

        It is to be called before ``Stepper.enter``. ``inputs`` is the prompt with its images as
        vLLM's engine takes it; None: the prompt has none.
        """
        self.sequences.append(
            _Sequence(
                request=self._stepper.name(),
                prompt_index=prompt_index,
                prompt=prompt,
                params=params,
                inputs={"prompt_token_ids": list(prompt)} if inputs is None else inputs,
                kept=kept,
            )
        )

    def done(self) -> bool:
        """See ``Generation``."""
        return self._over.is_set()

    def result(self, timeout_s: float | None = None) -> list[Completion]:
        """See ``Generation`` (grouped by prompt)."""
        if not self._over.wait(timeout_s):
            raise TimeoutError(f"{WHERE}: nothing arrived within {timeout_s} s")
        if self._failure is not None:
            raise self._failure
        completions = [self._completion(sequence) for sequence in self.sequences if sequence.kept]
        require_finite(completions, WHERE)
        return completions

    def abort(self) -> None:
        """See ``Generation``.

        It returns when the job is done.
        """
        if not self.done():
            self._stepper.abort(self)
            self._over.wait()

    def end(self, failure: RolloutError | None = None) -> None:
        """Mark the job as done (called by the stepper)."""
        self._failure = failure
        self._over.set()

    def _completion(self, sequence: _Sequence) -> Completion:
        assert sequence.reason is not None
        return Completion(
            prompt_index=sequence.prompt_index,
            tokens=sequence.tokens,
            log_probs=sequence.log_probs,
            weight_versions=sequence.versions,
            finish_reason=sequence.reason,
            routed_experts=self._experts(sequence),
            passes=sequence.outputs if self._counted else 0,
        )

    def _experts(self, sequence: _Sequence) -> torch.Tensor | None:
        """Return the experts of the prompt's and the completion's tokens, -1 at the last one."""
        if self.routing is None or sequence.reason == "abort":
            return None
        tokens = len(sequence.prompt) + len(sequence.tokens)
        return self.routing.read(sequence.experts, tokens, WHERE)


class Stepper:
    """Thread of an engine.

    Args:
        engine: stepped by nothing else.
        device: made current in the thread.
        salted: True keeps the prefixes from before each pause apart, for pauses after which vLLM
            still has keys and values of old weights.
        held: outputs that are held until their completions end, or None.

    Attributes:
        version: version of the weights that make the next tokens. It is set while nothing is
            generated, or during a pause.
        tokens: number of tokens that have come so far.
    """

    def __init__(
        self,
        engine: vllm.LLMEngine,
        device: torch.device,
        *,
        salted: bool = False,
        held: HeldOutputs | None = None,
    ) -> None:
        self.version = -1
        self.tokens = 0
        self._engine: Any = engine
        self._device = device
        self._salted = salted
        self._held = held
        self._names = count()
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        # Jobs that are not over; changed under the condition.
        self._jobs: list[Job] = []
        # Used by the thread alone.
        self._live: dict[str, tuple[_Sequence, Job]] = {}
        self._closing = False
        self._failure = ""
        # True from the request of a pause to its end.
        self._pausing = False
        # True while the thread waits in a pause.
        self._paused = False
        # The error that ends all jobs after the pause.
        self._pause_failure: RolloutError | None = None
        # Pauses so far: keys and values from before the last one have another salt.
        self._pauses = 0
        # True once the engine's processes are gone: the thread may wait for them for ever.
        self._lost = False
        self._thread = threading.Thread(target=self._run, name="vllm-stepper", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True while tokens are generated."""
        return bool(self._jobs)

    def name(self) -> str:
        """Return the name of the next request."""
        return str(next(self._names))

    def check(self, what: str) -> None:
        """Raise ``RolloutError`` after a failure, from which the engine does not recover."""
        if self._failure:
            raise RolloutError(
                f"cannot {what}",
                where=WHERE,
                why=f"vLLM failed: {self._failure}",
                remedy="close this rollout and create another one",
            )

    def fail(self, why: str) -> None:
        """Note that the engine is gone.

        It is called from another thread, because the stepper's own may wait in vLLM for ever.
        """
        self._lost = True
        self._end(why)

    def enter(self, job: Job) -> None:
        """Begin with all of a job's completions at once.

        Raises:
            RolloutError: the engine has failed.
        """
        with self._changed:
            self.check("generate")
            self._jobs.append(job)
            self._calls.append(lambda: self._start(job))
            self._changed.notify_all()

    def abort(self, job: Job) -> None:
        """Request a job's end.

        Its tokens so far are kept.
        """
        with self._changed:
            self._calls.append(lambda: self._stop(job))
            self._changed.notify_all()

    def pause(self) -> None:
        """Stop between two tokens of all completions, until ``resume``.

        All tokens of the steps that were under way have arrived then. The caller may use the engine
        during the pause, except for its steps and requests.

        Raises:
            RolloutError: the engine has failed.
        """
        with self._changed:
            self._pausing = True
            self._calls.append(self._pause)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._paused or self._failure)
            self.check("take weights")

    def resume(self, failure: RolloutError | None = None) -> None:
        """Continue after ``pause``, or end all jobs with ``failure``.

        It returns once the thread has left the pause, so that another one may follow at once.
        """
        with self._changed:
            self._pausing = False
            self._pause_failure = failure
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._paused or self._failure)

    def close(self) -> None:
        """End the thread.

        Unfinished jobs fail.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if not self._lost:
            self._thread.join()
        # A caller may keep a job, and with it this stepper.
        self._engine = None
        self._held = None

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            while self._wait():
                while self._calls:
                    self._calls.popleft()()
                if self._live and not self._closing:
                    for output in self._engine.step():
                        self._receive(output)
        except BaseException as error:  # noqa: BLE001 - a thread has no caller, a job's waiter gets it
            # No request stays scheduled, if vLLM still responds; the first error is the one to
            # report.
            with suppress(Exception):
                self._engine.abort_request([*self._live])
            self._end(describe_error(error))
        else:
            self._end("")

    def _end(self, failure: str) -> None:
        """End all jobs.

        ``failure`` is "" when the rollout was closed.
        """
        why = f"vLLM failed: {failure}" if failure else "the rollout was closed"
        with self._changed:
            self._failure = self._failure or failure or "closed"
            for job in self._jobs:
                job.end(
                    RolloutError(
                        "the generation was lost",
                        where=WHERE,
                        why=why,
                        remedy="create another rollout",
                    )
                )
            self._jobs.clear()
            # A caller may wait for a pause.
            self._changed.notify_all()

    def _wait(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._calls or self._live)
            return not self._closing and not self._lost

    def _pause(self) -> None:
        for output in private.pause(self._engine):
            self._receive(output)
        if self._device.type == "cuda":
            # Before weights change, also work of the last step that no output waits for is done.
            torch.cuda.synchronize(self._device)
        with self._changed:
            self._paused = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pausing or self._closing or self._lost)
            self._paused = False
            self._pauses += 1
            failure = self._pause_failure
            self._changed.notify_all()
        if self._closing or self._lost:
            return
        if failure is not None:
            for job in list(self._jobs):
                self._drop(job, failure)
        elif self._salted:
            self._begin_again()
        private.resume(self._engine)

    def _begin_again(self) -> None:
        """Begin completions without a token with the current version's prefixes.

        vLLM may have computed a part of their prompt with the old weights, or find it among the
        prefixes of these.
        """
        waiting = [pair for pair in self._live.values() if not pair[0].tokens]
        self._abort([sequence.request for sequence, _ in waiting])
        for sequence, job in waiting:
            del self._live[sequence.request]
            sequence.request = self.name()
            self._add(sequence, job)

    def _add(self, sequence: _Sequence, job: Job) -> None:
        inputs = sequence.inputs
        if self._salted:
            # Not the version: other weights may come under the one that is served.
            inputs = {**inputs, "cache_salt": f"after {self._pauses} pauses"}
        self._engine.add_request(
            sequence.request, inputs, sequence.params, lora_request=job.adapter
        )
        self._live[sequence.request] = (sequence, job)

    def _start(self, job: Job) -> None:
        try:
            for sequence in job.sequences:
                self._add(sequence, job)
        except Exception as error:  # noqa: BLE001 - vLLM may raise anything; other jobs continue
            self._drop(
                job,
                RolloutError(
                    "vLLM refuses a request",
                    where=WHERE,
                    why=describe_error(error),
                    remedy="see its message; other generations continue",
                ),
            )
        self._end_if_over(job)

    def _abort(self, requests: list[str]) -> None:
        self._engine.abort_request(requests)
        if self._held is not None:
            self._held.forget_aborted()

    def _drop(self, job: Job, failure: RolloutError) -> None:
        """End a job of which one request failed, with all of its other requests."""
        running = [s.request for s in job.sequences if s.request in self._live]
        self._abort(running)
        for request in running:
            del self._live[request]
        self._finish(job, failure)

    def _stop(self, job: Job) -> None:
        running = [s for s in job.sequences if s.reason is None and s.request in self._live]
        self._abort([s.request for s in running])
        for sequence in running:
            sequence.reason = "abort"
            del self._live[sequence.request]
        self._end_if_over(job)

    def _receive(self, output: Any) -> None:
        held = self._held
        log_probs = None if held is None else held.take_log_probs(output.request_id)
        # It was aborted while it was computed.
        if output.request_id not in self._live:
            return
        sequence, job = self._live[output.request_id]
        (new,) = output.outputs
        sequence.tokens += new.token_ids
        sequence.log_probs += new.logprobs.logprobs if log_probs is None else log_probs
        sequence.versions += [self.version] * len(new.token_ids)
        sequence.outputs += bool(new.token_ids)
        self.tokens += len(new.token_ids)
        if not output.finished:
            return
        if job.routing is not None:
            sequence.experts = new.routed_experts
        del self._live[output.request_id]
        try:
            _require_whole(sequence, new.finish_reason)
            require_prompt(sequence.prompt, output.prompt_token_ids, WHERE)
        except RolloutError as error:
            self._drop(job, error)
            return
        sequence.reason = new.finish_reason
        self._end_if_over(job)

    def _end_if_over(self, job: Job) -> None:
        if all(s.reason is not None for s in job.sequences):
            self._finish(job)

    def _finish(self, job: Job, failure: RolloutError | None = None) -> None:
        with self._changed:
            # Another thread may have ended it.
            if job in self._jobs:
                self._jobs.remove(job)
                job.end(failure)


def _require_whole(sequence: _Sequence, reason: str | None) -> None:
    """Raise ``RolloutError`` for a completion that vLLM gave up.

    Aborts by ``Stepper`` are not reported by vLLM.
    """
    if reason not in ("stop", "length"):
        raise RolloutError(
            f"prompt {sequence.prompt_index} ended with {reason!r} "
            f"after {len(sequence.tokens)} tokens",
            where=WHERE,
            why="vLLM aborted it",
            remedy="see its own messages for details",
        )

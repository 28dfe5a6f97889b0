"""Generation with vLLM: one thread steps its engine, and callers give the thread jobs and wait.

Jobs enter whole between two steps. So ranks that serve one replica together, each with its own
scheduler, schedule alike.
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
from rollout_fp8.log_probs import require_finite
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
    reason: FinishReason | None = None
    """None while the completion continues."""
    experts: Any = None
    """Experts of its tokens, as vLLM reports them at the end: ``[n, layers, k]`` of NumPy, or None
    where it was aborted or records none."""


class Job:
    """Completions that were requested together, of one version of the weights (and adapter).

    It is a ``Generation``.
    """

    def __init__(
        self,
        stepper: Stepper,
        version: int,
        adapter: LoRARequest | None = None,
        routing: RoutedLayers | None = None,
    ) -> None:
        self._stepper = stepper
        self.routing = routing
        self._version = version
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
        # No sync happens during generation, so one version made all tokens.
        versions = [self._version] * len(sequence.tokens)
        return Completion(
            prompt_index=sequence.prompt_index,
            tokens=sequence.tokens,
            log_probs=sequence.log_probs,
            weight_versions=versions,
            finish_reason=sequence.reason,
            routed_experts=self._experts(sequence),
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
    """

    def __init__(self, engine: vllm.LLMEngine, device: torch.device) -> None:
        self._engine: Any = engine
        self._device = device
        self._names = count()
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        # Jobs that are not over; changed under the condition.
        self._jobs: list[Job] = []
        # Used by the thread alone.
        self._live: dict[str, tuple[_Sequence, Job]] = {}
        self._closing = False
        self._failure = ""
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
            self._changed.notify()

    def abort(self, job: Job) -> None:
        """Request a job's end.

        Its tokens so far are kept.
        """
        with self._changed:
            self._calls.append(lambda: self._stop(job))
            self._changed.notify()

    def close(self) -> None:
        """End the thread.

        Unfinished jobs fail.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        if not self._lost:
            self._thread.join()
        # A caller may keep a job, and with it this stepper.
        self._engine = None

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            while self._wait():
                while self._calls:
                    self._calls.popleft()()
                if self._live:
                    for output in self._engine.step():
                        self._receive(output)
        except BaseException as error:  # noqa: BLE001 - a thread has no caller, a job's waiter gets it
            # No request stays scheduled, if vLLM still responds; the first error is the one to
            # report.
            with suppress(Exception):
                self._engine.abort_request([*self._live])
            self._end(f"{type(error).__name__}: {error}")
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

    def _wait(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._calls or self._live)
            return not self._closing

    def _start(self, job: Job) -> None:
        try:
            for sequence in job.sequences:
                self._engine.add_request(
                    sequence.request, sequence.inputs, sequence.params, lora_request=job.adapter
                )
                self._live[sequence.request] = (sequence, job)
        except Exception as error:  # noqa: BLE001 - vLLM may raise anything; other jobs continue
            self._drop(
                job,
                RolloutError(
                    "vLLM refuses a request",
                    where=WHERE,
                    why=f"{type(error).__name__}: {error}",
                    remedy="see its message; other generations continue",
                ),
            )
        self._end_if_over(job)

    def _drop(self, job: Job, failure: RolloutError) -> None:
        """End a job of which one request failed, with all of its other requests."""
        running = [s.request for s in job.sequences if s.request in self._live]
        self._engine.abort_request(running)
        for request in running:
            del self._live[request]
        self._finish(job, failure)

    def _stop(self, job: Job) -> None:
        running = [s for s in job.sequences if s.reason is None and s.request in self._live]
        self._engine.abort_request([s.request for s in running])
        for sequence in running:
            sequence.reason = "abort"
            del self._live[sequence.request]
        self._end_if_over(job)

    def _receive(self, output: Any) -> None:
        # It was aborted while it was computed.
        if output.request_id not in self._live:
            return
        sequence, job = self._live[output.request_id]
        (new,) = output.outputs
        sequence.tokens += new.token_ids
        sequence.log_probs += new.logprobs.logprobs
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

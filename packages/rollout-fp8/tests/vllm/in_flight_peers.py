"""Functions that the tests of syncs during generation call in ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_peers import DEVICE, error_of, opened

from engine_api.errors import EngineError
from engine_api.rollout import Completion, SamplingParams, SyncResult
from engine_conformance.cases._rollouts import export_of

DEADLINE_S = 200.0
SAMPLED = SamplingParams(max_new_tokens=60, seed=3)
# Its prefix fills blocks of vLLM's cache, also on a CPU, where a block has 128 tokens.
PROMPT: tuple[int, ...] = tuple(3 + 7 * i % 200 for i in range(300))
SHORT: tuple[int, ...] = (9, 8, 7)


@contextmanager
def stopped_at(rollout: Any, tokens: int) -> Iterator[threading.Event]:
    """Yield an event that is set when an unfinished completion has so many tokens.

    The thread that generates then waits for a pause, so that in this process the pause comes at
    that token.
    """
    stepper = rollout._stepper
    receive = stepper._receive
    reached = threading.Event()

    def receive_and_wait(output: Any) -> None:
        receive(output)
        if reached.is_set() or not any(
            len(sequence.tokens) >= tokens for sequence, _ in stepper._live.values()
        ):
            return
        reached.set()
        _wait_for(lambda: stepper._pausing)

    stepper._receive = receive_and_wait
    yield reached
    del stepper._receive


def _wait_for(holds: Any) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.001)


def updated(
    model: str, other: str, prompts: Sequence[Sequence[int]], **arguments: Any
) -> tuple[list[Completion], list[Completion], SyncResult, SyncResult]:
    """Return completions during which ``other``'s weights come, and one that is begun after it.

    And the result of that sync, and of one while nothing is generated.
    """
    # An engine in another process goes on until it hears of the pause.
    apart = arguments.get("executor") == "workers"
    sampling = replace(SAMPLED, max_new_tokens=200) if apart else SAMPLED
    with opened(model, in_flight=True, **arguments) as rollout:
        with stopped_at(rollout, 2 if apart else 20) as reached:
            running = [rollout.submit(prompt, sampling) for prompt in prompts]
            assert reached.wait(DEADLINE_S)
            during = rollout.update_weights(export_of(Path(other), DEVICE), 2)
        found = [one for job in running for one in job.result(DEADLINE_S)]
        fresh = rollout.submit(prompts[0], SAMPLED).result(DEADLINE_S)
        idle = rollout.update_weights(export_of(Path(model), DEVICE), 3)
        return found, fresh, during, idle


def troubled(model: str, other: str) -> dict[str, Any]:
    """Run failing syncs, aborts and calls that are refused while completions are unfinished."""
    said: dict[str, Any] = {}
    with opened(model, in_flight=True, batch_size=2) as rollout:
        # A sync that fails, with a completion that waits for a place.
        with stopped_at(rollout, 5) as reached:
            running = [rollout.submit(SHORT, SAMPLED) for _ in range(3)]
            assert reached.wait(DEADLINE_S)
            said["sync"] = error_of(rollout.update_weights, _half(other), 2)
        said["lost"] = [error_of(job.result, DEADLINE_S) for job in running]
        said["unready"] = error_of(rollout.submit, SHORT, SAMPLED)
        rollout.update_weights(export_of(Path(other), DEVICE), 3)
        said["after"] = rollout.generate([SHORT], SAMPLED)

        # An abort while the weights are installed, and other calls.
        with stopped_at(rollout, 5) as reached:
            aborted, kept = (rollout.submit(SHORT, SAMPLED) for _ in range(2))
            assert reached.wait(DEADLINE_S)
            aborting = threading.Thread(target=aborted.abort)

            def export() -> Iterator[Any]:
                said["submit"] = error_of(rollout.submit, SHORT, SAMPLED)
                said["sleep"] = error_of(rollout.sleep)
                aborting.start()
                _wait_for(lambda: rollout._stepper._calls)
                yield from export_of(Path(model), DEVICE)

            rollout.update_weights(export(), 4)
        said["aborted"] = aborted.result(DEADLINE_S)
        said["kept"] = kept.result(DEADLINE_S)
        aborting.join()
        # The other threads' ``generate`` is paused likewise.
        with stopped_at(rollout, 5) as reached:
            found: list[Completion] = []
            thread = threading.Thread(
                target=lambda: found.extend(rollout.generate([SHORT], SAMPLED))
            )
            thread.start()
            assert reached.wait(DEADLINE_S)
            rollout.update_weights(export_of(Path(other), DEVICE), 5)
            thread.join()
        said["generated"] = found
    return said


def _half(model: str) -> Iterator[Any]:
    """Yield some of a model's tensors."""
    tensors = list(export_of(Path(model), DEVICE))
    yield from tensors[: len(tensors) // 2]


def refused_with(model: str, **arguments: Any) -> EngineError | None:
    """Return the error of making a rollout with these arguments."""

    def make() -> None:
        with opened(model, version=None, **arguments):
            pass

    return error_of(make)

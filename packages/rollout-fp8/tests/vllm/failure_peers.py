"""Functions that test_failures.py calls in ranks: failed generations, and engines that are gone."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm_peers import DEVICE, GREEDY, LONG, PROMPTS, SAMPLED, error_of, opened

from engine_api.config import ModelSource
from engine_api.rollout import SamplingParams
from engine_conformance.cases._rollouts import export_of


def interrupted(model: str) -> list[tuple[str, bool]]:
    """Return, for any error in the waiting thread, the error of ``generate`` and what continued."""
    from rollout_fp8.vllm.generation import Job

    seen: list[tuple[str, bool]] = []
    with opened(model) as rollout:
        for kind in (KeyboardInterrupt, asyncio.CancelledError, SystemExit, ZeroDivisionError):
            with mock.patch.object(Job, "result", side_effect=kind):
                try:
                    rollout.generate(PROMPTS, LONG)
                except BaseException as error:  # noqa: BLE001 - looked at
                    seen.append(
                        (
                            type(error).__name__,
                            rollout._stepper.busy or rollout._engine.has_unfinished_requests(),
                        )
                    )
        # These are refused while tokens are generated.
        rollout.update_weights(export_of(Path(model), DEVICE), 2)
        assert rollout.generate(PROMPTS, GREEDY)
    return seen


def failed_steps(model: str) -> tuple[list[Any], bool]:
    """Return the errors of an engine whose step fails, and whether anything stays scheduled."""
    with opened(model) as rollout:
        with mock.patch.object(rollout._engine, "step", side_effect=SystemExit("no step")):
            first = error_of(rollout.submit(PROMPTS[0], LONG).result, 30)
        calls = [
            lambda: rollout.generate(PROMPTS, GREEDY),
            rollout.sleep,
            rollout.wake_up,
            lambda: rollout.update_weights(export_of(Path(model), DEVICE), 2),
        ]
        return [
            first,
            *(error_of(call) for call in calls),
        ], rollout._engine.has_unfinished_requests()


def not_finite(model: str) -> list[Any]:
    """Return the errors of ``generate`` and ``submit`` with a model that computes NaN."""
    with opened(model) as rollout, _spoilt(rollout):
        return [
            error_of(rollout.generate, PROMPTS, SAMPLED),
            error_of(rollout.submit(PROMPTS[0], SAMPLED).result, 60),
        ]


@contextmanager
def _spoilt(rollout: Any) -> Iterator[None]:
    (served,) = rollout._engine.collective_rpc("get_model")
    compute = type(served).compute_logits
    served.compute_logits = lambda *args, **kwargs: compute(served, *args, **kwargs) * float("nan")
    try:
        yield
    finally:
        del served.compute_logits


def temperatures(model: str) -> dict[tuple[bool, float], Any]:
    """Return each temperature's error or least log-prob, with ``truncation`` and without it."""
    said: dict[tuple[bool, float], Any] = {}
    for truncation in (True, False):
        with opened(model, truncation=truncation) as rollout:
            for temperature in (0.0, 1e-6, 0.005, 0.01, 2.0, 3.0):
                asked = SamplingParams(max_new_tokens=4, seed=3, temperature=temperature)
                try:
                    drawn = rollout.generate(PROMPTS, asked)
                    said[truncation, temperature] = min(min(c.log_probs) for c in drawn)
                except Exception as error:  # noqa: BLE001 - looked at; in words, for errors hold the frames that they passed
                    said[truncation, temperature] = f"{type(error).__name__}: {error}"
    return said


def killed(model: str, *, parallel: int, busy: bool) -> list[Any]:
    """Kill the last worker of a server in its own processes, and return each later call's error.

    ``busy``: it generates meanwhile.
    """
    said: list[Any] = []
    with opened(model, executor="workers", tensor_parallel_size=parallel) as rollout:
        # vLLM's client serves one thread: while a request runs, that is the rollout's own.
        worker, _ = rollout._engine.collective_rpc("rollout_fp8_processes")[-1]
        running = rollout.submit(PROMPTS[0], LONG) if busy else None
        os.kill(worker, signal.SIGKILL)
        calls = [
            *([lambda: running.result(None)] if running is not None else []),
            lambda: rollout.update_weights(export_of(Path(model), DEVICE), 2),
            lambda: rollout.generate(PROMPTS, GREEDY),
            rollout.sleep,
        ]
        said += [error_of(call) for call in [*calls, rollout.close]]
    return said


def refused_requests(model: str) -> tuple[list[list[list[int]]], Any, bool, bool]:
    """Return the results of odd requests and of refused ones.

    They are tokens without stop tokens and with some that no vocabulary has, the error of a job of
    which vLLM refuses a request, whether another job continues, and whether anything is scheduled
    once that was aborted.
    """
    with opened(model) as rollout:
        odd = replace(GREEDY, stop_token_ids=(10**6, -1))
        tokens = [[c.tokens for c in rollout.generate(PROMPTS, asked)] for asked in (GREEDY, odd)]
        beside = rollout.submit(PROMPTS[0], LONG)
        # The class alone, because an error would hold the frames that it passed.
        second = [
            mock.DEFAULT,
            ValueError,
        ]
        with mock.patch.object(
            rollout._engine, "add_request", wraps=rollout._engine.add_request, side_effect=second
        ):
            error = error_of(rollout.generate, PROMPTS, GREEDY)
        goes_on = not beside.done()
        beside.abort()
        return (
            tokens,
            error,
            goes_on,
            rollout._engine.has_unfinished_requests() or rollout._stepper.busy,
        )


def worker_errors(model: str) -> tuple[Any, bool]:
    """Return the error of a sync whose plan one of vLLM's processes cannot take.

    And whether a good one is served afterwards.
    """
    from rollout_fp8.vllm import sync

    with opened(model, executor="workers") as rollout:
        rollout._session.forget()
        with mock.patch.object(sync, "encode", return_value=b"no plan"):
            error = error_of(rollout.update_weights, export_of(Path(model), DEVICE), 2)
        rollout.update_weights(export_of(Path(model), DEVICE), 2)
        return error, bool(rollout.generate(PROMPTS, GREEDY))


def interrupted_start(model: str) -> tuple[list[str], list[str]]:
    """Return the processes and threads that an interrupted start left once vLLM was up."""
    from rollout_fp8.vllm import rollout

    # A test before may have killed what a thread waits for.
    before = {*threading.enumerate(), *multiprocessing.active_children()}
    with mock.patch.object(rollout, "processes_of", side_effect=KeyboardInterrupt):
        try:
            with opened(model, executor="workers"):
                pass
        except KeyboardInterrupt:
            pass
    threads = [
        one.name
        for one in threading.enumerate()
        if one.name.startswith("vllm") and one not in before
    ]
    return [one.name for one in multiprocessing.active_children() if one not in before], threads


def failed_starts(model: str) -> list[Any]:
    """Return the errors of starts that vLLM ends with any error, or that are interrupted."""
    from rollout_fp8.options import VllmOptions
    from rollout_fp8.vllm import start

    plan = start.Plan(
        device=torch.device("cpu"),
        model=ModelSource(path=model),
        dtype="float32",
        max_num_seqs=1,
        options=VllmOptions(executor="workers"),
        tied=False,
    )
    said: list[Any] = []
    for kind in (KeyError("no such architecture"), AttributeError("a bug"), KeyboardInterrupt()):
        with mock.patch.object(start.vllm.LLMEngine, "from_engine_args", side_effect=kind):
            try:
                start.start(plan)
            except BaseException as error:  # noqa: BLE001 - looked at
                said.append(error.with_traceback(None))
    return said


class GivesUp:
    """Engine with vLLM's interface that ends the second of its requests for a reason of its own."""

    def __init__(self, reason: str) -> None:
        self.reason, self.scheduled = reason, list[str]()

    def add_request(self, request: str, *_: Any, **__: Any) -> None:
        self.scheduled.append(request)

    def abort_request(self, requests: list[str]) -> None:
        self.scheduled = [request for request in self.scheduled if request not in requests]

    def step(self) -> list[Any]:
        if len(self.scheduled) != 3:
            return []
        request = self.scheduled.pop(1)
        told = SimpleNamespace(
            token_ids=[], logprobs=SimpleNamespace(logprobs=[]), finish_reason=self.reason
        )
        return [SimpleNamespace(request_id=request, outputs=[told], finished=True)]


def given_up() -> list[tuple[Any, list[str]]]:
    """Return for each reason the job's error, and the requests that stay scheduled."""
    import vllm

    from rollout_fp8.vllm.generation import Job, Stepper

    said: list[tuple[Any, list[str]]] = []
    for reason in ("error", "repetition", "abort"):
        engine: Any = GivesUp(reason)
        stepper = Stepper(engine, torch.device("cpu"))
        job = Job(stepper)
        for index in range(3):
            job.add(index, (5,), vllm.SamplingParams())
        stepper.enter(job)
        said.append((error_of(job.result, 30), engine.scheduled))
        stepper.close()
    return said

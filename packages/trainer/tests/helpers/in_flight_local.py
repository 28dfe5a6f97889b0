"""A rollout that takes weights while it generates: ``local``, a token at a time in threads."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from ray_faults import NAME

from engine_api.errors import RolloutError
from engine_api.registry import RolloutRegistry
from engine_trainer.rollouts.local import LocalRollout

BACKEND = "local-in-flight"
TOKEN_S = 0.02  # so that weights come in the middle of completions


class _Running:
    """The completions of one prompt, each generated up to its end before the next one."""

    def __init__(self, rollout, prompt, sampling) -> None:
        self._rollout, self._prompt, self._sampling = rollout, list(prompt), sampling
        self._found, self._over = [], threading.Event()
        self.failure: RolloutError | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def done(self) -> bool:
        return self._over.is_set()

    def result(self, timeout_s=None):
        if not self._over.wait(timeout_s):
            raise TimeoutError
        if self.failure is not None:
            raise self.failure
        return self._found

    def _run(self) -> None:
        try:
            for place in range(self._sampling.n):
                self._found.append(self._complete(place))
        except RolloutError as error:
            self.failure = self.failure or error
        self._over.set()

    def _complete(self, place: int):
        whole = None
        while whole is None or (
            whole.finish_reason != "stop" and len(whole.tokens) < self._sampling.max_new_tokens
        ):
            time.sleep(TOKEN_S)
            begun = [] if whole is None else whole.tokens
            seed = (self._sampling.seed or 0) + 1000 * place + len(begun)
            one = replace(self._sampling, n=1, max_new_tokens=1, seed=seed)
            with self._rollout.lock:
                if self.failure is not None:
                    raise self.failure
                (next_token,) = self._rollout.generate([[*self._prompt, *begun]], one)
                self._rollout.tokens_generated += len(next_token.tokens)
            whole = (
                next_token
                if whole is None
                else replace(
                    next_token,
                    tokens=[*begun, *next_token.tokens],
                    log_probs=[*whole.log_probs, *next_token.log_probs],
                    weight_versions=[*whole.weight_versions, *next_token.weight_versions],
                )
            )
        return whole


class InFlightLocal(LocalRollout):
    def __init__(self, *, in_flight: bool = False, **arguments) -> None:
        super().__init__(**arguments)
        assert in_flight
        self.lock = threading.Lock()
        self.tokens_generated = 0
        self._running: list[_Running] = []

    def submit(self, prompt, sampling) -> _Running:
        self._running = [one for one in self._running if not one.done()]
        self._running.append(_Running(self, prompt, sampling))
        return self._running[-1]

    def update_weights(self, export, version):
        with self.lock:
            try:
                return super().update_weights(export, version)
            except BaseException:
                for one in self._running:
                    one.failure = RolloutError("lost in a sync", where="local", remedy="none")
                raise


def register() -> None:
    RolloutRegistry.register(backend=BACKEND, device="cpu", in_flight=True)(InFlightLocal)


# A worker is given this module to import (``ray.imports``). A test registers it for itself.
if NAME:
    register()

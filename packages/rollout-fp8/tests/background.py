"""Rollout that generates in the background as long as a test likes, without a model."""

from __future__ import annotations

import threading

from engine_api.rollout import Completion


class Background:
    """Rollout that generates in the background as long as a test likes."""

    weight_version = 3

    def __init__(self) -> None:
        self.go, self.aborted = threading.Event(), threading.Event()

    def generate(self, prompts, sampling):
        raise KeyError("a bug")

    def update_weights(self, export, version): ...
    def sleep(self, weights=True, kv_cache=True): ...
    def wake_up(self, weights=True, kv_cache=True): ...
    def close(self): ...

    def submit(self, prompt, sampling):
        self.prompt, self.sampling = prompt, sampling
        return self

    def done(self):
        return self.go.is_set()

    def result(self, timeout_s=None):
        if not self.go.wait(timeout_s):
            raise TimeoutError
        reason = "abort" if self.aborted.is_set() else "stop"
        return [
            Completion(
                prompt_index=0,
                tokens=[7],
                log_probs=[-0.5],
                weight_versions=[3],
                finish_reason=reason,
            )
        ]

    def abort(self):
        self.aborted.set()
        self.go.set()

"""A scripted rollout, and what its tests ask it: shared by the tests of agents."""

from __future__ import annotations

import threading
import time

from waiting import NEVER_S

from engine_api.rollout import Completion, SamplingParams
from engine_trainer.data import Prompt


class Scripted:
    """A model that replies with a script's texts by turn, and records its prompts.

    All prompts get the same replies.
    """

    weight_version = 4

    def __init__(self, tokenizer, *texts, seconds=0.0):
        self.tokenizer, self.texts, self.seconds = tokenizer, texts, seconds
        self.batches, self.asked = [], {}

    def complete(self, prompt, sampling):
        turn = sum(
            list(prompt[: len(p)]) == list(p)
            for p in self.asked.get("all", [])
            if len(p) < len(prompt)
        )
        self.asked.setdefault("all", []).append(list(prompt))
        text = self.texts[min(turn, len(self.texts) - 1)]
        tokens = [*self.tokenizer.encode_text(text), self.tokenizer.eos_token_id][
            : sampling.max_new_tokens
        ]
        stopped = tokens[-1] == self.tokenizer.eos_token_id
        return tokens, [-0.5] * len(tokens), "stop" if stopped else "length"

    def generate(self, prompts, sampling):
        time.sleep(self.seconds)
        self.batches.append(([list(p) for p in prompts], sampling))
        return [
            Completion(
                prompt_index=i,
                tokens=t,
                log_probs=v,
                weight_versions=[4] * len(t),
                finish_reason=r,
                passes=2,
            )
            for i, (t, v, r) in enumerate(self.complete(p, sampling) for p in prompts)
        ]


class Submitting(Scripted):
    """A ``Scripted`` model that replies in the background, with one thread per request.

    ``aborts`` first parts end with ``abort`` after two tokens. Turns end only after ``together`` of
    them have been requested concurrently.
    """

    def __init__(self, *args, aborts=0, seconds=0.0, together=0):
        super().__init__(*args)
        self.together, self.waiting = together, []
        self.delay, self.aborts, self.submitted, self.aborted, self.lock = (
            seconds,
            aborts,
            [],
            [],
            threading.Lock(),
        )

    def update_weights(self, export, version): ...
    def sleep(self, weights=True, kv_cache=True): ...
    def wake_up(self, weights=True, kv_cache=True): ...
    def close(self): ...

    def submit(self, prompt, sampling):
        with self.lock:
            self.submitted.append((list(prompt), sampling))
            cut = len(self.submitted) <= self.aborts
            (one,) = Scripted.generate(self, [prompt], sampling) if not cut else [None]
        if cut:
            tokens = self.tokenizer.encode_text(self.texts[0])[:2]
            one = Completion(
                prompt_index=0,
                tokens=tokens,
                log_probs=[-1.0] * 2,
                weight_versions=[3] * 2,
                finish_reason="abort",
                passes=1,
            )
        if not self.together:
            return Job(one, self.delay, self.aborted)
        with self.lock:
            self.waiting.append(made := Job(one, NEVER_S, self.aborted))
            if len(self.waiting) == self.together:
                for job in self.waiting:
                    job.over.set()
                self.waiting = []
        return made


class Job:
    def __init__(self, completion, seconds, aborted):
        self.completion, self.over, self.aborted = completion, threading.Event(), aborted
        timer = threading.Timer(seconds, self.over.set)
        timer.daemon = True  # one that nothing waits for keeps no process
        timer.start()

    def done(self):
        return self.over.is_set()

    def result(self, timeout_s=None):
        self.over.wait(timeout_s)
        return [self.completion]

    def abort(self):
        self.aborted.append(self)
        self.over.set()


def prompts(chat, *texts) -> list[Prompt]:
    found = []
    for text in texts:
        rendered = f"<|bos|><|user|>{text}<|assistant|>"
        found.append(
            Prompt(tokens=chat.encode_text(rendered), rendered=rendered, text=text, answer="a")
        )
    return found


def sampling(n=1, max_new_tokens=200, seed=0, **more):
    return SamplingParams(n=n, max_new_tokens=max_new_tokens, seed=seed, **more)

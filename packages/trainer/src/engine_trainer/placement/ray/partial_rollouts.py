"""Generation in slices, so that weights may change after each slice.

A completion continues with the new weights. A slice is an ordinary ``generate``, whose prompt
includes the tokens so far: any rollout can do it, and a completion's tokens carry the versions that
made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine_api.rollout import Completion, SamplingParams
from engine_trainer.agent.generators import ABORTS, empty_slices_error
from engine_trainer.data import Prompt
from engine_trainer.placement.replica import Replica, ScoredCompletion
from engine_trainer.utils.completions import require_completions
from engine_trainer.utils.experts import join_experts


@dataclass(kw_only=True)
class _Task:
    """A prompt with its completions so far."""

    key: int
    prompt: Prompt
    completions: list[Completion] = field(default_factory=list[Completion])
    empty: int = 0
    """Number of slices of a completion that gave no token."""


class PartialRollouts:
    """The groups that one replica is generating.

    Args:
        sampling: parameters of whole completions; its seed is not read.
        slice_tokens: maximum number of tokens per completion and call.
    """

    def __init__(self, replica: Replica, sampling: SamplingParams, slice_tokens: int) -> None:
        self._replica = replica
        self._sampling = sampling
        self._slice = slice_tokens
        self._tasks: list[_Task] = []

    def advance(
        self, new: Sequence[tuple[int, Prompt]], seed: int
    ) -> list[tuple[int, list[ScoredCompletion]]]:
        """Generate one slice of everything, and return the complete groups, scored, by key.

        ``new`` groups are included.

        Raises ``RolloutError``, ``RewardError``.
        """
        begun = [_Task(key=key, prompt=prompt) for key, prompt in new]
        with self._replica.timers.phase("generate"):
            self._continue(seed)
            self._begin(begun, seed)
        self._tasks += begun
        done = [
            t for t in self._tasks if not any(c.finish_reason == "abort" for c in t.completions)
        ]
        self._tasks = [
            t for t in self._tasks if any(c.finish_reason == "abort" for c in t.completions)
        ]
        for task in self._tasks:
            if task.empty >= ABORTS * self._sampling.n:
                raise empty_slices_error(task.empty)
        with self._replica.timers.phase("reward"):
            return [
                (t.key, self._replica.score([t.prompt] * len(t.completions), t.completions))
                for t in done
            ]

    def close(self) -> None:
        """Do nothing, because nothing runs between two calls."""

    def _begin(self, tasks: Sequence[_Task], seed: int) -> None:
        if not tasks:
            return
        limit = min(self._slice, self._sampling.max_new_tokens)
        found = self._replica.rollout.generate(
            [t.prompt.tokens for t in tasks],
            replace(self._sampling, max_new_tokens=limit, seed=seed),
        )
        require_completions(found, range(len(tasks)), self._sampling.n)
        for completion in found:
            tasks[completion.prompt_index].completions.append(self._cut(completion))

    def _continue(self, seed: int) -> None:
        """Continue the unfinished completions.

        Those with equally many tokens left are in one call.
        """
        unfinished = [
            (t, i)
            for t in self._tasks
            for i, c in enumerate(t.completions)
            if c.finish_reason == "abort"
        ]
        by_limit: dict[int, list[tuple[_Task, int]]] = {}
        for task, i in unfinished:
            left = self._sampling.max_new_tokens - len(task.completions[i].tokens)
            by_limit.setdefault(min(self._slice, left), []).append((task, i))
        for limit, tasks in sorted(by_limit.items()):
            prefixes = [[*task.prompt.tokens, *task.completions[i].tokens] for task, i in tasks]
            found = self._replica.rollout.generate(
                prefixes, replace(self._sampling, n=1, max_new_tokens=limit, seed=seed)
            )
            require_completions(found, range(len(tasks)), 1)
            for completion in found:
                task, i = tasks[completion.prompt_index]
                task.empty += not completion.tokens
                task.completions[i] = self._cut(_joined(task.completions[i], completion))

    def _cut(self, completion: Completion) -> Completion:
        """Mark a completion as unfinished (``abort``) if only its slice's limit ended it."""
        short = (
            completion.finish_reason == "length"
            and len(completion.tokens) < self._sampling.max_new_tokens
        )
        return replace(completion, finish_reason="abort") if short else completion


def _joined(first: Completion, rest: Completion) -> Completion:
    return replace(
        rest,
        prompt_index=first.prompt_index,
        tokens=[*first.tokens, *rest.tokens],
        log_probs=[*first.log_probs, *rest.log_probs],
        weight_versions=[*first.weight_versions, *rest.weight_versions],
        routed_experts=join_experts(first.routed_experts, rest.routed_experts),
        passes=first.passes + rest.passes,
    )

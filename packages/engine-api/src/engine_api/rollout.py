"""The contract of a rollout: it generates completions from the engine's weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from engine_api.weights import WeightExport

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How completions are drawn."""

    n: int = 1  # completions a prompt
    max_new_tokens: int = 256
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One completion.

    Attributes:
        prompt_index: which prompt it answers.
        tokens: generated ids, the stop token included.
        log_probs: one a token, of the sampled token under the distribution that it was drawn from
            (temperature applied; before top-p and top-k truncation).
        weight_versions: one a token, the version of the weights that made it.
        finish_reason: ``stop`` at a stop token, ``length`` at ``max_new_tokens``, ``abort``.
    """

    prompt_index: int
    tokens: list[int]
    log_probs: list[float]
    weight_versions: list[int]
    finish_reason: FinishReason


@runtime_checkable
class Rollout(Protocol):
    """What the trainer calls. Nothing else is called from outside."""

    weight_version: int

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Completion]:
        """``sampling.n`` completions a prompt, grouped by prompt. Raises ``RolloutError``."""
        ...

    def update_weights(self, export: WeightExport, version: int) -> None:
        """Install a whole export. Raises ``RolloutError`` and refuses to generate until a good one."""
        ...

    def sleep(self) -> None:
        """Give back the memory of weights and caches."""
        ...

    def wake_up(self) -> None:
        """Take it again; weights must be updated before the next ``generate``."""
        ...

    def close(self) -> None:
        """Give everything back; idempotent."""
        ...

"""What a rollout refuses before it generates or installs anything: the same for every rollout."""

from __future__ import annotations

from collections.abc import Sequence

from engine_api.errors import RolloutError
from engine_api.rollout import SamplingParams


def check_sampling(sampling: SamplingParams, where: str) -> None:
    """Raises ``RolloutError`` for values that make no sense."""
    ranges = {
        "n": sampling.n >= 1,
        "max_new_tokens": sampling.max_new_tokens >= 1,
        "temperature": sampling.temperature >= 0,
        "top_p": 0 < sampling.top_p <= 1,
        "top_k": sampling.top_k >= 0,
    }
    for name, fits in ranges.items():
        if not fits:
            raise RolloutError(
                f"{name}={getattr(sampling, name)}",
                where=where,
                remedy="n and max_new_tokens: at least 1; temperature and top_k: at least 0; top_p: above 0, at most 1",
            )


def check_prompts(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    where: str,
    *,
    vocabulary: int,
    limit: int | None,
    room: str,
    remedy: str,
) -> None:
    """Raises ``RolloutError`` that names the first prompt which cannot be answered.

    Args:
        prompts: token ids.
        max_new_tokens: that may follow each.
        where: the rollout, for the error.
        vocabulary: ids are below it.
        limit: tokens of a prompt with what follows; None: any number.
        room, remedy: what has that limit, and what to do about it, for the error.
    """
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise RolloutError(
                f"prompt {index} is empty", where=where, remedy="give it at least one token"
            )
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise RolloutError(
                f"prompt {index} has a token outside the vocabulary",
                where=where,
                why=f"ids are 0 to {vocabulary - 1}",
                remedy="use the model's own tokenizer",
            )
        if limit is not None and len(prompt) + max_new_tokens > limit:
            raise RolloutError(
                f"prompt {index} has {len(prompt)} tokens, and {max_new_tokens} may follow",
                where=where,
                why=room,
                remedy=remedy,
            )


def check_version(version: int, served: int, *, where: str) -> None:
    """Raises ``RolloutError`` for weights older than those that were ``served`` last (-1: none yet)."""
    if version < served:
        raise RolloutError(
            f"version {version} is stale",
            where=where,
            why=f"{served} was served before",
            remedy="sync the engine's current weights; after a return to a checkpoint create another rollout",
        )

"""Limits on the tokens of documents and prompts, so that completions fit in the context."""

from __future__ import annotations

from engine_api.config import ModelSource
from engine_api.errors import ConfigError
from engine_trainer.config.sections import RolloutSection, positive_option
from engine_trainer.utils.hf_models import text_config

# The options by which vLLM and SGLang name the context length that they serve.
SERVED = ("max_model_len", "context_length")


def positions_of(model: ModelSource) -> int | None:
    """Return the tokens of the model's context (``max_position_embeddings``), None if not set."""
    positions = getattr(text_config(model), "max_position_embeddings", None)
    return int(positions) if positions else None


def longest_prompt(
    model: ModelSource, rollout: RolloutSection, following: int | None = None
) -> int | None:
    """Return the tokens of the context that are left for a prompt, or None if no limit is known.

    The context is the model's positions, or less if the rollout's options say so.

    Args:
        model: the model whose positions count.
        rollout: the rollout whose options may lower the limit.
        following: tokens reserved after the prompt; None: ``rollout.max_new_tokens``.

    Raises:
        ConfigError: nothing is left for a prompt.
    """
    following = rollout.max_new_tokens if following is None else following
    limits = [positive_option(rollout, name) for name in SERVED if rollout.options.get(name)]
    positions = positions_of(model)
    limits += [positions] if positions else []
    if not limits:
        return None
    longest = min(limits) - following
    if longest < 1:
        raise ConfigError(
            "rollout.max_new_tokens",
            f"expected less than the context of {min(limits)} tokens, got {following}",
            why="nothing is left for a prompt",
            remedy=f"give less than {min(limits)}",
        )
    return longest

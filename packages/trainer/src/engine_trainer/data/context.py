"""How many tokens a document may have, and a prompt, so that the model's context holds its completion too."""

from __future__ import annotations

from engine_api.config import ModelSource
from engine_api.errors import ConfigError
from engine_trainer.config.sections import RolloutSection, positive_option
from engine_trainer.utils.hf_models import text_config

SERVED = (
    "max_model_len",
    "context_length",
)  # what vLLM and SGLang call the context that they serve


def positions_of(model: ModelSource) -> int | None:
    """Tokens of the model's context (``max_position_embeddings``); None where its configuration knows none."""
    positions = getattr(text_config(model), "max_position_embeddings", None)
    return int(positions) if positions else None


def room_for_prompts(
    model: ModelSource, rollout: RolloutSection, following: int | None = None
) -> int | None:
    """Tokens of the context beside ``following`` (default: ``rollout.max_new_tokens``); None where no limit is known.

    The context is the model's positions, or less where the rollout's options say so.

    Raises ``ConfigError`` when nothing is left.
    """
    following = rollout.max_new_tokens if following is None else following
    limits = [positive_option(rollout, name) for name in SERVED if rollout.options.get(name)]
    positions = positions_of(model)
    limits += [positions] if positions else []
    if not limits:
        return None
    room = min(limits) - following
    if room < 1:
        raise ConfigError(
            "rollout.max_new_tokens",
            f"{following} tokens may follow a prompt, the context has {min(limits)}",
            why="nothing is left for a prompt",
            remedy=f"give less than {min(limits)}",
        )
    return room

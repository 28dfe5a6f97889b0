"""The refusal of the parts of a run that see no images, where rows have some."""

from __future__ import annotations

from collections.abc import Sequence

from engine_api.errors import ConfigError
from engine_trainer.config import RLConfig
from engine_trainer.data import Prompt
from engine_trainer.placement.replica import require_vision


def check_pictured(config: RLConfig, prompts: Sequence[Prompt]) -> None:
    """Refuse the parts of a run that see no images, where a prompt has some.

    Raises ``ConfigError``, and ``UnsupportedCapability`` for a rollout that takes no images.
    """
    first = next((prompt for prompt in prompts if prompt.images is not None), None)
    if first is None:
        return
    algorithm = config.algorithm
    blind = {
        "algorithm.critic": (algorithm.critic is not None, "null", "a critic values text alone"),
        "algorithm.teacher": (algorithm.teacher is not None, "null", "a teacher reads text alone"),
        "agent": (config.agent is not None, "null", "an agent's turns are text alone"),
        "launcher": (config.launcher != "none", "none", "images do not travel to Ray's workers"),
    }
    for key, (is_set, expected, why) in blind.items():
        if is_set:
            raise ConfigError(
                key,
                f"expected {expected} for rows with images, as {first.file}:{first.number} is one",
                why=why,
                remedy=f"set {key}: {expected}, or remove the rows with images",
            )
    require_vision(config.rollout, prompts)

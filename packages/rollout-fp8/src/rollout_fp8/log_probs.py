"""What a server says of its draws, before anything is trained on it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine_api.errors import RolloutError
from engine_api.rollout import Completion


def require_finite(completions: Sequence[Completion], where: str) -> None:
    """Raises ``RolloutError`` that names the first token whose log-prob is none (NaN or infinite)."""
    for completion in completions:
        if math.isfinite(
            sum(completion.log_probs)
        ):  # a sum keeps NaN and infinities, and takes 4 ns a token
            continue
        place = next(i for i, value in enumerate(completion.log_probs) if not math.isfinite(value))
        raise RolloutError(
            f"prompt {completion.prompt_index}: token {place} was drawn with log-prob {completion.log_probs[place]}",
            where=where,
            why="the served model computes numbers that are not finite: the draw is of no distribution",
            remedy="look at the run's losses and gradient norms before this sync, and at what the server computes in: "
            "rollout.options.dtype=bfloat16 (float16 ends at 65504), rollout.quantization=none",
        )

"""Check of the log-probs that a server reports, before anything is trained on them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine_api.errors import RolloutError
from engine_api.rollout import Completion


def require_finite(completions: Sequence[Completion], where: str) -> None:
    """Raise ``RolloutError`` that names the first token whose log-prob is NaN or infinite."""
    for completion in completions:
        # A sum keeps NaN and infinities, and takes 4 ns a token.
        if math.isfinite(sum(completion.log_probs)):
            continue
        place = next(i for i, value in enumerate(completion.log_probs) if not math.isfinite(value))
        raise RolloutError(
            f"prompt {completion.prompt_index}: token {place} was drawn with log-prob "
            f"{completion.log_probs[place]}",
            where=where,
            why="the served model computes numbers that are not finite, "
            "so the draw follows no distribution",
            remedy="check the run's losses and gradient norms before this sync, and the "
            "dtype that the server computes in: rollout.options.dtype=bfloat16 (float16 "
            "ends at 65504), rollout.quantization=none",
        )

"""Check of a rollout's answer that all who generate rely on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine_api.errors import RolloutError
from engine_api.rollout import Completion


def require_completions(found: Sequence[Completion], indices: Sequence[int], n: int) -> None:
    """Raise ``RolloutError`` unless each of the prompts ``indices`` has ``n`` completions."""
    counts = Counter(completion.prompt_index for completion in found)
    for index in indices:
        if counts[index] != n:
            raise RolloutError(
                f"expected {n} completions of prompt {index} of the call, got {counts[index]}",
                where="rollout.generate",
                why="a rollout completes every prompt n times, also with an empty completion",
                remedy="correct the rollout; engine-conformance has cases for its generate",
            )

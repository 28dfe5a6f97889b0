"""Seeds of completions, for servers that accept one for each completion."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from engine_api.rollout import SamplingParams


def seeds(
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    images: Sequence[Sequence[str]] | None = None,
) -> list[list[int]]:
    """Return seeds ``[prompts][n]`` of 63 bits each.

    They are made of ``sampling.seed``, the prompt's tokens and images and the completion's index,
    so that a draw does not depend on the batch or the rank. A prompt that occurs twice gets other
    seeds the second time. ``seed=None`` takes entropy from the system.

    Args:
        prompts: the tokens of each prompt.
        sampling: the sampling settings.
        images: a digest for each image of each prompt; None: no prompt has any.
    """
    base = secrets.randbits(63) if sampling.seed is None else sampling.seed
    seen: dict[tuple[int | str, ...], int] = {}
    found: list[list[int]] = []
    for index, prompt in enumerate(prompts):
        key = (*prompt, *(() if images is None else images[index]))
        seen[key] = seen.get(key, -1) + 1
        digest = hashlib.sha256(repr((base, seen[key], key)).encode()).digest()
        first = int.from_bytes(digest[:8], "big") >> 1
        found.append([(first + place) % (1 << 63) for place in range(sampling.n)])
    return found

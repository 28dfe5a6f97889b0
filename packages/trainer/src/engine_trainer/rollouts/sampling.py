"""Drawing of tokens, with one uniform number per token known before the first forward pass.

A completion's numbers depend on the seed, its prompt's tokens and images, and its index among that
prompt's completions, and on nothing else. So a completion does not depend on the batch, the
rank or the world that it was generated in (as far as the logits do not), and no generator has a
state to be saved.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import torch

from engine_api.media import Media
from engine_api.rollout import SamplingParams

# Probabilities are integers, multiples of 1 / _ONE: their sums are exact, so that the choice is the
# same on every device and in every order.
_ONE = 1 << 40


def uniforms(
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    media: Sequence[Media | None] | None = None,
) -> torch.Tensor:
    """Return ``[prompts · n, max_new_tokens]`` float64 in [0, 1), rows grouped by prompt.

    Global generators stay untouched. A prompt that occurs twice, with the same images, gets
    different numbers the second time. ``seed=None`` takes entropy from the system.
    """
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    seen: dict[tuple[int | str, ...], int] = {}
    rows: list[torch.Tensor] = []
    for index, prompt in enumerate(prompts):
        shown = None if media is None else media[index]
        key = (*prompt,) if shown is None else (*prompt, _digest(shown))
        seen[key] = seen.get(key, -1) + 1
        digest = hashlib.sha256(repr((seed, seen[key], key)).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        rows.append(
            torch.rand(
                sampling.n, sampling.max_new_tokens, dtype=torch.float64, generator=generator
            )
        )
    return torch.cat(rows)


def _digest(media: Media) -> str:
    """Return the SHA-256 of images as the model takes them."""
    seconds = None if media.seconds is None else media.seconds.tolist()
    shown = media.grid.tolist() if seconds is None else [media.grid.tolist(), seconds]
    digest = hashlib.sha256(repr(shown).encode())
    digest.update(media.pixels.float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def draw(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    sampling: SamplingParams,
    banned: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row, by inversion of the cumulative distribution.

    Args:
        logits: ``[R, V]`` floating.
        uniform: ``[R]`` float64 in [0, 1).
        sampling: temperature (0: the likeliest token), top_k and top_p.
        banned: ids that are never drawn, such as those of images.

    Returns:
        ``[R]`` int64 tokens and ``[R]`` float32 log-probs: with the temperature (1 for greedy),
        before banned tokens, top-k and top-p.
    """
    greedy = sampling.temperature == 0
    log_probs = (logits.float() / (1.0 if greedy else sampling.temperature)).log_softmax(-1)
    allowed = log_probs if banned is None else log_probs.index_fill(-1, banned, -torch.inf)
    if greedy:
        tokens = allowed.argmax(-1)
    else:
        counts = (truncate(allowed, sampling).exp().double() * _ONE).long().cumsum(-1)
        total = counts[:, -1]
        # The first token whose cumulative count exceeds the threshold; a token without probability
        # never does.
        threshold = (uniform * total).long().clamp(max=total - 1)
        tokens = torch.searchsorted(counts, threshold[:, None], right=True).squeeze(-1)
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)


def truncate(log_probs: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Return log-probs with ``-inf`` outside the ``top_k`` likeliest tokens and the nucleus.

    The nucleus is the fewest tokens with ``top_p`` mass.
    """
    if 0 < sampling.top_k < log_probs.shape[-1]:
        least = log_probs.topk(sampling.top_k, dim=-1).values[:, -1:]
        log_probs = log_probs.masked_fill(log_probs < least, -torch.inf)
    if sampling.top_p < 1.0:
        # After top_k, as in transformers and vLLM: the nucleus is of what top_k left.
        ordered, order = log_probs.softmax(-1).sort(dim=-1, descending=True, stable=True)
        outside = ordered.cumsum(-1) - ordered >= sampling.top_p
        outside[:, 0] = False
        log_probs = log_probs.masked_fill(
            torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf
        )
    return log_probs

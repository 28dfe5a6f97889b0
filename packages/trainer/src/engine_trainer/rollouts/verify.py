"""A check, at the first weights, that cached generation agrees with the model itself.

It compares the log-probs of cached generation from padded prompts with the model's own. It catches
what no list of families can: states that padding reaches, caches that are not repeated, layers that
look ahead, code of a family that fails. Defects that only long texts show have checks of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine_api.errors import EngineError, RolloutError
from engine_api.hf_vision import build_arguments, draw_image
from engine_api.media import Media
from engine_api.rollout import SamplingParams
from engine_trainer.rollouts.decode import decode
from engine_trainer.rollouts.images import VisionInputs
from engine_trainer.rollouts.sampling import uniforms

_PROMPTS = (4, 2, 3)  # lengths: two are padded
_SAMPLING = SamplingParams(n=2, max_new_tokens=4, seed=0)

# Largest difference in nats, for log-probs of ordinary size; float32 agrees to about 1e-5.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}

Batches = Callable[[Sequence[Sequence[int]], int], Sequence[Sequence[int]]]


def count_positions(vision: VisionInputs | None) -> int:
    """Return the number of positions that the check needs."""
    drawn = _draw_prompts(2, vision)[0]
    return max(map(len, drawn)) + _SAMPLING.max_new_tokens


def verify_generation(
    model: Any,
    vocabulary: int,
    dtype: torch.dtype,
    where: str,
    batches: Batches,
    vision: VisionInputs | None = None,
) -> bool:
    """Raise ``RolloutError`` where generated log-probs are not the model's own.

    Args:
        model: with weights that are in use.
        vocabulary: ids are below it.
        dtype: dtype of the computation.
        where: the rollout, for the error.
        batches: returns which of some prompts the rollout generates for at the same time, given how
            many completions each has.
        vision: the model's side of images, with which one more prompt has one; None: no tower.

    Returns False where weights that are not finite leave nothing to compare, else True.
    """
    family = type(model).__name__
    try:
        worst, scale = _difference(model, vocabulary, batches, vision)
    except EngineError:
        raise
    except Exception as error:
        # The family's own code may not support a cache and a padding mask.
        raise RolloutError(
            f"{family} cannot generate here",
            where=where,
            why=f"{type(error).__name__}: {error}",
            remedy="use another rollout for this model family",
        ) from error
    if not math.isfinite(scale):
        return False
    if not worst <= _TOLERANCE[dtype] * max(1.0, scale):
        raise RolloutError(
            f"{family} cannot be served",
            where=where,
            why="tokens that it generates from padded prompts have log-probs "
            f"{worst:.3g} nats from the model's own",
            remedy="use another rollout for this model family",
        )
    return True


def _draw_prompts(
    vocabulary: int, vision: VisionInputs | None
) -> tuple[list[list[int]], list[Media | None]]:
    """Return random prompts, with one more that has an image where the model takes images."""
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(vocabulary, (length,), generator=generator).tolist() for length in _PROMPTS
    ]
    if vision is None:
        return prompts, [None] * len(prompts)
    special = vision.banned.tolist()
    plain = next(id_ for id_ in range(len(special) + 1) if id_ not in special)
    prompts = [[plain if id_ in special else id_ for id_ in prompt] for prompt in prompts]
    media = draw_image(vision.vision, generator)
    run = vision.vision.count_features(media.grid[0].tolist())
    pictured = [*prompts[1], *[vision.vision.image_token] * run, *prompts[2]]
    return [*prompts, pictured], [*[None] * len(prompts), media]


@torch.inference_mode()
def _difference(
    model: Any, vocabulary: int, batches: Batches, vision: VisionInputs | None
) -> tuple[float, float]:
    """Return the largest difference and the largest size of some tokens' log-probs."""
    prompts, media = _draw_prompts(vocabulary, vision)
    # Some rows end early, and are dropped from the batch.
    stop = list(range(0, vocabulary, 4))
    worst = 0.0
    size = 0.0
    for batch in batches(prompts, _SAMPLING.n):
        some = [prompts[index] for index in batch]
        shown = [media[index] for index in batch]
        numbers = uniforms(some, _SAMPLING)
        decoded = decode(model, some, _SAMPLING, numbers, stop, 0, vision=vision, shown=shown)
        for row, length in enumerate(decoded.lengths.tolist()):
            prompt = row // _SAMPLING.n
            ids = torch.tensor([*some[prompt], *decoded.tokens[row, :length].tolist()])
            scores = _score(model, ids.to(model.device), shown[prompt], vision).cpu()
            want = scores[:-1].gather(-1, ids[1:, None])[-length:, 0]
            worst = max(worst, float((decoded.log_probs[row, :length] - want).abs().max()))
            size = max(size, float(want.abs().max().nan_to_num(nan=math.inf)))
    return worst, size


def _score(
    model: Any, ids: torch.Tensor, media: Media | None, vision: VisionInputs | None
) -> torch.Tensor:
    """Return the log-probs ``[n, V]`` of the model's own forward pass, without a cache."""
    arguments = {"input_ids": ids[None]}
    if vision is not None and media is not None:
        arguments = build_arguments(vision.vision, ids, media)
        arguments["pixel_values"] = arguments["pixel_values"].to(model.dtype)
    return model(**arguments, use_cache=False).logits[0].float().log_softmax(-1)

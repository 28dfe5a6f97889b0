"""At the first weights: does cached generation beside padded prompts give the log-probs that the model itself does?

Catches what no list of families can: states that padding reaches, caches that are not repeated, layers that look ahead,
code of a family that fails. What only long texts show has checks of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine_api.errors import EngineError, RolloutError
from engine_api.rollout import SamplingParams
from engine_trainer.rollouts.decode import decode
from engine_trainer.rollouts.sampling import uniforms

_PROMPTS = (4, 2, 3)  # lengths: two are padded
_SAMPLING = SamplingParams(n=2, max_new_tokens=4, seed=0)
POSITIONS = max(_PROMPTS) + _SAMPLING.max_new_tokens

# Largest difference in nats, for log-probs of ordinary size; float32 agrees to about 1e-5.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}


Batches = Callable[[Sequence[Sequence[int]], int], Sequence[Sequence[int]]]


def verify_generation(
    model: Any, vocabulary: int, dtype: torch.dtype, where: str, batches: Batches
) -> bool:
    """Raise ``RolloutError`` where generated log-probs are not the model's own.

    Args:
        model: with weights that are in use.
        vocabulary: ids are below it.
        dtype: of the computation.
        where: the rollout, for the error.
        batches: which of some prompts the rollout generates for at the same time, given how many completions each has.

    Returns whether that could be seen: weights that are not finite tell nothing.
    """
    family = type(model).__name__
    try:
        worst, scale = _difference(model, vocabulary, batches)
    except EngineError:
        raise
    except (
        Exception
    ) as error:  # the family's own code, on a cache and a padding mask that it may not know
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
            why=f"what it generates from padded prompts has log-probs {worst:.3g} nats from the model's own",
            remedy="use another rollout for this model family",
        )
    return True


@torch.inference_mode()
def _difference(model: Any, vocabulary: int, batches: Batches) -> tuple[float, float]:
    """Return the largest difference, and the largest size, of log-probs of a few generated tokens."""
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(vocabulary, (length,), generator=generator).tolist() for length in _PROMPTS
    ]
    stop = range(0, vocabulary, 4)  # some rows end early, and are dropped from the batch
    worst = 0.0
    size = 0.0
    for batch in batches(prompts, _SAMPLING.n):
        some = [prompts[index] for index in batch]
        decoded = decode(model, some, _SAMPLING, uniforms(some, _SAMPLING), list(stop), 0)
        for row, length in enumerate(decoded.lengths.tolist()):
            ids = torch.tensor([*some[row // _SAMPLING.n], *decoded.tokens[row, :length].tolist()])
            scores = (
                model(input_ids=ids[None].to(model.device), use_cache=False)
                .logits[0]
                .float()
                .log_softmax(-1)
                .cpu()
            )
            want = scores[:-1].gather(-1, ids[1:, None])[-length:, 0]
            worst = max(worst, float((decoded.log_probs[row, :length] - want).abs().max()))
            size = max(size, float(want.abs().max().nan_to_num(nan=math.inf)))
    return worst, size

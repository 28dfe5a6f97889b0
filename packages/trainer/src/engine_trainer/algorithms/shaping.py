"""DAPO's shaping of rewards and groups (arXiv:2503.14476, sections 3.2 and 3.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_api.errors import ConfigError
from engine_trainer.algorithms.advantages import is_flat

if TYPE_CHECKING:
    import torch


def overlong_penalty(
    lengths: torch.Tensor, *, max_length: int, buffer: int, factor: float = 1.0
) -> torch.Tensor:
    """Return DAPO's soft overlong punishment (eq. 13).

    It is 0 up to ``max_length - buffer``, then falls in a line to ``-factor``.

    Args:
        lengths: ``[…]`` integer, tokens of each completion.
        max_length: tokens at which the punishment is whole.
        buffer: length of the slope in tokens.
        factor: the whole punishment, a reward; DAPO's is 1.

    Returns:
        ``[…]`` float32, to be added to the rewards; in ``[-factor, 0]``.

    Raises:
        ConfigError: when the buffer does not fit.
    """
    if not 0 < buffer <= max_length:
        raise ConfigError(
            "algorithm.overlong.buffer",
            f"{buffer} tokens of a limit of {max_length}",
            remedy="give an integer from 1 to rollout.max_new_tokens",
        )
    exceeded = (lengths - (max_length - buffer)).clamp(0, buffer).float()
    return -exceeded / buffer * factor


def informative(rewards: torch.Tensor) -> torch.Tensor:
    """Return which groups have completions that differ, for dynamic sampling (eq. 11).

    Other groups have no gradient.

    Args:
        rewards: ``[P, n]``, before the overlong punishment: a group whose completions differ only
            in length counts as flat.

    Returns:
        ``[P]`` bool.
    """
    return ~is_flat(rewards)

"""The seed from which this process draws its batches.

A right engine passes at every seed; `engine-conformance run --seed` and tools/margins.py try others
than 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

__all__ = ["cached_by_seed", "current_seed", "use_seed"]

P = ParamSpec("P")
T = TypeVar("T")

_seed = 0
_clear: list[Callable[[], None]] = []


def use_seed(seed: int) -> None:
    """Draw every batch from ``seed`` from now on, and forget those drawn from another one.

    Published certificates are of seed 0. The generated models do not depend on it.

    Raises:
        ValueError: if the seed is negative.
    """
    global _seed  # noqa: PLW0603 - batches are drawn in a hundred places, all from this seed
    if seed < 0:
        raise ValueError(f"expected a seed of 0 or more, got {seed}")
    if seed != _seed:
        _seed = seed
        for clear in _clear:
            clear()


def current_seed() -> int:
    """Return the seed of `use_seed`, 0 at first."""
    return _seed


def cached_by_seed(function: Callable[P, T]) -> Callable[P, T]:
    """Keep the function's results, which are made of batches, until another seed is used.

    One thread computes at a time: a batch is the key of other results by its identity, so that all
    lanes need the same object.
    """
    kept = cache(function)
    _clear.append(kept.cache_clear)
    computing = threading.RLock()

    @wraps(function)
    def find(*args: P.args, **kwargs: P.kwargs) -> T:
        with computing:
            return kept(*args, **kwargs)  # pyright: ignore[reportArgumentType] - they have a hash

    return find

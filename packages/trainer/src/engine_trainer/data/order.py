"""The order of samples as a pure function of seed and epoch."""

from __future__ import annotations

import random
from functools import lru_cache


class SampleOrder:
    """A map from position to sample index.

    A position counts samples from the beginning of the run over all epochs. The map depends neither
    on the world size nor on the batch size, so that a run continues exactly where it stopped, on
    any number of ranks.
    """

    def __init__(self, size: int, *, seed: int, shuffle: bool = True) -> None:
        assert size > 0, "an empty data set has no order"
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def __getitem__(self, position: int) -> int:
        """Return the index of the sample at ``position``, any integer >= 0."""
        return self._epoch(position // self.size)[position % self.size]

    def take(self, position: int, count: int) -> list[int]:
        """Return ``count`` sample indices from ``position`` on, also across the end of an epoch."""
        return [self[position + i] for i in range(count)]

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(self.size))
        if self.shuffle:
            # A text seed goes through SHA-512, so near seeds give unrelated orders, which are the
            # same on every machine.
            random.Random(f"engine_trainer:{self.seed}:{epoch}").shuffle(order)
        return order

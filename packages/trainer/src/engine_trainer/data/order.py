"""The order of samples: a pure function of (seed, epoch), and of nothing else."""

from __future__ import annotations

import random
from functools import lru_cache


class SampleOrder:
    """Position → index. A position counts samples from the beginning of the run over all epochs.

    It depends neither on the world size nor on the batch size, so that a run goes on exactly
    where it stopped, on any number of ranks.
    """

    def __init__(self, size: int, *, seed: int, shuffle: bool = True) -> None:
        assert size > 0, "an empty data set has no order"
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def __getitem__(self, position: int) -> int:
        """The sample at ``position``, any integer >= 0."""
        return self._epoch(position // self.size)[position % self.size]

    def take(self, position: int, count: int) -> list[int]:
        """``count`` samples from ``position`` on; across the end of an epoch."""
        return [self[position + i] for i in range(count)]

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(self.size))
        if self.shuffle:
            # A text seed goes through SHA-512: near seeds give unrelated orders, the same on every machine.
            random.Random(f"engine_trainer:{self.seed}:{epoch}").shuffle(order)
        return order

"""The device that tests of engines run on, and their pools of ranks on it.

It is a CPU, or the one that ``ENGINE_TEST_DEVICE`` names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine_conformance.ranks import RankPool

DEVICE = os.environ.get("ENGINE_TEST_DEVICE", "cpu")
# Largest difference relative to the largest element, for float32 sums in two orders. A GPU's
# kernels add up in orders of their own.
NEAR = 2e-5 if DEVICE == "cpu" else 1e-4


class Pools(dict[int, RankPool]):
    """Pools by their number of ranks, each of which starts when it is first asked for.

    A test that asks for more ranks than there are GPUs is skipped.
    """

    def __missing__(self, ranks: int) -> RankPool:
        if DEVICE == "cuda" and ranks > torch.cuda.device_count():
            pytest.skip(f"needs {ranks} GPUs")
        self[ranks] = RankPool(ranks, device=DEVICE, deadline=280.0)
        return self[ranks]


@contextmanager
def open_pools() -> Iterator[Pools]:
    """Yield pools, which are closed behind the block."""
    pools = Pools()
    try:
        yield pools
    finally:
        for pool in pools.values():
            pool.close()
